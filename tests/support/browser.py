"""Headless Chromium by the DevTools protocol over a pipe: no port, no WebSocket, nothing beside the browser itself."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE_S = 20.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
)
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}
_SHIFT = 8


def find_chromium() -> str | None:
    """The browser's program, if there is one."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running browser with one page. Use `open_browser`."""

    def __init__(self, program: str, profile: str) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()

        def connect() -> None:  # in the child: the browser reads commands from 3 and writes answers to 4
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
            for number, end in zip((3, 4), ends, strict=True):
                os.dup2(end, number)
                os.close(end)

        flags = [*_FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        self._popen = subprocess.Popen(
            [program, *flags, "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._unread = b""
        self._last_id = 0
        self._session: str | None = None
        self._context: str | None = None
        self.events: list[dict[str, Any]] = []

    def open_page(self) -> None:
        """A fresh page in a context of its own; the events of the one before are forgotten."""
        self._session = None
        if self._context is not None:
            self.call("Target.disposeBrowserContext", browserContextId=self._context)
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280, 800)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """One command of the protocol. Raises AssertionError for an error, TimeoutError without an answer."""
        self._last_id += 1
        message: dict[str, object] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        end_s = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next_message(end_s)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next_message(self, end_s: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._answers], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def go(self, url: str) -> None:
        """Load a page and wait until its scripts have started."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str, deadline_s: float = DEADLINE_S) -> None:
        """Until a JavaScript expression is true."""
        end_s = time.monotonic() + deadline_s
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end_s, f"never true: {condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Text into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """One key down and up."""
        common: dict[str, object] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": _KEYS[key],
            "modifiers": _SHIFT if shift else 0,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int, height: int) -> None:
        """The page's size in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def set_dark(self, is_dark: bool) -> None:
        """What prefers-color-scheme says."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """A PNG of what is seen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def problems(self) -> list[str]:
        """What the console complained of: exceptions, refused loads, violations of the content security policy."""
        found = []
        for event in self.events:
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(event["params"]["exceptionDetails"]))
                case "Log.entryAdded" if event["params"]["entry"]["level"] in ("error", "warning"):
                    found.append(event["params"]["entry"]["text"])
                case "Runtime.consoleAPICalled":
                    found.append(json.dumps(event["params"]["args"]))
        return found

    def requested_urls(self) -> list[str]:
        """Everything the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        """End the browser and what it started."""
        os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        os.close(self._commands)
        os.close(self._answers)


@contextmanager
def open_browser(program: str) -> Iterator[Browser]:
    """A browser with an empty profile, ended on the way out."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            browser.open_page()
            yield browser
        finally:
            browser.close()
