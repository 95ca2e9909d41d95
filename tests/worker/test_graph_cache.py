"""Recordings of a stage: bounded, counted, tried out where the card asks for it, given up where they fail."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from lamina.kernels.backend import Graph, GraphDecision, GraphError, GraphMode
from lamina.kernels.buffer import Buffer, DType, Extent, StepShape
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.mock import MockBackend
from lamina.kernels.ops import add, softcap
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker.graph_cache import GraphCache, GraphLimits, Rerun
from lamina.spec.errors import CapacityExceeded
from lamina.spec.placement import StageSettings
from support.cuda_emulated import EmulatedDevice
from support.inprocess import InProcessModel
from support.tiny import write_tiny_llama

PROBE = GraphDecision(True, "on trial", probe=True)


class BucketBackend(MockBackend):
    """A recording for every number of rows, as CUDA has."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}  # rows by id
        self.bytes_of_row = 0
        self.capture_error: Exception | None = None

    def graph_bucket(self, shape: StepShape) -> int | None:
        return None if shape.num_rows > 100 else shape.num_rows

    def capture(self, fn, shape):  # type: ignore[no-untyped-def]
        if self.capture_error is not None:
            raise self.capture_error
        graph = super().capture(fn, shape)
        graph.num_bytes = self.bytes_of_row * shape.num_rows
        self.live[id(graph)] = shape.num_rows
        real = graph.destroy

        def destroy() -> None:
            self.live.pop(id(graph), None)
            real()

        graph.destroy = destroy  # type: ignore[method-assign]
        return graph


def test_recordings_are_bounded_and_least_recently_used_go_first() -> None:
    """C-15, P-13: 200 shapes, never more than the bound alive; a hit saves its recording."""
    backend = BucketBackend()
    buffer = backend.alloc((256, 8), DType.F32, Extent.ROWS)
    cache = GraphCache(backend, limits=GraphLimits(max_graphs=3))
    launches = 0

    def fn() -> None:
        nonlocal launches
        launches += 1
        softcap(backend, buffer, 2.0)

    for rows in range(1, 101):
        cache.run(fn, StepShape(rows, 1, 0))
        cache.run(fn, StepShape(1, 1, 0))  # row 1 stays, whatever else comes
        assert len(backend.live) <= 3
    assert launches == cache.num_captures == 100
    assert cache.num_replays == 200
    assert cache.num_evictions == 97
    cache.run(fn, StepShape(101, 1, 0))  # no bucket: op by op
    assert (launches, cache.num_captures, cache.num_replays) == (101, 100, 200)
    assert backend.num_launches["softcap"] == 201
    cache.clear()
    assert backend.live == {}


def test_recordings_can_be_off() -> None:
    backend = BucketBackend()
    buffer = backend.alloc((8, 8), DType.F32, Extent.ROWS)
    cache = GraphCache(backend, decision=GraphDecision(False, "off"))
    for _ in range(3):
        cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(2, 1, 0))
    assert cache.num_captures == 0
    assert backend.num_launches["softcap"] == 3


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_recordings_that_nobody_replays_go() -> None:
    """C-15: by age as well; the one in use stays."""
    backend, clock = BucketBackend(), Clock()
    buffer = backend.alloc((16, 8), DType.F32, Extent.ROWS)
    cache = GraphCache(backend, limits=GraphLimits(max_idle_s=10.0), clock=clock)
    for rows in (1, 2, 3):
        cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(rows, 1, 0))
    clock.now_s = 9.0
    cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(2, 1, 0))
    assert (len(backend.live), cache.counts.evictions) == (3, 0)
    clock.now_s = 15.0
    cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(2, 1, 0))
    assert (len(backend.live), cache.counts.held, cache.counts.evictions) == (1, 1, 2)


def test_recordings_are_bounded_in_bytes() -> None:
    """What the device lost to them is counted; one that is too large by itself is given up, not kept."""
    backend = BucketBackend()
    backend.bytes_of_row = 100
    buffer = backend.alloc((64, 8), DType.F32, Extent.ROWS)
    cache = GraphCache(backend, limits=GraphLimits(max_bytes=1000))
    for rows in (4, 5, 6):
        cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(rows, 1, 0))
        assert cache.counts.held_bytes == 100 * sum(backend.live.values()) <= 1000
    assert (cache.counts.held, cache.counts.held_bytes, cache.counts.evictions) == (1, 600, 2)
    cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(11, 1, 0))
    assert cache.counts.vetoes == {"too many bytes": 1}
    assert (cache.counts.held, cache.counts.held_bytes) == (1, 600)
    cache.clear()
    assert (cache.counts.held, cache.counts.held_bytes, backend.live) == (0, 0, {})


