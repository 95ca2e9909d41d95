"""Arena and recordings: allocated once, addresses never change, bounded, given back."""

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.backend import Graph
from lamina.kernels.buffer import DType, Extent
from lamina.kernels.mock import MockBackend
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker.arena import Arena
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


def test_dropping_the_cache_destroys_the_recordings(tiny: InProcessModel) -> None:
    """What a recording refers to is freed with it: reallocating replays nothing old (P-12)."""
    tiny.step({0: [1]})
    stage = tiny.stages[0]
    (held,) = stage._graphs._graphs.values()
    graph = held.graph
    assert isinstance(graph, Graph)
    stage.allocate_cache((8,))
    assert graph.launches is None  # type: ignore[attr-defined]
    assert len(stage._graphs._graphs) == 0
