"""Real processes for tests: workers on free loopback ports, the coordinator's command line. Nothing stays behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 60.0
_WORKER = "from lamina.rpc_worker.cli import main; main()"
COORDINATOR = [sys.executable, "-c", "from lamina.coordinator.cli import main; main()"]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: the source roots, one BLAS thread, no LAMINA_* settings of the person who tests."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("LAMINA_") or key.startswith("LAMINA_CPU_")
    }
    roots = os.pathsep.join(str(ROOT / root) for root in ("proto", "coordinator", "rpc_worker", "kernels"))
    return {**kept, "PYTHONPATH": roots, "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "200", **(extra or {})}


class Process:
    """A child whose combined output is followed; `wait_for` a line, then `stop` or `kill` it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.popen = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(env),
            start_new_session=True,
        )
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def wait_for(self, pattern: str, deadline_s: float = START_DEADLINE_S) -> re.Match[str]:
        """The first match of a regular expression in the output so far. Raises AssertionError without one."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if match := re.search(pattern, "".join(self.lines)):
                return match
            if self.popen.poll() is not None:
                self._follower.join(1)
                if match := re.search(pattern, "".join(self.lines)):
                    return match
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in:\n{''.join(self.lines)}")

    def stop(self, number: int = signal.SIGTERM, deadline_s: float = 20.0) -> int:
        """Send a signal and wait; the exit code. Raises TimeoutExpired, after killing it, if it does not end."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL."""
        self.popen.kill()
        self.popen.wait()

    def _follow(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line)


class WorkerProcess(Process):
    """An `rpc-worker`; `address` once it listens. `prelude` is Python run before it, to make it another release."""

    def __init__(self, name: str, *options: str, device: str = "cpu", prelude: str = "") -> None:
        listen = [] if "--listen" in options else ["--listen", "127.0.0.1:0"]
        command = [sys.executable, "-c", f"{prelude}\n{_WORKER}", "--name", name, "--device", device]
        super().__init__([*command, "--threads", "1", *listen, *options])
        self.name = name
        self.address = ""

    def wait_until_ready(self) -> None:
        """Blocks until it listens."""
        self.address = self.wait_for(r"listening on (\S+)")[1]


@contextmanager
def running_workers(count: int, *options: str, device: str = "cpu", prelude: str = "") -> Iterator[list[WorkerProcess]]:
    """Workers w0, w1, …, stopped again on the way out."""
    workers = [WorkerProcess(f"w{i}", *options, device=device, prelude=prelude) for i in range(count)]
    try:
        for worker in workers:
            worker.wait_until_ready()
        yield workers
    finally:
        for worker in workers:
            if worker.popen.poll() is None:
                worker.popen.send_signal(signal.SIGTERM)
        for worker in workers:
            try:
                worker.popen.wait(20)
            except subprocess.TimeoutExpired:
                worker.kill()


def addresses(workers: Sequence[WorkerProcess]) -> str:
    """The value of --workers."""
    return ",".join(worker.address for worker in workers)


def coordinator(
    *arguments: str, stdin: str | None = None, timeout_s: float = 120.0, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `coordinator` to its end."""
    return subprocess.run(
        [*COORDINATOR, *arguments],
        input=stdin if stdin is not None else "",
        capture_output=True,
        text=True,
        env=environment(env),
        timeout=timeout_s,
        check=False,
    )


def start_coordinator(*arguments: str, env: Mapping[str, str] | None = None) -> Process:
    """Start `coordinator` and follow it."""
    return Process([*COORDINATOR, *arguments], env)
