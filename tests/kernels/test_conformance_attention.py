"""The paged cache and attention over it, against float64: every dtype, scattered blocks, garbage around."""

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.buffer import DType
from support import op_oracle
from support.backends import Bench
from support.paged import Heads, PagedSequences

KV_DTYPES = [DType.F32, DType.F16, DType.BF16, DType.Q8_0]
every_kv_dtype = pytest.mark.parametrize("dtype", KV_DTYPES, ids=lambda dtype: dtype.value)


def _skip_without(bench: Bench, dtype: DType) -> None:
    if dtype not in bench.backend.capabilities.kv_dtypes:
        pytest.skip(f"no {dtype.value} cache")


@every_kv_dtype
def test_kv_write_rounds_exactly(computing: Bench, dtype: DType) -> None:
    """B-12: read_kv gives back what gguf's own rounding to the dtype gives, for K and V of unlike sizes."""
    _skip_without(computing, dtype)
    paged = PagedSequences(computing, Heads(4, 2, 64, 32), [37, 16], dtype)
    paged.k[0][0, 0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, -1 - 3 * 2**-11]  # ties of bf16 and f16
    paged.k[0][1] = 0
    paged.write([(0, 0, 20), (1, 0, 16)])
    paged.write([(0, 20, 37)])
    for seq, length in enumerate([37, 16]):
        k, v = computing.backend.read_kv(paged.cache, paged.blocks[seq].tolist(), length)
        assert np.array_equal(k, op_oracle.stored(paged.k[seq], dtype))
        assert np.array_equal(v, op_oracle.stored(paged.v[seq], dtype))


@every_kv_dtype
def test_copied_block_is_a_copy(computing: Bench, dtype: DType) -> None:
    """B-21: copy_kv_block copies K and V of one block, and the copies then part ways."""
    _skip_without(computing, dtype)
    paged = PagedSequences(computing, Heads(2, 2, 32, 64), [16, 16], dtype)
    paged.write_all()
    source, target = int(paged.blocks[0][0]), int(paged.blocks[1][0])
    computing.backend.copy_kv_block(paged.cache, source, target)
    before = computing.backend.read_kv(paged.cache, [target], 16)
    assert np.array_equal(before[0], op_oracle.stored(paged.k[0], dtype))
    assert np.array_equal(before[1], op_oracle.stored(paged.v[0], dtype))
    paged.spoil(paged.blocks[0])
    after = computing.backend.read_kv(paged.cache, [target], 16)
    assert np.array_equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])


def test_kv_write_from_views(computing: Bench) -> None:
    """K and V are columns of one qkv buffer in practice."""
    cache = computing.backend.alloc_kv(2, 2, 32, 32, DType.F32)
    qkv = computing.normal(5, 3 * 64)
    buffer = computing.floats(qkv)
    computing.step(5)
    slots = computing.ints([16, 3, 31, 0, 17])
    ops.kv_write(computing.backend, buffer.columns(64, 128), buffer.columns(128, 192), slots, cache)
    k, v = computing.backend.read_kv(cache, [1, 0], 32)
    assert np.array_equal(k[[0, 19, 15, 16, 1]].reshape(5, 64), qkv[:, 64:128])
    assert np.array_equal(v[[0, 19, 15, 16, 1]].reshape(5, 64), qkv[:, 128:])


@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize(
    "heads",
    [Heads(9, 3, 64, 64), Heads(2, 2, 32, 32), Heads(8, 1, 96, 64), Heads(4, 2, 128, 128)],
    ids=["gqa3", "mha", "mqa_unlike_dims", "gqa2"],
)
def test_attention_of_mixed_sequences(computing: Bench, heads: Heads, view: bool) -> None:
    """A decode row, a whole prefill, a chunk in the middle and an empty piece, in one launch."""
    paged = PagedSequences(computing, heads, [50, 17, 33, 16], DType.F32)
    paged.write_all()
    pieces = [(0, 49, 50), (1, 0, 17), (3, 4, 4), (2, 12, 30), (3, 15, 16)]
    q = computing.normal(37, heads.num_heads, heads.key_dim)
    scale = heads.key_dim**-0.5
    wanted = paged.expected(q, pieces, scale=scale)
    computing.assert_close("attention", paged.attend(q, pieces, scale=scale, view=view), wanted)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(1, 0.0, False), (7, 0.0, False), (40, 0.0, False), (0, 5.0, False), (0, 0.0, True), (20, 5.0, True)],
)
def test_attention_rules(computing: Bench, window: int, softcap: float, sinks: bool) -> None:
    """Window, softcap and sinks, each alone and all together."""
    heads = Heads(6, 2, 32, 32)
    paged = PagedSequences(computing, heads, [70, 5], DType.F32)
    paged.write_all()
    pieces = [(0, 30, 70), (1, 4, 5)]
    q = computing.normal(41, 6, 32, scale=2.0)
    sink = computing.normal(6) if sinks else None
    wanted = paged.expected(q, pieces, scale=0.3, window=window, softcap=softcap, sinks=sink)
    found = paged.attend(q, pieces, scale=0.3, window=window, softcap=softcap, sinks=sink)
    computing.assert_close("attention", found, wanted)


