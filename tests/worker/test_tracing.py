"""Traces of a stage: nesting, device activity, NVTX ranges that are balanced whatever NVTX says (A-10 to A-17)."""

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.backend import Backend
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.mock import MockBackend, MockRates
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker import tracing
from lamina.rpc_worker.daemon import Daemon
from lamina.rpc_worker.settings import WorkerSettings
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.rpc_worker.tracing import ScopeKind, TraceFile, Tracer
from lamina.spec.address import Address
from lamina.spec.digest import model_digest
from lamina.spec.errors import InvalidConfig
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.placement import StageSettings
from lamina.spec.step import SeqSlice, StepPlan, Tokens
from support.cuda_emulated import EmulatedDevice
from support.tiny import write_tiny_llama

SETTINGS = StageSettings(max_rows=8, max_seqs=1, max_logit_rows=1, max_context=64, kv_dtype="f32")
TOKENS = [1, 40, 7]


class Recorder:
    """NVTX as it should be used; answers or raises what a test wants."""

    def __init__(self, answer: object = 0, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.answer, self.error = answer, error

    def push(self, name: str, argb: int) -> object:
        self.calls.append(("push", name, threading.get_ident()))
        if self.error is not None:
            raise self.error
        return self.answer

    def pop(self) -> object:
        self.calls.append(("pop", "", threading.get_ident()))
        if self.error is not None:
            raise self.error
        return self.answer


def _events(path: Path) -> list[dict[str, Any]]:
    """A complete file's events."""
    return json.loads(path.read_text())


def _scopes(path: Path, *, device: bool) -> list[dict[str, Any]]:
    is_device = {True: lambda tid: tid >= tracing._DEVICE_TRACK, False: lambda tid: tid < tracing._DEVICE_TRACK}[device]
    return [event for event in _events(path) if event["ph"] == "X" and is_device(event["tid"])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tracing") / "m.gguf"
    return write_tiny_llama(path, matrix_type=GGMLQuantizationType.Q8_0, hidden=64, ff=96, layers=2)


def _run_steps(path: Path, backend: Backend, tracer: Tracer | None, num_steps: int = 2) -> Stage:
    file = read_gguf(path)
    spec = model_spec(file, model_digest(file))
    stage = Stage(backend, spec, spec.all_layers, SETTINGS, tracer=tracer)
    stage.load(file.tensors, lambda _: None)
    stage.allocate_cache((4,))
    for step in range(num_steps):
        count = len(TOKENS)
        blocks = ((BlockId(0),),) if step == 0 else ((),)
        piece = SeqSlice(SeqId(0), count * step, count, Tokens(tuple(TOKENS)), blocks, True)
        stage.run(ReadyStep(StepPlan(Epoch(1), StepId(step), (piece,)), np.array(TOKENS, np.int32), None))
    return stage


BACKENDS = [
    pytest.param(ReferenceBackend, id="reference"),
    pytest.param(lambda: MockBackend(rates=MockRates(1e9, 1e12, 1e-5)), id="mock"),
    pytest.param(lambda: CudaBackend(device=EmulatedDevice((8, 9))), id="cuda_emulated"),
]


@pytest.mark.parametrize("create", BACKENDS)
def test_scopes_nest_and_devices_have_their_track(tmp_path: Path, model: Path, create: Any) -> None:
    """A-10, A-11: model > layer > attention or mlp > linear by what it computes; activity for every traced layer."""
    trace, backend = TraceFile(tmp_path, "w"), create()
    stage = _run_steps(model, backend, Tracer(trace, backend, 3))
    assert stage._graphs.counts.captures == 0
    trace.close()
    host, device = _scopes(trace.path, device=False), _scopes(trace.path, device=True)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in host:
        by_kind.setdefault(event["cat"], []).append(event)
    counts = {kind: len(events) for kind, events in by_kind.items()}
    assert (counts["model"], counts["layer"], counts["block"], counts["linear"]) == (2, 4, 10, 18)
    assert {e["name"] for e in by_kind["linear"]} == {
        "attention-query-key-value",
        "attention-output",
        "mlp-gate-up",
        "mlp-down",
        "head-logits",
    }
    for inner, outer in (("layer", "model"), ("block", "model"), ("linear", "block"), ("attention", "block")):
        assert all(any(_encloses(o, i) for o in by_kind[outer]) for i in by_kind[inner]), (inner, outer)
    for layer in by_kind["layer"]:
        assert sum(_encloses(layer, e) for e in by_kind["linear"]) == 4
    innermost = [e for e in host if e["cat"] in ("linear", "attention", "other")]
    assert sorted(e["name"] for e in device) == sorted(e["name"] for e in innermost)
    assert all(e["dur"] >= 0 and e["tid"] == tracing._DEVICE_TRACK + 3 for e in device)
    starts = [e["ts"] for e in device]
    assert starts == sorted(starts)  # one queue
    names = {e["args"]["name"] for e in _events(trace.path) if e["name"] == "thread_name"}
    assert f"device 3: {backend.name}" in names
    spans = [(e["ph"], e["id"]) for e in _events(trace.path) if e["name"] == "step"]
    ids = [f"{tracing._DEVICE_TRACK + 3}.{step}" for step in (0, 1)]
    assert spans == [("b", ids[0]), ("e", ids[0]), ("b", ids[1]), ("e", ids[1])]


def _encloses(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    slack = 0.002  # microseconds are rounded to three decimals
    begin, end = outer["ts"] - slack, outer["ts"] + outer["dur"] + slack
    return outer["tid"] == inner["tid"] and begin <= inner["ts"] and inner["ts"] + inner["dur"] <= end


def test_the_mock_tells_simulated_time(tmp_path: Path, model: Path) -> None:
    """A-11: what the mock spends in an op is what the trace says it took."""
    trace, backend = TraceFile(tmp_path, "w"), MockBackend(rates=MockRates(1e6, 1e12))
    _run_steps(model, backend, Tracer(trace, backend, 0), num_steps=1)
    trace.close()
    shape_of_qkv = (64 * 34 // 32) * (64 + 2 * 32)  # bytes of Q8_0 rows
    (qkv, *_), rows = [e for e in _scopes(trace.path, device=True) if "query" in e["name"]], len(TOKENS)
    assert qkv["dur"] == pytest.approx(shape_of_qkv + 4 * rows * (64 + 128), abs=1)  # at a byte a microsecond


def test_an_untraced_stage_replays(model: Path) -> None:
    """Off costs nothing: the model is gone through once, to record it."""
    stage = _run_steps(model, ReferenceBackend(), None, num_steps=2)
    assert (stage._graphs.counts.captures, stage._graphs.counts.replays) == (1, 2)
    assert stage._model is not None
    assert stage._model._scope is tracing.no_scope


def test_results_are_the_same(tmp_path: Path, model: Path) -> None:
    traced, plain = CudaBackend(device=EmulatedDevice((8, 9))), CudaBackend(device=EmulatedDevice((8, 9)))
    with_trace = _run_steps(model, traced, Tracer(TraceFile(tmp_path, "w"), traced, 0))
    without = _run_steps(model, plain, None)
    assert with_trace._model is not None
    assert without._model is not None
    assert np.array_equal(with_trace._model.logits(1), without._model.logits(1))


@pytest.mark.parametrize(
    ("answer", "error"),
    [(-1, None), (0, None), (2**31 - 1, None), (None, None), (0, RuntimeError("NVTX functions not installed"))],
)
def test_a_range_lives_as_long_as_its_body(tmp_path: Path, answer: object, error: Exception | None) -> None:
    """A-12, A-13, A-14: one push, the body, one pop, whatever push returns or raises; names as in the trace."""
    ranges = Recorder(answer, error)
    trace = TraceFile(tmp_path, "w")
    tracer = Tracer(trace, ReferenceBackend(), 0, ranges)
    with tracer.scope(ScopeKind.MODEL, "m"):
        with tracer.scope(ScopeKind.LINEAR, "a"):
            ranges.calls.append(("body", "a", 0))
            time.sleep(0.01)
        with pytest.raises(KeyError), tracer.scope(ScopeKind.LINEAR, "b"):
            raise KeyError("passes through")
    trace.close()
    assert [call[:2] for call in ranges.calls] == [
        ("push", "m"),
        ("push", "a"),
        ("body", "a"),
        ("pop", ""),
        ("push", "b"),
        ("pop", ""),
        ("pop", ""),
    ]
    scopes = {event["name"]: event for event in _scopes(trace.path, device=False)}
    assert {name for kind, name, _ in ranges.calls if kind == "push"} == set(scopes)
    assert scopes["a"]["dur"] >= 10_000
    assert _encloses(scopes["m"], scopes["a"])


def test_names_of_ranges_are_names_of_scopes(tmp_path: Path, model: Path) -> None:
    """A-12: in the same order."""
    ranges, trace, backend = Recorder(), TraceFile(tmp_path, "w"), ReferenceBackend()
    _run_steps(model, backend, Tracer(trace, backend, 0, ranges))
    trace.close()
    pushed = [name for kind, name, _ in ranges.calls if kind == "push"]
    scopes = _scopes(trace.path, device=False)
    assert pushed == [e["name"] for e in sorted(scopes, key=lambda e: (e["ts"], -e["dur"]))]


def test_a_scope_begins_when_it_is_entered(tmp_path: Path) -> None:
    """A-17: making one and throwing it away leaves nothing."""
    ranges, trace = Recorder(), TraceFile(tmp_path, "w")
    tracer = Tracer(trace, ReferenceBackend(), 0, ranges)
    tracer.scope(ScopeKind.MODEL, "never entered")
    trace.close()
    assert ranges.calls == []
    assert _scopes(trace.path, device=False) == []


def test_scopes_are_entered_where_they_are_made() -> None:
    """A-17 as a rule: every call of `scope(` in the model is the item of a with statement."""
    source = Path(tracing.__file__).with_name("stage_model.py").read_text()
    tree = ast.parse(source)
    entered = {id(item.context_expr) for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "scope"]
    assert len(calls) > 10
    assert all(id(call) in entered for call in calls)


def test_threads_do_not_mix(tmp_path: Path) -> None:
    """A-15: two threads interleave; each pushes and pops on itself, and its scopes nest by themselves."""
    ranges, trace = Recorder(), TraceFile(tmp_path, "w")
    tracer = Tracer(trace, ReferenceBackend(), 0, ranges)
    turn = threading.Barrier(2)

    def work(name: str) -> None:
        with tracer.scope(ScopeKind.MODEL, f"{name}-model"):
            turn.wait()
            with tracer.scope(ScopeKind.LINEAR, f"{name}-linear"):
                turn.wait()
            turn.wait()

    threads = [threading.Thread(target=work, args=(name,), name=name) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    for ident in {ident for _, _, ident in ranges.calls}:
        own = [(kind, name.partition("-")[2]) for kind, name, where in ranges.calls if where == ident]
        assert own == [("push", "model"), ("push", "linear"), ("pop", ""), ("pop", "")]
    scopes = {event["name"]: event for event in _scopes(trace.path, device=False)}
    for name in ("one", "two"):
        assert _encloses(scopes[f"{name}-model"], scopes[f"{name}-linear"])
    assert scopes["one-model"]["tid"] != scopes["two-model"]["tid"]


def test_every_kind_has_a_colour_of_its_own() -> None:
    """A-16: model blue, layer orange, attention and mlp green, the others another."""
    assert len({kind.value.argb for kind in ScopeKind}) == len({kind.value.chrome for kind in ScopeKind}) == 6
    red, green, blue = ((kind.value.argb >> shift & 255) for kind, shift in ((ScopeKind.MODEL, s) for s in (16, 8, 0)))
    assert blue > red
    assert blue > green
    layer, block = ScopeKind.LAYER.value.argb, ScopeKind.BLOCK.value.argb
    assert layer >> 16 & 255 > layer >> 8 & 255 > layer & 255
    assert block >> 8 & 255 > max(block >> 16 & 255, block & 255)


_VICTIM = """
import os, sys, time
from pathlib import Path
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker.tracing import ScopeKind, TraceFile, Tracer
trace = TraceFile(Path(sys.argv[1]), "victim")
tracer = Tracer(trace, ReferenceBackend(), 0)
while True:
    with tracer.scope(ScopeKind.MODEL, "m"):
        pass
    print(trace.path, flush=True)
"""


def test_a_killed_process_leaves_a_sound_file(tmp_path: Path) -> None:
    """The format lets the bracket be missing; every event that is there is whole."""
    process = subprocess.Popen([sys.executable, "-c", _VICTIM, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = Path([process.stdout.readline() for _ in range(50)][-1].strip())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    text = path.read_text()
    assert text.startswith("[\n")
    assert text.endswith(",\n")
    events = json.loads(text.rstrip(",\n") + "]")
    assert sum(event["name"] == "m" for event in events) >= 50


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"--trace-directory .*file/x: Not a directory"):
        TraceFile(tmp_path / "file" / "x", "w")


def test_a_full_disk_ends_the_trace_not_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = TraceFile(tmp_path, "w")
    tracer = Tracer(trace, ReferenceBackend(), 0)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        with tracer.scope(ScopeKind.MODEL, "m"):
            pass
    trace.close()
    assert [r.message for r in caplog.records] == [f"{trace.path}: No space left on device; nothing more is traced"]


def test_a_trace_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_MAX_FILE_BYTES", 2000)
    trace = TraceFile(tmp_path, "w")
    tracer = Tracer(trace, ReferenceBackend(), 0)
    for _ in range(100):
        with tracer.scope(ScopeKind.MODEL, "m"):
            pass
    trace.close()
    assert trace.path.stat().st_size < 3000
    assert _events(trace.path)
    assert len(caplog.records) == 1


def test_a_worker_with_a_trace_directory(tmp_path: Path) -> None:
    """A-10: one file per process, complete when the worker stops."""

    async def scene() -> None:
        settings = WorkerSettings("w", ("reference",), Address("127.0.0.1", 0), trace_directory=tmp_path / "traces")
        daemon = await Daemon.start(settings)
        await daemon.stop()

    asyncio.run(scene())
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == f"w-{os.getpid()}.trace.json"
    assert _events(path)[0]["args"] == {"name": "w"}
