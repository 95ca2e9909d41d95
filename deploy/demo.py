"""The quickstart: two CPU workers and a coordinator on loopback, as separate processes, answer one prompt.

However it ends (answer, Ctrl-C, failure, kill), no process stays behind: children share a process group that is ended
on the way out, and the kernel ends each child should this launcher vanish.
"""

import argparse
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In the child: be ended when the launcher is (Linux only; elsewhere the process group must do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Worker:
    """One `rpc-worker` process on a free loopback port."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.address = ""
        self._ready = threading.Event()
        command = [str(Path(sys.executable).with_name("rpc-worker")), "--device", "cpu", "--listen", "127.0.0.1:0"]
        command += ["--name", name, "--threads", str(threads), "--log-level", "warning"]
        # Children ignore the terminal's Ctrl-C: the launcher ends them, in order.
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=die_with_parent
        )
        threading.Thread(target=self._follow, daemon=True).start()

    def wait_until_ready(self) -> None:
        """Raises SystemExit if the worker ends or stays silent."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._ready.wait(0.05):
            if self.process.poll() is not None:
                raise SystemExit(f"worker {self.name} ended with exit code {self.process.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit(f"worker {self.name} did not start within {START_DEADLINE_S:g} s")

    def _follow(self) -> None:
        """Pass the worker's table on, and find the port it got."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if match := re.search(r"listening on (\S+)", line):
                self.address = match[1]
                sys.stderr.write("".join(lines))
                sys.stderr.flush()
                self._ready.set()


def stop(processes: list["subprocess.Popen[str]"]) -> None:
    """Ask all to end, then insist."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_DEADLINE_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_demo(model: Path, prompt: str) -> int:
    """The coordinator's exit code."""
    processes: list[subprocess.Popen[str]] = []
    try:
        threads = max(1, (os.cpu_count() or 2) // 2)
        workers = []
        for name in ("worker-a", "worker-b"):
            workers.append(Worker(name, threads))
            processes.append(workers[-1].process)
        for worker in workers:
            worker.wait_until_ready()
        command = [str(Path(sys.executable).with_name("coordinator")), "run", str(model), prompt]
        command += ["--workers", ",".join(worker.address for worker in workers), "--max-tokens", "128"]
        print(f"\n> {prompt}\n", file=sys.stderr, flush=True)
        coordinator = subprocess.Popen(command, text=True, start_new_session=True, preexec_fn=die_with_parent)
        processes.insert(0, coordinator)
        return coordinator.wait()
    finally:
        stop(processes)


def main() -> None:
    """Entry point; exit code 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("prompt")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(run_demo(arguments.model, arguments.prompt))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
