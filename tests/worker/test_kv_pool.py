"""Block tables: a plan that does not fit what came before is refused before anything changes; slots follow blocks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.kernels.buffer import KvCache
from lamina.kernels.mock import MockBackend
from lamina.rpc_worker import kv_pool
from lamina.rpc_worker.kv_pool import KvPool, SequenceTables
from lamina.spec.errors import CapacityExceeded, InvalidPlan
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.model import (
    Activation,
    AttentionSpec,
    DenseFfn,
    LayerSpec,
    RopeLayout,
    RopeSpec,
)
from lamina.spec.placement import StageSettings
from lamina.spec.step import BLOCK_TOKENS, BlockCopy, SeqSlice, StepPlan, Tokens

SETTINGS = StageSettings(max_rows=64, max_seqs=4, max_logit_rows=4, max_context=70, kv_dtype="f16")
POOL = (10, 6)  # two cache groups


def piece(seq: int, pos: int, num_tokens: int, *blocks: tuple[int, ...]) -> SeqSlice:
    new = tuple(tuple(BlockId(b) for b in group) for group in blocks)
    return SeqSlice(SeqId(seq), pos, num_tokens, Tokens((1,) * num_tokens), new, True)


def plan(*pieces: SeqSlice, copies: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return StepPlan(Epoch(1), StepId(0), pieces, copies)


@pytest.fixture
def tables() -> SequenceTables:
    tables = SequenceTables(POOL, SETTINGS)
    tables.apply(plan(piece(1, 0, 20, (3, 5), (0, 1))))
    return tables


def test_blocks_are_appended_by_group(tables: SequenceTables) -> None:
    tables.apply(plan(piece(1, 20, 15, (7,), (2,))))
    assert tables.blocks_of(SeqId(1), 0).tolist() == [3, 5, 7, 0, 0]  # max_context 70 is five blocks
    assert tables.blocks_of(SeqId(1), 1).tolist() == [0, 1, 2, 0, 0]
    tables.remove(SeqId(1))
    tables.remove(SeqId(1))
    assert len(tables) == 0


def test_a_sequence_may_begin_behind_a_cached_prefix() -> None:
    """A prefix hit: positions 0..31 lie in blocks that others have filled."""
    tables = SequenceTables(POOL, SETTINGS)
    tables.apply(plan(piece(1, 32, 3, (8, 9, 2), (5, 4, 3))))
    tables.apply(plan(piece(1, 35, 1, (), ())))
    assert tables.blocks_of(SeqId(1), 0).tolist()[:3] == [8, 9, 2]


@pytest.mark.parametrize("num_seqs", [1, 2])
@pytest.mark.parametrize("pos", [31, 32, 40])
def test_few_rows_lie_where_many_would(monkeypatch: pytest.MonkeyPatch, pos: int, num_seqs: int) -> None:
    """They take a shorter way to the same arrays, of the same type."""
    tables = SequenceTables(POOL, SETTINGS)
    tables.apply(plan(piece(7, 1, 1, (1,), (2,)), piece(2, 2, 1, (6,), (1,)), piece(1, pos, 1, (8, 9, 2), (5, 4, 3))))
    decode = plan(*[piece(1, pos, 1, (), ()), piece(2, 2, 1, (), ())][:num_seqs])
    few = tables.locate(decode)
    monkeypatch.setattr(kv_pool, "_FEW", 0)
    many = tables.locate(decode)
    for found, wanted in zip(
        (few.positions, few.row_starts, *few.slots, *few.blocks),
        (many.positions, many.row_starts, *many.slots, *many.blocks),
        strict=True,
    ):
        assert found.dtype == wanted.dtype == np.int32
        assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (piece(1, 21, 1, (), ()), "its next position is 20"),
        (piece(1, 0, 1, (), ()), "its next position is 20"),
        (piece(1, 20, 13, (), ()), "2 blocks in group 0, 3 needed"),
        (piece(1, 20, 13, (7,), ()), "2 blocks in group 1, 3 needed"),
        (piece(1, 20, 51, (1, 2, 4), (2, 3, 4)), "71 tokens exceed the context of 70"),
        (piece(1, 20, 1, (1, 2, 4, 6), ()), "6 blocks in group 0, 2 needed"),
        (piece(1, 20, 13, (10,), (2,)), "block outside the pool of 10 in group 0"),
        (piece(1, 20, 13, (7,), (6,)), "block outside the pool of 6 in group 1"),
        (piece(1, 20, 13, (2**32 - 1,), (2,)), "block outside the pool"),
        (piece(2, 2**32 - 1, 1, (), ()), "exceed the context"),
    ],
    ids=range(10),
)
def test_refused_before_anything_changes(tables: SequenceTables, wrong: SeqSlice, said: str) -> None:
    """Also what stands before the wrong slice in its plan has no effect."""
    good = piece(5, 0, 1, (9,), (5,))
    with pytest.raises(InvalidPlan, match=said):
        tables.apply(plan(good, wrong))
    assert len(tables) == 1
    assert tables.blocks_of(SeqId(1), 0).tolist() == [3, 5, 0, 0, 0]
    tables.apply(plan(piece(1, 20, 12, (), ())))  # goes on where it was


@pytest.mark.parametrize(
    "copy",
    [BlockCopy(2, BlockId(0), BlockId(0)), BlockCopy(0, BlockId(10), BlockId(0)), BlockCopy(1, BlockId(0), BlockId(6))],
)
def test_copies_outside_the_pool(tables: SequenceTables, copy: BlockCopy) -> None:
    with pytest.raises(InvalidPlan, match="is outside the pool"):
        tables.apply(plan(piece(1, 20, 1, (), ()), copies=(copy,)))
    tables.apply(plan(piece(1, 20, 1, (), ())))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_chunking_gives_the_same_table(chunks: list[int]) -> None:
    """Blocks just in time or early, tokens in chunks of any size: the table is the concatenation."""
    tables = SequenceTables((100,), replace(SETTINGS, max_context=2000))
    pos, given_blocks, order = 0, 0, list(range(99, -1, -1))
    for size in chunks:
        needed = -(-(pos + size) // BLOCK_TOKENS)
        new = tuple(order[given_blocks:needed])
        tables.apply(plan(piece(0, pos, size, new)))
        pos, given_blocks = pos + size, needed
    assert tables.blocks_of(SeqId(0), 0)[:given_blocks].tolist() == order[:given_blocks]


def layer(index: int, group: int, kv_heads: int, dim: int) -> LayerSpec:
    attention = AttentionSpec(kv_heads, kv_heads, dim, dim, 1.0, RopeSpec(RopeLayout.NEOX, dim, 1e4))
    return LayerSpec(index, attention, DenseFfn(8, Activation.SILU), group)


LAYERS = (layer(0, 0, 2, 32), layer(1, 1, 1, 64), layer(2, 0, 4, 32))


@pytest.mark.parametrize(("kv_dtype", "bits"), [("f32", 32), ("f16", 16), ("bf16", 16), ("q8_0", 8.5)])
def test_bytes_by_dtype_layer_and_group(kv_dtype: str, bits: float) -> None:
    """B-12, B-13: K and V of each layer at its own width, blocks of each layer's own group."""
    backend = MockBackend()
    pool = KvPool(backend, LAYERS, POOL, replace(SETTINGS, kv_dtype=kv_dtype))
    values = [2 * BLOCK_TOKENS * width for width in (64, 64, 128)]
    expected = sum(v * bits / 8 * POOL[part.cache_group] for v, part in zip(values, LAYERS, strict=True))
    assert pool.num_bytes == expected == backend.ledger.used_bytes
    pool.free()
    pool.free()
    assert backend.ledger.used_bytes == 0


def test_a_pool_that_does_not_fit_keeps_nothing() -> None:
    backend = MockBackend(total_bytes=100_000)
    with pytest.raises(CapacityExceeded, match="KV cache of 10 blocks"):
        KvPool(backend, LAYERS, POOL, SETTINGS)
    assert backend.ledger.used_bytes == 0


def test_copies_touch_the_layers_of_their_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MockBackend()
    pool = KvPool(backend, LAYERS, POOL, SETTINGS)
    copied: list[tuple[int, int, int]] = []

    def copy(cache: KvCache, source: int, target: int) -> None:
        copied.append((pool.caches.index(cache), source, target))

    monkeypatch.setattr(backend, "copy_kv_block", copy)
    pool.copy_block(0, BlockId(3), BlockId(4))
    pool.copy_block(1, BlockId(1), BlockId(2))
    assert copied == [(0, 3, 4), (2, 3, 4), (1, 1, 2)]
    assert np.unique([cache.num_blocks for cache in pool.caches]).tolist() == [6, 10]
