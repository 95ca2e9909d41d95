"""What a worker says of a real card: health, memory of recordings, device activity in a trace, the self-test."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.backend import Backend
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.device import ExecutableGraph
from lamina.kernels.reference import ReferenceBackend
from lamina.kernels.registry import create_backend, present_devices
from lamina.rpc_worker import self_test
from lamina.rpc_worker.explain import explain_device
from lamina.rpc_worker.self_test import run_self_test
from lamina.rpc_worker.tracing import _DEVICE_TRACK, TraceFile, Tracer, find_ranges
from lamina.spec.placement import StageSettings
from lamina.spec.quant import GgmlType
from support.backends import relative_error
from support.inprocess import InProcessModel
from support.overflow import write_f16_llama
from support.tiny import write_tiny_llama

pytestmark = pytest.mark.gpu

SETTINGS = StageSettings(max_rows=128, max_seqs=2, max_logit_rows=2, max_context=256, kv_dtype="f16")


@pytest.fixture(scope="module")
def cuda() -> Iterator[Backend]:
    backend = create_backend("cuda:0")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "m.gguf"
    return write_tiny_llama(path, matrix_type=GGMLQuantizationType.Q4_K, hidden=256, ff=512, layers=3)


def test_the_card_is_found_and_measured(cuda: Backend) -> None:
    """C-05: NVML finds the very card by its UUID; an H200 draws power, is warm, and has a link."""
    pytest.importorskip("pynvml")
    assert present_devices()[:2] == ("cpu", "cuda:0")
    health = cuda.health()
    assert health is not None
    assert 10 < health.temperature_c < 110
    assert health.power_w > 10
    assert health.clock_mhz > 0
    assert 0 <= health.busy_ratio <= 1
    assert health.pcie_generation <= health.max_pcie_generation


def test_recordings_are_counted_in_bytes(cuda: Backend, model: Path) -> None:
    """C-15: what the driver lost to them, given back when they are destroyed."""
    tested = InProcessModel(model, cuda, (), SETTINGS)
    for count in (1, 2, 5, 17, 70):
        tested.reset()
        tested.step({0: list(range(count))})
    counts = tested.stages[0]._graphs.counts
    assert counts.captures >= 4
    assert 0 <= counts.held_bytes < 256 << 20
    tested.free()
    assert tested.stages[0]._graphs.counts.held == 0


def test_a_graph_that_cannot_be_instantiated_costs_no_step(
    cuda: Backend, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B-09: with the real driver: the capture is broken in the middle, and the very next launches work."""
    assert isinstance(cuda, CudaBackend)
    whole = InProcessModel(model, cuda, (), SETTINGS)
    wanted = whole.step({0: [1, 2, 3]})
    whole.free()
    real = cuda.device.capture

    def broken(calls: object) -> ExecutableGraph:
        def fail() -> None:
            raise RuntimeError("in mid-capture")

        return cuda.device._driver.capture(fail)  # type: ignore[attr-defined,no-any-return]

    monkeypatch.setattr(cuda.device, "capture", broken)
    tested = InProcessModel(model, cuda, (), SETTINGS)
    found = tested.step({0: [1, 2, 3]})
    assert (found == wanted).all()
    assert tested.stages[0]._graphs.counts.vetoes == {"capture failed": 1}
    tested.free()
    monkeypatch.setattr(cuda.device, "capture", real)


def test_a_trace_has_the_cards_activity(cuda: Backend, model: Path, tmp_path: Path) -> None:
    """A-11: every innermost scope has a device event of positive length, in order, within the step."""
    trace = TraceFile(tmp_path, "gpu")
    tracer = Tracer(trace, cuda, 0, find_ranges())
    tested = InProcessModel(model, cuda, (), SETTINGS, tracer)
    for _ in range(2):
        tested.step({0: [1, 2, 3]})
    trace.close()
    events = json.loads(trace.path.read_text())
    device = [event for event in events if event["ph"] == "X" and event["tid"] >= _DEVICE_TRACK]
    linears = [event for event in device if event["cat"] == "linear"]
    assert len(linears) == 2 * (4 * 3 + 1)
    assert all(0 < event["dur"] < 1e6 for event in linears)
    assert [e["ts"] for e in device] == sorted(e["ts"] for e in device)
    tested.free()


def test_the_card_passes_its_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-09."""
    monkeypatch.setattr(self_test, "PROBE_TYPES", (GgmlType.F16, GgmlType.Q4_K, GgmlType.Q6_K))
    for finding in run_self_test({"cuda:0": lambda: create_backend("cuda:0")}, None):
        assert finding.ok, finding


def test_the_card_is_explained() -> None:
    report = explain_device("cuda:0", lambda: create_backend("cuda:0"), None, "auto")
    assert report.failure == ""
    assert report.compute_dtype in ("bf16", "f16", "f32")
    assert len(report.kernels) > 20


@pytest.mark.parametrize("cuts", [(), (2,)], ids=["whole", "split"])
@pytest.mark.parametrize("overflows", [False, True])
def test_f16_on_the_card(
    cuda: Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture, overflows: bool, cuts: tuple[int, ...]
) -> None:
    """A-02, A-06, A-08: what overflows in f16 goes on in bf16, over keys and values that the next steps can use."""
    path = write_f16_llama(tmp_path / "m.gguf", overflowing=overflows)
    exact = InProcessModel(path, ReferenceBackend(), cuts, SETTINGS)
    tested = InProcessModel(path, cuda, cuts, SETTINGS, compute="f16")
    prompt = [(37 * i + 11) % 300 for i in range(100)]  # more rows than the int8 kernels take
    for tokens in (prompt, [5], [6, 7], [8]):
        assert relative_error(tested.step({0: tokens}), exact.step({0: tokens})) < 0.02
    warnings = [record.getMessage() for record in caplog.records if "exceed f16" in record.getMessage()]
    assert len(warnings) == overflows
    assert tested.stages[0]._precision.dtype.value == ("bf16" if overflows else "f16")
    tested.free()
