"""Mistakes a user makes: one line with cause and remedy, exit code 2, no traceback, and the daemon survives."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lamina.spec.gguf import read_gguf
from support.cluster import (
    COORDINATOR,
    WorkerProcess,
    addresses,
    coordinator,
    environment,
    running_workers,
    start_coordinator,
)

TINY = Path(__file__).parents[1] / "data" / "tiny_llama_tied.gguf"

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerProcess]]:
    with running_workers(2, device="reference") as started:
        yield started


def assert_one_line(result: "subprocess.CompletedProcess[str]", *wanted: str) -> None:
    """Exit code 2 and a last line of standard error that holds all of `wanted`."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("coordinator: ")]
    assert len(errors) == 1, result.stderr
    for text in wanted:
        assert text in errors[0], errors[0]


def assert_still_serves(workers: list[WorkerProcess]) -> None:
    result = coordinator("run", str(TINY), "a", "--raw", "-q", "--max-tokens", "2", "--workers", addresses(workers))
    assert result.returncode == 0, result.stderr


def run_with(workers: list[WorkerProcess], model: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return coordinator("run", str(model), "a", "--raw", "--workers", addresses(workers), *options)


@contextmanager
def silent_port() -> Iterator[str]:
    """Where something listens and never speaks."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("command", ["run", "plan", "serve"])
def test_ctrl_c_while_connecting(command: str) -> None:
    """Who takes more than a second to answer is named, and nobody need wait for him."""
    arguments = {"run": ["a"], "plan": [], "serve": ["--port", "0"]}[command]
    with silent_port() as address:
        started = start_coordinator(command, str(TINY), *arguments, "--workers", address)
        try:
            started.wait_for(rf"connecting to {address} …")
            start_s = time.monotonic()
            assert started.stop(signal.SIGINT) == (0 if command == "serve" else 130)
            assert time.monotonic() - start_s < 2
            assert "Traceback" not in "".join(started.lines)
        finally:
            started.stop()


def test_all_workers_that_do_not_answer_are_named(workers: list[WorkerProcess]) -> None:
    with silent_port() as one, silent_port() as other:
        silent = coordinator("run", str(TINY), "a", "--workers", f"{one},{workers[0].address},{other}")
        assert_one_line(silent, f"worker {one}: no connection", f"(nobody answers at {one}, {other})")
        assert f"connecting to {one}" in silent.stderr
        quiet = coordinator("run", str(TINY), "a", "-q", "--workers", one)
        assert "connecting" not in quiet.stderr


def test_wrong_path(workers: list[WorkerProcess], tmp_path: Path) -> None:
    assert_one_line(run_with(workers, tmp_path / "absent.gguf"), "absent.gguf", "no such file")


def test_not_a_gguf(workers: list[WorkerProcess], tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(1000))
    assert_one_line(run_with(workers, other), "other.gguf", "GGUF")


def test_truncated_gguf(workers: list[WorkerProcess], tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(TINY.read_bytes()[:-4096])
    assert_one_line(run_with(workers, cut), "cut.gguf")


def test_unsupported_architecture(workers: list[WorkerProcess], tmp_path: Path) -> None:
    other = tmp_path / "mamba.gguf"
    other.write_bytes(TINY.read_bytes().replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\0\0\0\0\0\0\0mamba"))
    assert_one_line(run_with(workers, other), "mamba")


def test_unreachable_worker() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    result = coordinator("run", str(TINY), "a", "--workers", f"127.0.0.1:{port}")
    assert_one_line(result, f"127.0.0.1:{port}", "no connection")


def test_open_but_silent_port() -> None:
    """P-27: something accepts the connection and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert_one_line(coordinator("run", str(TINY), "a", "--workers", address, timeout_s=30), address)


def test_closed_standard_streams(workers: list[WorkerProcess]) -> None:
    """As a shell or a service manager may start it."""
    command = ["bash", "-c", 'exec "$0" "$@" <&-', *COORDINATOR, "run", str(TINY), "--workers", addresses(workers)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert_one_line(result, "there is no prompt")
    command = ["bash", "-c", 'exec "$0" "$@" >&- 2>&-', *COORDINATOR, "plan", str(TINY), "--memory", "1G"]
    assert subprocess.run(command, env=environment(), check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")
def test_a_worker_whose_output_is_full() -> None:
    worker = [sys.executable, "-m", "lamina.rpc_worker.cli", "--device", "mock", "--listen", "127.0.0.1:0"]
    command = ["bash", "-c", 'exec "$0" "$@" >/dev/full', *worker]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "rpc-worker: [Errno 28] No space left on device"


def test_version_mismatch() -> None:
    """C-03, P-25: both versions are named."""
    other_release = "import lamina.wire.version as version; version.PROTOCOL_MAJOR = 99"
    with running_workers(1, device="reference", prelude=other_release) as started:
        result = coordinator("run", str(TINY), "a", "--workers", addresses(started))
        assert_one_line(result, "protocol 99.", "protocol 1.", "w0")


def test_schema_mismatch() -> None:
    """P-25: a schema that changed without a version bump is noticed as well."""
    other_schema = "import lamina.wire.version as v; v.cluster_pb2 = v.step_pb2"
    with running_workers(1, device="reference", prelude=other_schema) as started:
        result = coordinator("run", str(TINY), "a", "--workers", addresses(started))
        assert_one_line(result, "schema", "w0")


def test_out_of_memory(tmp_path: Path) -> None:
    """B-42, B-29: asked and free are named, and the worker lives on."""
    with running_workers(1, "--max-memory", "200K", device="reference") as started:
        result = coordinator("run", str(TINY), "a", "--workers", addresses(started), "--context", "64")
        assert_one_line(result, "MiB", "free")
        assert started[0].popen.poll() is None


def test_port_in_use(workers: list[WorkerProcess]) -> None:
    second = WorkerProcess("second", "--listen", workers[0].address, device="reference")
    assert second.popen.wait(30) == 2
    second.wait_for("rpc-worker: cannot listen on .*in use.*--listen")
    assert len(second.lines) == 1, second.lines  # gRPC's own line would be another


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ("0-0", "the split covers layers 0"),
        ("0-0,0-1", "overlap"),
        ("0,2-3", "leave a gap"),
        ("0-0,1-7", "0-7"),
        ("1-0", "ends before it starts"),
        ("a-b", "FIRST-LAST"),
        ("0,1,1", "3 ranges"),
    ],
)
def test_bad_split(workers: list[WorkerProcess], split: str, wanted: str) -> None:
    assert_one_line(run_with(workers, TINY, "--split", split), wanted)


def test_bad_split_file(workers: list[WorkerProcess], tmp_path: Path) -> None:
    file = tmp_path / "split.yaml"
    file.write_text(f"workers:\n  - address: {workers[0].address}\n    layers: 0-0\n  - adress: x\n    layers: 1-1\n")
    result = coordinator("run", str(TINY), "a", "--split-file", str(file))
    assert_one_line(result, "split.yaml:4", "adress")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "0"), "top_p"),
        (("--context", "0"), "--context"),
        (("--context", "1M"), "--context"),
        (("--kv-dtype", "q3"), "--kv-dtype 'q3' is none of f32, f16"),
        (("--workers", "nowhere"), "nowhere"),
    ],
)
def test_bad_option(options: tuple[str, str], wanted: str) -> None:
    assert_one_line(coordinator("run", str(TINY), "a", *options), wanted)


