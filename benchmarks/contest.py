"""Contestants as child processes that speak JSON lines, so that two systems can take turns within one run.

A contestant answers `decode`, `prefill` and `streams` with tokens per second. Owns the protocol (both ends), worker and
server processes, and ports. Standard library only: the peer's environment has nothing else.
"""

import ctypes
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
STREAM_PROMPT_TOKENS = 16
_LISTENING = re.compile(r"listening on (\S+)")
_ALARM = re.compile(r"\bERROR\b|\bCRITICAL\b|Traceback|Exception|\bnever (awaited|retrieved)")
_START_S = 60.0
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
_SOURCE_ROOTS = ("proto", "coordinator", "rpc_worker", "kernels")

Handler = Callable[..., object]


class ContestantFailed(RuntimeError):
    """A contestant refused a command, died, or took too long; the message has what it said."""


def serve_commands(handlers: Mapping[str, Handler]) -> None:
    """The child's side: answer each line of standard input on standard output until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        op = command.pop("op")
        try:
            answer: dict[str, object] = {"result": handlers[op](**command)}
        except Exception as error:  # the parent raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Contestant:
    """The parent's side of one child. Close it; it is killed at the latest then."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log = Tail()
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(env or child_environment()), start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_answers, daemon=True).start()
        self._log.follow(self._process.stderr)

    def ask(self, op: str, timeout_s: float = 300.0, **arguments: object) -> Any:
        """One command, one result. Raises ContestantFailed."""
        stdin = self._process.stdin
        if stdin is None or self._process.poll() is not None:
            raise ContestantFailed(f"{self.name} is gone: {self._log.last_words()}")
        try:
            stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except BrokenPipeError:
            line = ""
        except queue.Empty:
            raise ContestantFailed(f"{self.name}: no answer to {op} within {timeout_s:g} s: {self._log.text}") from None
        if not line:
            self._answers.put(line)  # for whoever asks again
            raise ContestantFailed(f"{self.name} died during {op}: {self._log.last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ContestantFailed(f"{self.name}: {op}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the child: by end of input, by signal if it does not go."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        stop_process(self._process)

    def _read_answers(self) -> None:
        for line in self._process.stdout or ():
            self._answers.put(line)
        self._answers.put("")


def start_ours(prefix: Sequence[str] = ()) -> Contestant:
    """lamina's engine over worker processes, before `load`."""
    return Contestant("lamina", [*prefix, sys.executable, str(HERE / "ours.py")])


def start_inprocess() -> Contestant:
    """The same stage without gRPC, before `load`."""
    return Contestant("lamina in process", [sys.executable, str(HERE / "inprocess.py")])


class Tail:
    """The last lines of what a process says on a pipe, and all of them while it is young."""

    def __init__(self, num_lines: int = 40) -> None:
        self.alarms: list[str] = []  # lines that tell of an error
        self._lines: list[str] = []
        self._num_lines = num_lines
        self._news = threading.Condition()
        self._ended = False

    def follow(self, pipe: Any) -> None:
        """Read the pipe on a thread until it ends."""
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    @property
    def text(self) -> str:
        with self._news:
            return " | ".join(line.strip() for line in self._lines[-8:])

    def last_words(self, timeout_s: float = 2.0) -> str:
        """What was said last by a process that has ended, once all of it is read."""
        with self._news:
            self._news.wait_for(lambda: self._ended, timeout_s)
        return self.text

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float) -> re.Match[str]:
        """The first line that matches. Raises ContestantFailed when the pipe or the time ends first."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._news:
            while True:
                for line in self._lines[seen:]:
                    if match := pattern.search(line):
                        return match
                seen = len(self._lines)
                if self._ended or not self._news.wait(max(0.0, deadline - time.monotonic())):
                    raise ContestantFailed(f"waited for {pattern.pattern!r}, got: {' | '.join(self._lines[-8:])}")

    def _read(self, pipe: Any) -> None:
        for line in pipe:
            with self._news:
                self._lines.append(line)
                if _ALARM.search(line):
                    self.alarms.append(line.strip())
                if len(self._lines) > 10 * self._num_lines:
                    del self._lines[: -self._num_lines]
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


def stop_process(process: "subprocess.Popen[str]", grace_s: float = 5.0) -> None:
    """End a process of ours: politely, then for good."""
    try:
        process.wait(timeout=0.5 if process.stdin is not None else 0.0)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Worker:
    """A lamina worker process, listening."""

    def __init__(
        self,
        name: str,
        *,
        device: str = "cpu",
        threads: int = 1,
        listen: str = "127.0.0.1:0",
        advertise: str = "",
        prefix: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> None:
        command = [*prefix, sys.executable, "-m", "lamina.rpc_worker.cli", "--device", device, "--name", name]
        command += ["--threads", str(threads), "--listen", listen, *more]
        if advertise:
            command += ["--advertise", advertise]
        if not listen.startswith("127."):
            command.append("--insecure")
        self.log = Tail()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=child_environment(),
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        self.log.follow(self.process.stdout)
        try:
            self.address = self.log.wait_for(_LISTENING, _START_S)[1]
        except ContestantFailed:
            stop_process(self.process)
            raise

    def close(self) -> None:
        stop_process(self.process)


def die_with_parent() -> None:
    """A benchmark that is killed leaves nothing behind; on Linux, where there is a way."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment with lamina's source roots in front, so that a child finds what this checkout has."""
    roots = [str(REPO / root) for root in _SOURCE_ROOTS]
    path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_for_port(host: str, port: int, deadline_s: float = 20.0) -> None:
    """Until something accepts connections there. Raises ContestantFailed."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex((host, port)) == 0:
                return
        time.sleep(0.05)
    raise ContestantFailed(f"nothing listens on {host}:{port} after {deadline_s:g} s")


def random_ids(num_tokens: int, salt: int) -> list[int]:
    """Token ids of SmolLM2's ordinary vocabulary, the same for the same salt on both sides."""
    state = (salt * 2654435761 + 12345) % 2**32
    ids = []
    for _ in range(num_tokens):
        state = (state * 1664525 + 1013904223) % 2**32
        ids.append(300 + (state >> 8) % 48000)
    return ids