def test_blocks_behind_the_window_may_be_reused(computing: Bench) -> None:
    """A window group frees blocks behind it: their contents never matter."""
    heads = Heads(4, 2, 32, 32)
    paged = PagedSequences(computing, heads, [80], DType.F32)
    paged.write_all()
    paged.spoil(paged.blocks[0][:3])  # positions 0 .. 47
    pieces = [(0, 63, 80)]
    q = computing.normal(17, 4, 32)
    found = paged.attend(q, pieces, scale=0.2, window=16)
    computing.assert_close("attention", found, paged.expected(q, pieces, scale=0.2, window=16))


@every_kv_dtype
def test_decode_and_prefill_read_the_same_cache(computing: Bench, dtype: DType) -> None:
    """B-17: per dtype, rows computed one by one equal the rows of one prefill, and both equal float64."""
    _skip_without(computing, dtype)
    heads = Heads(6, 3, 64, 32)
    paged = PagedSequences(computing, heads, [45], dtype)
    paged.write_all()
    q = computing.normal(45, 6, 64)
    at_once = paged.attend(q, [(0, 0, 45)], scale=0.125)
    computing.assert_close("attention", at_once, paged.expected(q, [(0, 0, 45)], scale=0.125))
    one_by_one = [paged.attend(q[p : p + 1], [(0, p, p + 1)], scale=0.125) for p in (0, 15, 16, 31, 44)]
    computing.assert_close("attention", np.concatenate(one_by_one), at_once[[0, 15, 16, 31, 44]])


def test_prefill_in_chunks_equals_prefill_at_once(computing: Bench) -> None:
    """A-42: whatever the chunks, also across block borders, attention sees the same keys."""
    heads = Heads(4, 2, 64, 64)
    q = computing.normal(53, 4, 64)
    whole = PagedSequences(computing, heads, [53], DType.F16)
    whole.write_all()
    wanted = whole.attend(q, [(0, 0, 53)], scale=0.125)
    chunked = PagedSequences(computing, heads, [53], DType.F16)
    chunked.k, chunked.v = whole.k, whole.v
    found = []
    for start, stop in ((0, 16), (16, 33), (33, 34), (34, 53)):
        chunked.write([(0, start, stop)])
        found.append(chunked.attend(q[start:stop], [(0, start, stop)], scale=0.125))
    computing.assert_close("attention", np.concatenate(found), wanted)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("heads", [Heads(14, 2, 128, 128), Heads(8, 2, 64, 64)], ids=["gqa7", "gqa4"])
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(0, 0.0, False), (90, 20.0, True)], ids=["plain", "ruled"])
def test_prefill_of_usual_heads(
    computing: Bench, heads: Heads, dtype: DType, window: int, softcap: float, sinks: bool
) -> None:
    """Caches of large models in chunks of unlike lengths; slots not written hold NaN, which is not seen."""
    _skip_without(computing, dtype)
    paged = PagedSequences(computing, heads, [330, 21, 70, 16], dtype)
    paged.spoil(range(paged.num_blocks), np.nan, np.nan)
    paged.write_all()
    pieces = [(0, 170, 330), (3, 15, 16), (1, 0, 21), (2, 64, 64), (2, 3, 70)]
    q = computing.normal(sum(stop - start for _, start, stop in pieces), heads.num_heads, heads.key_dim)
    sink = computing.normal(heads.num_heads) if sinks else None
    rules = {"scale": heads.key_dim**-0.5, "window": window, "softcap": softcap, "sinks": sink}
    found = paged.attend(q, pieces, **rules)  # type: ignore[arg-type]
    computing.assert_close("attention", found, paged.expected(q, pieces, **rules))  # type: ignore[arg-type]


def test_large_scores_do_not_overflow(computing: Bench) -> None:
    """Scores beyond the range of float32 exp: softmax is shifted by its maximum."""
    heads = Heads(2, 1, 32, 32)
    paged = PagedSequences(computing, heads, [20], DType.F32)
    paged.k[0] *= 20
    paged.write_all()
    q = computing.normal(20, 2, 32, scale=10.0)
    found = paged.attend(q, [(0, 0, 20)], scale=0.05)
    computing.assert_close("attention", found, paged.expected(q, [(0, 0, 20)], scale=0.05))


