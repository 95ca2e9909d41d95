"""The quickstart: two CPU workers and a coordinator on loopback, as separate processes, answer one prompt.

However it ends (answer, Ctrl-C, failure, kill), no process stays behind: children share a process group that is ended
on the way out, and the kernel ends each child should this launcher vanish.
"""

import argparse
import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0
_PR_SET_PDEATHSIG = 1
_LAUNCHER = os.getpid()
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """In the child: be ended when the launcher is (Linux only; elsewhere the process group must do)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != _LAUNCHER:  # it was gone before the line above
            os._exit(1)


def start(*command: str, stdout: int | None = None) -> "subprocess.Popen[str]":
    """Start one of lamina's programs, from beside this Python. The terminal's Ctrl-C does not reach it."""
    program = Path(sys.executable).with_name(command[0])
    return subprocess.Popen(
        [str(program), *command[1:]], text=True, start_new_session=True, preexec_fn=die_with_parent, stdout=stdout
    )


class Worker:
    """One `rpc-worker` process on a free loopback port."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        options = ["--device", "cpu", "--listen", "127.0.0.1:0", "--name", name, "--threads", str(threads)]
        self.process = start("rpc-worker", *options, "--log-level", "warning", stdout=subprocess.PIPE)

    def wait_for_address(self) -> str:
        """Where it listens, once it does; its table of devices is passed on. Raises SystemExit if it never does."""
        assert self.process.stdout is not None
        text = ""
        deadline = time.monotonic() + START_DEADLINE_S
        while not (match := re.search(r"listening on (\S+)\n", text)):
            if time.monotonic() > deadline:
                raise SystemExit(f"worker {self.name} did not start within {START_DEADLINE_S:g} s")
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                piece = os.read(self.process.stdout.fileno(), 65536)
                if not piece:
                    raise SystemExit(f"worker {self.name} ended with exit code {self.process.wait()}")
                text += piece.decode(errors="replace")
        print(text, end="", file=sys.stderr, flush=True)
        return match[1]


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


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 2


def run_demo(model: Path, prompt: str) -> int:
    """The coordinator's exit code."""
    processes: list[subprocess.Popen[str]] = []
    threads = max(1, num_cores() // 2)
    try:
        workers = []
        for name in ("worker-a", "worker-b"):
            workers.append(Worker(name, threads))
            processes.append(workers[-1].process)
        addresses = ",".join(worker.wait_for_address() for worker in workers)
        print(f"\n> {prompt}\n", file=sys.stderr, flush=True)
        coordinator = start("coordinator", "run", str(model), prompt, "--workers", addresses, "--max-tokens", "128")
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
