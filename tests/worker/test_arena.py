"""Arena and recordings: allocated once, addresses never change, bounded, given back."""

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.backend import Graph
from lamina.kernels.buffer import DType, Extent, StepShape
from lamina.kernels.mock import MockBackend
from lamina.kernels.ops import softcap
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker.arena import Arena
from lamina.rpc_worker.graph_cache import GraphCache
from lamina.spec.errors import CapacityExceeded
from lamina.spec.memory import ArenaBuffer
from lamina.spec.placement import StageSettings
from support.inprocess import InProcessModel
from support.tiny import write_tiny_llama

LAYOUT = (
    ArenaBuffer("positions", 100, 1, "i32", "rows"),
    ArenaBuffer("hidden", 100, 64, "f32", "rows"),
    ArenaBuffer("logits", 4, 1000, "f32", "logit_rows"),
)


def test_layout_becomes_buffers() -> None:
    backend = MockBackend()
    arena = Arena(backend, LAYOUT)
    assert arena["positions"].shape == (100,)
    assert (arena["hidden"].shape, arena["hidden"].dtype, arena["hidden"].extent) == ((100, 64), DType.F32, Extent.ROWS)
    assert arena["logits"].extent is Extent.LOGIT_ROWS
    assert arena.num_bytes == backend.ledger.used_bytes == 4 * (100 + 6400 + 4000)
    arena.free()
    assert backend.ledger.used_bytes == 0


def test_an_arena_that_does_not_fit_says_what_is_in_it() -> None:
    """B-29: at start, with a byte breakdown, and nothing stays allocated."""
    backend = MockBackend(total_bytes=30_000)
    with pytest.raises(CapacityExceeded, match=r"does not fit \(MiB: positions 0.0, hidden 0.0, logits 0.0\): a f32"):
        Arena(backend, LAYOUT)
    assert backend.ledger.used_bytes == 0


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessModel]:
    path = tmp_path_factory.mktemp("arena") / "tiny.gguf"
    write_tiny_llama(path, matrix_type=GGMLQuantizationType.F32, hidden=32, ff=32, layers=2)
    settings = StageSettings(max_rows=16, max_seqs=4, max_logit_rows=4, max_context=2048, kv_dtype="f32")
    model = InProcessModel(path, ReferenceBackend(), (), settings)
    yield model
    model.free()


def test_addresses_are_stable_over_a_thousand_steps(tiny: InProcessModel) -> None:
    """B-27: rows, sequences and lengths vary; no buffer moves, nothing is allocated, one recording is replayed."""
    arenas = [stage._arena for stage in tiny.stages]
    assert all(arena is not None for arena in arenas)
    backend = tiny.stages[0]._backend
    assert isinstance(backend, ReferenceBackend)

    def addresses() -> list[int]:
        buffers = [buffer for arena in arenas if arena is not None for buffer in arena._buffers.values()]
        storages = [buffer.storage for buffer in buffers]
        return [storage.ctypes.data for storage in storages if isinstance(storage, np.ndarray)]

    tiny.step({0: [1]})
    before, allocations = addresses(), backend.ledger.num_allocations
    rng = np.random.default_rng(0)
    for step in range(1000):
        count = int(rng.integers(1, 4))
        seqs = [(step + i) % 4 for i in range(count)]
        tiny.step({seq: [7] * int(rng.integers(1, 3)) for seq in seqs})
    assert addresses() == before
    assert backend.ledger.num_allocations == allocations
    assert [stage._graphs.num_captures for stage in tiny.stages] == [1]


class BucketBackend(MockBackend):
    """A recording for every number of rows, as CUDA has."""

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()

    def graph_bucket(self, shape: StepShape) -> int | None:
        return None if shape.num_rows > 100 else shape.num_rows

    def capture(self, fn, shape):  # type: ignore[no-untyped-def]
        graph = super().capture(fn, shape)
        self.live.add(id(graph))
        real = graph.destroy

        def destroy() -> None:
            self.live.discard(id(graph))
            real()

        graph.destroy = destroy  # type: ignore[method-assign]
        return graph


def test_recordings_are_bounded_and_least_recently_used_go_first() -> None:
    """C-15, P-13: 200 shapes, never more than the bound alive; a hit saves its recording."""
    backend = BucketBackend()
    buffer = backend.alloc((256, 8), DType.F32, Extent.ROWS)
    cache = GraphCache(backend, max_graphs=3)
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
    assert backend.live == set()


def test_recordings_can_be_off() -> None:
    backend = BucketBackend()
    buffer = backend.alloc((8, 8), DType.F32, Extent.ROWS)
    cache = GraphCache(backend, enabled=False)
    for _ in range(3):
        cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(2, 1, 0))
    assert cache.num_captures == 0
    assert backend.num_launches["softcap"] == 3


def test_a_capture_that_fails_leaves_no_recording() -> None:
    """B-09: the next step captures anew."""
    backend = MockBackend()
    buffer = backend.alloc((8, 8), DType.F32, Extent.ROWS)
    cache = GraphCache(backend)

    def fail() -> None:
        softcap(backend, buffer, 2.0)
        raise CapacityExceeded("in mid-capture")

    with pytest.raises(CapacityExceeded):
        cache.run(fail, StepShape(2, 1, 0))
    cache.run(lambda: softcap(backend, buffer, 2.0), StepShape(2, 1, 0))
    assert (cache.num_captures, cache.num_replays) == (1, 1)


def test_dropping_the_cache_destroys_the_recordings(tiny: InProcessModel) -> None:
    """What a recording refers to is freed with it: reallocating replays nothing old (P-12)."""
    tiny.step({0: [1]})
    stage = tiny.stages[0]
    (graph,) = stage._graphs._graphs.values()
    assert isinstance(graph, Graph)
    stage.allocate_cache((8,))
    assert graph.launches is None  # type: ignore[attr-defined]
    assert len(stage._graphs._graphs) == 0