def test_large_and_small_sinks(computing: Bench) -> None:
    """A sink far above the scores takes nearly all the weight; one far below takes none."""
    paged = PagedSequences(computing, Heads(2, 1, 32, 32), [9], DType.F32)
    paged.write_all()
    q = computing.normal(9, 2, 32)
    sinks = np.array([60.0, -95.0], np.float32)
    wanted = paged.expected(q, [(0, 0, 9)], scale=0.2, sinks=sinks)
    found = paged.attend(q, [(0, 0, 9)], scale=0.2, sinks=sinks)
    for head in range(2):
        computing.assert_close("attention", found[:, head], wanted[:, head])


def test_a_long_context(computing: Bench) -> None:
    """2,100 keys for 3 rows, so that a kernel that splits the keys has parts to merge."""
    heads = Heads(4, 1, 64, 64)
    paged = PagedSequences(computing, heads, [2100], DType.F16)
    paged.write_all()
    q = computing.normal(3, 4, 64)
    found = paged.attend(q, [(0, 2097, 2100)], scale=0.125)
    computing.assert_close("attention", found, paged.expected(q, [(0, 2097, 2100)], scale=0.125))


@every_kv_dtype
def test_nan_that_a_sequence_left_behind_is_read_by_nobody(computing: Bench, dtype: DType) -> None:
    """A-05: in the unwritten slots of a block and in blocks of others, in chunks and in decodes; not even times 0."""
    _skip_without(computing, dtype)
    paged = PagedSequences(computing, Heads(4, 2, 64, 64), [40, 20, 1], dtype)
    with np.errstate(invalid="ignore"):
        paged.spoil(range(paged.num_blocks), np.nan, np.nan)
    paged.write_all()
    for pieces in ([(0, 39, 40), (1, 19, 20), (2, 0, 1)], [(0, 3, 40), (1, 19, 20)]):
        q = computing.normal(sum(stop - start for _, start, stop in pieces), 4, 64)
        found = paged.attend(q, pieces, scale=0.2)
        computing.assert_close("attention", found, paged.expected(q, pieces, scale=0.2))


@pytest.mark.parametrize("window", [1, 16, 40])
@every_kv_dtype
def test_nan_behind_the_window_is_read_by_nobody(computing: Bench, dtype: DType, window: int) -> None:
    """Blocks that no row of the step sees any of are another sequence's by now: decodes, short and long chunks."""
    _skip_without(computing, dtype)
    paged = PagedSequences(computing, Heads(8, 2, 64, 64), [150, 120], dtype)
    for first in (111, 112):
        with np.errstate(invalid="ignore"):
            paged.spoil(range(paged.num_blocks), np.nan, np.nan)
        seen = max(0, first - window + 1) // 16 * 16
        paged.write([(0, seen, 150), (1, seen, 120)])
        for stop in (first + 1, first + 38):
            pieces = [(0, first, stop), (1, first, min(stop, 120))]
            q = computing.normal(sum(end - start for _, start, end in pieces), 8, 64)
            found = paged.attend(q, pieces, scale=0.2, window=window)
            computing.assert_close("attention", found, paged.expected(q, pieces, scale=0.2, window=window))


@pytest.mark.parametrize("spoilt_value", [np.nan, 1.0], ids=["keys and values", "keys"])
@every_kv_dtype
def test_nan_in_a_block_that_a_sequence_reads_shows(computing: Bench, dtype: DType, spoilt_value: float) -> None:
    """A-05: also where every key of the block is NaN, which a maximum of scores passes over; nobody else is touched."""
    _skip_without(computing, dtype)
    paged = PagedSequences(computing, Heads(4, 2, 64, 64), [40, 40], dtype)
    paged.write_all()
    with np.errstate(invalid="ignore"):
        paged.spoil(paged.blocks[0][:1], np.nan, spoilt_value)
    for pieces in ([(0, 39, 40), (1, 39, 40)], [(0, 36, 40), (1, 36, 40)]):
        num_rows = sum(stop - start for _, start, stop in pieces) // 2
        q = computing.normal(2 * num_rows, 4, 64)
        with np.errstate(invalid="ignore"):
            found = paged.attend(q, pieces, scale=0.2)
        assert np.isnan(found[:num_rows]).all()
        computing.assert_close("attention", found[num_rows:], paged.expected(q, pieces, scale=0.2)[num_rows:])