@pytest.mark.parametrize("quiet", [False, True])
def test_a_worker_without_a_range_is_named(workers: list[WorkerProcess], quiet: bool) -> None:
    """No mistake that stops anything, but nobody should wonder why a machine does nothing."""
    num_layers = read_gguf(TINY).metadata["llama.block_count"]
    result = run_with(workers, TINY, "--split", f"0-{num_layers - 1}", "--max-tokens", "2", *["--quiet"] * quiet)
    assert result.returncode == 0, result.stderr
    told = f"worker w1 at {workers[1].address} holds no layers and idles: the split has no range for it"
    assert (told in result.stderr) is not quiet
    assert "worker w0 at" not in result.stderr


def test_no_workers() -> None:
    assert_one_line(coordinator("run", str(TINY), "a"), "--workers", "rpc-worker")


def test_prompt_longer_than_the_context(workers: list[WorkerProcess]) -> None:
    """A-43."""
    result = coordinator(
        "run", str(TINY), "--raw", "--workers", addresses(workers), "--context", "32", stdin="word " * 100
    )
    assert_one_line(result, "32")


def test_the_workers_survived_all_of_it(workers: list[WorkerProcess]) -> None:
    """Runs last in this file; the fixture's two workers have seen every mistake above."""
    assert_still_serves(workers)


def test_worker_ends_cleanly_on_sigterm() -> None:
    with running_workers(1, device="reference") as started:
        assert started[0].stop() == 0