@pytest.mark.parametrize("error", [GraphError("broken"), RuntimeError("the driver says no")])
def test_a_capture_that_fails_costs_the_recording_not_the_step(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """B-09: the step runs op by op, its bucket stays so, each is counted; one warning for the reason (C-16)."""
    backend = BucketBackend()
    buffer = backend.alloc((16, 8), DType.F32, Extent.ROWS)
    cache = GraphCache(backend)
    backend.capture_error = error
    for rows in (2, 3, 3):
        cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(rows, 1, 0))
    assert backend.num_launches["softcap"] == 3
    assert (cache.counts.captures, cache.counts.replays) == (0, 0)
    assert cache.counts.vetoes == {"capture failed": 3}
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert str(error) in caplog.text
    backend.capture_error = None
    cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(3, 1, 0))
    assert cache.counts.replays == 0
    cache.clear()  # another cache, another dtype: another chance
    cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(3, 1, 0))
    assert cache.counts.replays == 1


@pytest.mark.parametrize("error", [CapacityExceeded("2 MiB are free"), MemoryError("of the host")])
def test_a_device_that_was_full_is_asked_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """B-09: of all steps, but only now and then: a capture in vain takes as long as a step."""
    backend, clock = BucketBackend(), Clock()
    buffer = backend.alloc((16, 8), DType.F32, Extent.ROWS)
    cache = GraphCache(backend, clock=clock)
    backend.capture_error = error
    for rows in (2, 3, 3):
        cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(rows, 1, 0))
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert str(error) in caplog.text
    backend.capture_error = None
    cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(3, 1, 0))
    assert (backend.num_launches["softcap"], cache.counts.vetoes) == (4, {"no memory": 4})
    clock.now_s = 10.0
    for rows in (2, 3):
        cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(rows, 1, 0))
    assert (cache.counts.captures, cache.counts.replays) == (2, 2)


def test_what_the_ops_are_at_fault_for_is_said() -> None:
    backend = MockBackend()

    def fail() -> None:
        raise CapacityExceeded("in every run")

    cache = GraphCache(backend)
    with pytest.raises(CapacityExceeded, match="in every run"):
        cache.run(fail, StepShape(2, 1, 0))


def test_a_step_too_large_is_a_veto() -> None:
    backend = BucketBackend()
    buffer = backend.alloc((256, 8), DType.F32, Extent.ROWS)
    cache = GraphCache(backend)
    cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(200, 1, 0))
    assert cache.counts.vetoes == {"step too large": 1}


class TrialBackend(ReferenceBackend):
    """Sleeps as told in a step run op by op and in a replay, and may err in a replay."""

    def __init__(self, clock: Callable[[float], None], eager_s: float, replay_s: float, error: float = 0.0) -> None:
        super().__init__()
        self._advance, self._eager_s, self._replay_s, self._error = clock, eager_s, replay_s, error
        self._replaying = False
        self.target: Buffer | None = None

    def _compute(self, op, args, shape, num_rows):  # type: ignore[no-untyped-def]
        super()._compute(op, args, shape, num_rows)
        self._advance(self._replay_s if self._replaying else self._eager_s)

    def replay(self, graph: Graph, shape: StepShape) -> None:
        self._replaying = True
        super().replay(graph, shape)
        self._replaying = False
        if self._error and self.target is not None:
            values = self.download(self.target, shape.num_rows)
            self.upload(self.target, values + np.float32(self._error))


