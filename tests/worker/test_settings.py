"""What the worker's command line makes of its options: frozen settings, or one line that says what to change."""

import sys

import pytest

from lamina.kernels.backend import GraphMode
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.reference import ReferenceBackend
from lamina.kernels.registry import create_backend
from lamina.rpc_worker import cli, command, daemon
from lamina.rpc_worker.describe import device_profile
from lamina.rpc_worker.settings import WorkerSettings, parse_edge_port
from lamina.spec.errors import InvalidConfig
from lamina.spec.ids import DeviceId, WorkerName
from support.cuda_emulated import EmulatedDevice


def settings_of(monkeypatch: pytest.MonkeyPatch, *options: str) -> WorkerSettings:
    """Those that a worker would run with. Raises SystemExit where the command line refuses them."""
    taken: list[WorkerSettings] = []

    async def run(settings: WorkerSettings) -> None:
        taken.append(settings)

    monkeypatch.setattr(command, "run_worker", run)
    monkeypatch.setattr(sys, "argv", ["rpc-worker", *options])
    with pytest.raises(SystemExit) as ended:
        command.main()
    if ended.value.code:
        raise ended.value
    return taken[0]


@pytest.mark.parametrize(("options", "threads"), [((), None), (("--threads", "0"), None), (("--threads", "3"), 3)])
def test_the_backend_chooses_its_threads(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], threads: int | None
) -> None:
    """A container's quota and SMT siblings are the backend's to know: nothing is chosen before it is asked."""
    assert settings_of(monkeypatch, *options).num_threads == threads


def test_a_negative_number_of_threads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of(monkeypatch, "--threads", "-2")
    assert "--threads must be at least 1, or 0 for all usable cores, got -2" in capsys.readouterr().err


def test_threads_are_shown_as_they_are() -> None:
    """Once, and only where the device has them."""
    for device, threads in (("reference", 0), ("cpu", 2)):
        backend = create_backend(device, threads=2)
        profile = device_profile(DeviceId(WorkerName("a"), 0), backend, backend.device_facts())
        backend.close()
        if backend.name == device:  # the native library may not be built
            assert profile.threads == threads
            assert "thread" not in profile.kernel


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--join", "192.0.2.7:50050"), "127.0.0.1:50051"),
        (("--join", "head:50050", "--listen", "[::1]:6000"), "[::1]:6000"),
        (("--join", "head:50050", "--listen", "0.0.0.0:1", "--insecure", "--advertise", "localhost:1"), "localhost:1"),
    ],
)
def test_a_remote_coordinator_needs_an_address_that_it_can_reach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], shown: str
) -> None:
    """It would wait for ever for a worker that dialled it, registered, and cannot be dialled back."""
    with pytest.raises(SystemExit):
        settings_of(monkeypatch, *options)
    said = " ".join(capsys.readouterr().err.split())
    assert f"cannot reach this one at {shown}; use --listen HOST:PORT with an address they can reach" in said


@pytest.mark.parametrize(
    "options",
    [
        ("--join", "127.0.0.1:50050"),
        ("--join", "head:50050", "--listen", "0.0.0.0:50051", "--insecure"),
        ("--join", "head:50050", "--advertise", "tunnel:50051"),
    ],
)
def test_joins_that_can_work(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    assert settings_of(monkeypatch, *options).join is not None


@pytest.mark.parametrize(
    ("variable", "options", "wanted"),
    [
        (None, (), "auto"),
        ("off", (), "off"),
        ("off", ("--cuda-graphs", "ON"), "on"),
    ],
)
def test_the_wish_for_graphs(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, options: tuple[str, ...], wanted: str
) -> None:
    """C-14: a flag beats the environment, which beats the default."""
    if variable is not None:
        monkeypatch.setenv("LAMINA_CUDA_GRAPHS", variable)
    assert settings_of(monkeypatch, *options).cuda_graphs == wanted


@pytest.mark.parametrize(
    ("option", "said"),
    [("--cuda-graphs", "is none of auto, on, off"), ("--compute-dtype", "is none of auto, f32, bf16, f16")],
)
def test_choices_that_do_not_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    with pytest.raises(SystemExit):
        settings_of(monkeypatch, option, "maybe")
    assert f"{option} 'maybe' {said}" in capsys.readouterr().err


def test_graphs_are_explained_once_per_card(caplog: pytest.LogCaptureFixture) -> None:
    """C-13, C-16: a Pascal and an Ada card of one worker each say once what they do and why; the CPU has no choice."""
    caplog.set_level("INFO")
    settings = WorkerSettings("a", compute_dtype="f16")
    for backend in (
        CudaBackend(device=EmulatedDevice((6, 1))),
        CudaBackend(device=EmulatedDevice((8, 9))),
        CudaBackend(device=EmulatedDevice((7, 5)), graphs=GraphMode.OFF),
        ReferenceBackend(),
    ):
        daemon._log_choices(settings, backend)
    assert caplog.messages == [
        "emulated GPU: CUDA graphs on trial: compute capability 6.1: kept only if a trial is equal bit for bit and"
        " faster",
        "emulated GPU: CUDA graphs on: compute capability 8.9 supports them",
        "emulated GPU: CUDA graphs off: switched off by this worker's configuration",
        "reference computes in f32; --compute-dtype f16 does not concern it",
    ]


@pytest.mark.parametrize(
    ("device", "threads", "is_told"),
    [("cpu", 3, True), ("cpu", 2, False), ("cpu", None, False), ("reference", 3, False)],
)
def test_more_threads_than_cores_are_worth_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, threads: int | None, is_told: bool
) -> None:
    monkeypatch.setattr(daemon, "usable_cores", lambda: 2)
    backend = create_backend(device, threads=1)
    daemon._log_choices(WorkerSettings("a", num_threads=threads), backend)
    backend.close()
    assert caplog.messages == is_told * [
        "--threads 3 is more than the 2 core(s) that this process may use, which slows every step; leave it out for one"
        " thread a core"
    ]


def test_an_interrupt_while_the_command_is_loaded_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> None:
            if name == "lamina.rpc_worker.command":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "lamina.rpc_worker.command")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == command.EXIT_INTERRUPTED


def test_an_interrupt_before_the_daemon_takes_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(settings: WorkerSettings) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_worker", run)
    monkeypatch.setattr(sys, "argv", ["rpc-worker"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == command.EXIT_INTERRUPTED


def test_a_worker_that_traces_says_that_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon._announce(settings_of(monkeypatch, "--trace-directory", "traces"), ())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tracing into traces: steps run op by op" in caplog.text


@pytest.mark.parametrize(
    ("text", "port"), [("any", 0), ("ANY", 0), ("none", None), ("1", 1), ("50052", 50052), ("65535", 65535)]
)
def test_edge_ports(text: str, port: int | None) -> None:
    assert parse_edge_port(text) == port


@pytest.mark.parametrize("text", ["", "0", "65536", "-1", "5005x", "123456", "off", "1.5"])
def test_what_is_no_edge_port_is_named(text: str) -> None:
    with pytest.raises(InvalidConfig, match=f"--edge-port {text!r} is neither any, nor none, nor a port"):
        parse_edge_port(text)
