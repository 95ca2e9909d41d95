"""Processes come and go: the demo leaves nothing behind, a lost worker costs one request, memory comes back."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.cluster import ROOT, addresses, coordinator, environment, running_workers, start_coordinator
from support.models import smollm2_path

pytestmark = pytest.mark.e2e

TINY = ROOT / "tests/data/tiny_llama_tied.gguf"
DEMO = [sys.executable, str(ROOT / "deploy/demo.py"), "--model"]


def children_of(session_leader: int) -> list[int]:
    """Living processes started by the demo: their command lines name our programs and their ancestor is it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "status").read_text()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if re.search(rf"^PPid:\s+{session_leader}$", status, re.MULTILINE) and "State:\tZ" not in status:
            found.append(int(entry.name))
            assert "rpc-worker" in command or "coordinator" in command or "python" in command
    return found


def alive(pids: list[int]) -> list[int]:
    """Those that still run (zombies do not)."""
    running = []
    for pid in pids:
        try:
            if "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                running.append(pid)
        except OSError:
            continue
    return running


def start_demo() -> "subprocess.Popen[str]":
    command = [*DEMO, str(smollm2_path()), "Count from one to fifty in words."]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), start_new_session=True
    )


def wait_until_all_run(demo: "subprocess.Popen[str]") -> list[int]:
    """Child pids once two workers and the coordinator are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = children_of(demo.pid)
        if len(children) == 3:
            return children
        assert demo.poll() is None, demo.stdout.read() if demo.stdout else ""
        time.sleep(0.05)
    raise AssertionError("the demo's three processes did not start")


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_demo_leaves_no_process_behind_when_interrupted(number: signal.Signals) -> None:
    demo = start_demo()
    children = wait_until_all_run(demo)
    time.sleep(0.3)
    demo.send_signal(number)
    demo.wait(30)
    assert_gone(children)
    if number is signal.SIGINT:
        assert demo.returncode == 130


def test_demo_answers_and_ends() -> None:
    command = [*DEMO, str(smollm2_path()), "Explain in two sentences why the sky is blue."]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "scatter" in result.stdout
    assert re.search(r"prefill: \d+ tokens in .* tokens/s \| decode: \d+ tokens in .* tokens/s", result.stderr)
    assert re.search(r"^0 +worker-a/0 cpu +0-\d+ +[\d.]+ ", result.stderr, re.MULTILINE), "the split"


def test_a_lost_worker_costs_one_line_and_nothing_else() -> None:
    """C-18, P-01: killed while it generates; the run ends soon with the worker's name, the other worker serves on."""
    with running_workers(3) as workers:
        model = str(smollm2_path())
        common = ("--split", "0-14,15-29", "--max-tokens", "4000", "--raw", "--context", "4200")
        run = start_coordinator("run", model, "Once upon a time", *common, "--workers", addresses(workers[:2]))
        run.wait_for("loaded stage 1|loaded stage 0")
        time.sleep(0.5)
        assert run.popen.poll() is None
        workers[1].kill()
        started = time.monotonic()
        assert run.popen.wait(20) == 2
        assert time.monotonic() - started < 10
        output = "".join(run.lines)
        assert "Traceback" not in output
        run.wait_for(r"coordinator: .*(w1|stage 1)")
        again = coordinator(
            "run",
            model,
            "The capital of France is",
            "--raw",
            "-q",
            "--max-tokens",
            "3",
            "--workers",
            addresses([workers[0], workers[2]]),
        )
        assert again.returncode == 0, again.stderr
        assert "Paris" in again.stdout


def test_interrupted_run_frees_its_stages() -> None:
    """Ctrl-C at the coordinator: exit code 130, and the worker holds no stage afterwards."""
    with running_workers(1) as workers:
        run = start_coordinator(
            "run",
            str(smollm2_path()),
            "Once upon a time",
            "--raw",
            "--max-tokens",
            "2000",
            "--workers",
            addresses(workers),
        )
        run.wait_for("loaded stage 0")
        time.sleep(0.2)
        assert run.stop(signal.SIGINT) == 130
        assert "Traceback" not in "".join(run.lines)
        assert rss_bytes(workers[0].popen.pid) < 400 * 2**20
        described = coordinator("plan", str(smollm2_path()), "--json", "--workers", addresses(workers))
        assert described.returncode == 0


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


BUSY = """
import time
from concurrent.futures import ThreadPoolExecutor
from lamina.rpc_worker import daemon, stage
daemon._GRACE_S = daemon._STOP_DEADLINE_S = 0.3

def load(*_):
    print("compiling", flush=True)
    with ThreadPoolExecutor(1) as pool:  # whose threads Python waits for when it ends
        pool.submit(time.sleep, 30).result()

stage.Stage.load = load
"""


def test_a_worker_that_compiles_ends_when_it_says() -> None:
    """SIGTERM while the device is busy with what cannot be interrupted: left behind after the deadline, exit code 0."""
    with running_workers(1, device="reference", prelude=BUSY) as (worker,):
        started = start_coordinator("run", str(TINY), "a", "--workers", worker.address)
        worker.wait_for("compiling")
        start_s = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - start_s < 5
        assert "leaving it behind" in "".join(worker.lines)
        assert started.popen.wait(20) == 2