@pytest.mark.parametrize(
    ("eager_s", "replay_s", "error", "veto"),
    [
        (1.0, 0.9, 0.0, None),
        (1.0, 0.98, 0.0, "not faster"),
        (1.0, 1.5, 0.0, "not faster"),
        (1.0, 0.1, 2.0**-20, "results differ"),
    ],
)
def test_a_recording_on_trial(
    monkeypatch: pytest.MonkeyPatch, eager_s: float, replay_s: float, error: float, veto: str | None
) -> None:
    """C-13: on 6.x it is kept only if equal bit for bit and at least 3 % faster; the step is right in any case."""
    clock = Clock()
    monkeypatch.setattr("lamina.rpc_worker.graph_cache.time.perf_counter", clock)

    def advance(seconds: float) -> None:
        clock.now_s += seconds

    backend = TrialBackend(advance, eager_s, replay_s, error)
    buffer = backend.target = backend.alloc((4, 8), DType.F32, Extent.ROWS)
    start = np.full((4, 8), 0.25, np.float32)
    cache = GraphCache(backend, decision=PROBE)

    def run() -> NDArray[np.generic]:
        backend.upload(buffer, start)
        rerun = Rerun(lambda: backend.upload(buffer, start), lambda: [backend.download(buffer, 4)])
        cache.run(lambda: add(backend, buffer, buffer, buffer), StepShape(4, 1, 0), rerun)  # accumulates in place
        return backend.download(buffer, 4)

    for _ in range(2):
        assert (run() == 0.5).all()
    counts = cache.counts
    assert (counts.captures, counts.held) == (1, 0 if veto else 1)
    assert counts.vetoes == ({veto: 2} if veto else {})
    assert counts.replays == (0 if veto else 2)


def test_a_pascal_card_tries_and_a_turing_card_does_not() -> None:
    """C-13, C-14: the decision asks the card, the worker's wish and the cluster's, in this order of precedence."""
    table = {
        ((6, 1), "auto", "auto"): (True, True),
        ((7, 5), "auto", "auto"): (True, False),
        ((6, 1), "auto", "on"): (True, False),
        ((6, 1), "auto", "off"): (False, False),
        ((8, 9), "auto", "off"): (False, False),
        ((8, 9), "on", "off"): (True, False),
        ((8, 9), "off", "on"): (False, False),
    }
    for (cc, worker, cluster), wanted in table.items():
        backend = CudaBackend(device=EmulatedDevice(cc), graphs=GraphMode(worker))
        decision = backend.graph_decision(GraphMode(cluster))
        assert (decision.enabled, decision.probe) == wanted, (cc, worker, cluster)
    assert MockBackend().graph_decision(GraphMode.OFF).enabled  # tapes of the host are no CUDA graphs


@pytest.mark.parametrize("cuts", [(), (1,)], ids=["whole", "split"])
def test_a_pascal_card_computes_the_same_while_it_tries(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """C-13: each bucket is tried once, with the very step that is wanted; a stage behind another restores its input."""
    path = write_tiny_llama(tmp_path / "m.gguf", matrix_type=GGMLQuantizationType.Q8_0, hidden=64, ff=96)
    settings = StageSettings(max_rows=8, max_seqs=2, max_logit_rows=2, max_context=64, kv_dtype="f32")
    wanted = InProcessModel(path, CudaBackend(device=EmulatedDevice((6, 1)), graphs=GraphMode.OFF), cuts, settings)
    tried = InProcessModel(path, CudaBackend(device=EmulatedDevice((6, 1))), cuts, settings)
    for inputs in ({0: [1, 2, 3]}, {0: [4]}, {0: [5], 1: [6, 7]}, {0: [8]}, {0: [9]}):
        assert np.array_equal(tried.step(inputs), wanted.step(inputs))
    for stage in tried.stages:
        counts = stage._graphs.counts
        assert counts.captures == 3  # 3 rows, 1 row, 3 rows of two sequences
        assert counts.held + len(stage._graphs._eager) == 3
        assert counts.replays + sum(counts.vetoes.values()) == 5
    assert all(stage._graphs.counts.captures == 0 for stage in wanted.stages)


def test_stages_on_one_device_share_no_recording() -> None:
    """P-12: two contexts or models on one worker keep what is theirs, and freeing one leaves the other."""
    backend = BucketBackend()
    buffers = [backend.alloc((8, 8), DType.F32, Extent.ROWS) for _ in range(2)]
    caches = [GraphCache(backend), GraphCache(backend)]
    for _ in range(2):
        for cache, buffer in zip(caches, buffers, strict=True):
            cache.run(lambda buffer=buffer: softcap(backend, buffer, 2.0), StepShape(2, 1, 0))
    assert [cache.counts.captures for cache in caches] == [1, 1]
    assert len(backend.live) == 2
    caches[0].clear()
    backend.free(buffers[0])
    caches[1].run(lambda: softcap(backend, buffers[1], 2.0), StepShape(2, 1, 0))
    assert (caches[1].counts.captures, caches[1].counts.replays, len(backend.live)) == (1, 3, 1)
