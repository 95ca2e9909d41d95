"""Attention and caches of the CUDA backend on an emulated card: rules, splits, head sizes, types of caches."""

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import DType, Extent
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.kv_pages import key_order, value_order
from lamina.spec.quant import GgmlType
from support import op_oracle
from support.cuda_bench import emulated_bench, functions_of
from support.cuda_emulated import EmulatedDevice
from support.paged import Heads, PagedSequences

ODD_HEADS = [Heads(4, 2, 16, 16), Heads(6, 2, 80, 80), Heads(3, 1, 13, 21), Heads(2, 1, 576, 512)]


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("cc", [(9, 0), (7, 5)], ids=lambda cc: f"{cc[0]}.{cc[1]}")
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(0, 0.0, False), (1, 0.0, False), (7, 0.0, True), (40, 0.0, False), (0, 5.0, False), (20, 5.0, True)],
)
def test_attention_rules_of_16_bit_caches(
    dtype: DType, cc: tuple[int, int], window: int, softcap: float, sinks: bool
) -> None:
    """Window, softcap and sinks in prefill and decode, where f32 caches would take the plain kernel."""
    bench = emulated_bench(cc)
    paged = PagedSequences(bench, Heads(10, 2, 64, 32), [70, 5, 33], dtype)
    paged.write_all()
    pieces = [(0, 30, 70), (1, 4, 5), (2, 32, 33)]
    q = bench.normal(42, 10, 64, scale=1.5)
    rules = {"scale": 0.2, "window": window, "softcap": softcap, "sinks": bench.normal(10) if sinks else None}
    bench.assert_close("attention", paged.attend(q, pieces, **rules), paged.expected(q, pieces, **rules))  # type: ignore[arg-type]
    one_each = [(0, 69, 70), (1, 4, 5), (2, 32, 33)]
    found = paged.attend(q[:3], one_each, **rules)  # type: ignore[arg-type]
    bench.assert_close("attention", found, paged.expected(q[:3], one_each, **rules))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, 900])
@pytest.mark.parametrize("heads", [Heads(7, 1, 64, 64), Heads(40, 2, 32, 32), Heads(4, 2, 96, 256)], ids=str)
def test_long_contexts_are_split_and_merged(heads: Heads, window: int) -> None:
    """A-26: the keys of one row go to several blocks, whose parts add up, over and over with the same tickets."""
    bench = emulated_bench()
    paged = PagedSequences(bench, heads, [1500, 40, 700], DType.F16)
    paged.write_all()
    pieces = [(0, 1499, 1500), (1, 39, 40), (2, 699, 700)]
    sinks = bench.normal(heads.num_heads)
    for _ in range(2):
        q = bench.normal(3, heads.num_heads, heads.key_dim)
        found = paged.attend(q, pieces, scale=0.2, window=window, sinks=sinks)
        bench.assert_close("attention", found, paged.expected(q, pieces, scale=0.2, window=window, sinks=sinks))


@pytest.mark.parametrize("dtype", [DType.F16, DType.Q8_0], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("window", [0, 150])
def test_a_chunk_far_into_a_context(window: int, dtype: DType) -> None:
    """Pages that every query sees are added without a mask, those at either end of what it sees with one."""
    bench = emulated_bench()
    paged = PagedSequences(bench, Heads(4, 2, 64, 64), [300, 9], dtype)
    paged.write_all()
    pieces = [(0, 213, 300), (1, 0, 9)]
    q = bench.normal(96, 4, 64)
    found = paged.attend(q, pieces, scale=0.2, window=window)
    bench.assert_close("attention", found, paged.expected(q, pieces, scale=0.2, window=window))


@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize("dim", [64, 128])
def test_warpgroups_take_blocks_of_queries_in_rounds(dim: int, view: bool) -> None:
    """More blocks than multiprocessors, of unlike lengths; scores rise along the keys, so that sums are rescaled."""
    bench = emulated_bench()
    paged = PagedSequences(bench, Heads(7, 1, dim, dim), [290, 150], DType.F16)
    for keys in paged.k:
        keys *= np.linspace(0.1, 6, len(keys), dtype=np.float32)[:, None, None]
    paged.write_all()
    pieces = [(0, 60, 290), (1, 0, 150)]
    q = bench.normal(380, 7, dim)
    found = paged.attend(q, pieces, scale=0.3, view=view)
    bench.assert_close("attention", found, paged.expected(q, pieces, scale=0.3))
    assert functions_of(bench).count("attend_wgmma") == 1


@pytest.mark.parametrize(
    ("cc", "heads", "dtype", "function"),
    [
        ((9, 0), Heads(4, 2, 64, 64), DType.BF16, "attend_wgmma"),
        ((9, 0), Heads(4, 2, 128, 128), DType.F16, "attend_wgmma"),
        ((9, 0), Heads(4, 2, 128, 128), DType.Q8_0, "attend_many"),
        ((9, 0), Heads(4, 2, 128, 64), DType.F16, "attend_many"),
        ((9, 0), Heads(4, 2, 80, 80), DType.F16, "attend_many"),
        ((8, 9), Heads(4, 2, 128, 128), DType.F16, "attend_many"),
        ((12, 0), Heads(4, 2, 64, 64), DType.BF16, "attend_many"),
    ],
)
def test_who_computes_prefill(cc: tuple[int, int], heads: Heads, dtype: DType, function: str) -> None:
    """Products of warpgroups are for 9.0 alone, and for the caches that their kernel has code for."""
    bench = emulated_bench(cc)
    paged = PagedSequences(bench, heads, [40], dtype)
    paged.write_all()
    q = bench.normal(40, heads.num_heads, heads.key_dim)
    found = paged.attend(q, [(0, 0, 40)], scale=0.1)
    bench.assert_close("attention", found, paged.expected(q, [(0, 0, 40)], scale=0.1))
    assert functions_of(bench)[-1] == function


def test_as_many_rows_as_sequences_but_unevenly() -> None:
    """Three rows of one sequence and two empty ones look like decode, and are still right."""
    bench = emulated_bench()
    paged = PagedSequences(bench, Heads(24, 2, 32, 32), [50, 9, 8], DType.F16)
    paged.write_all()
    pieces = [(0, 47, 50), (1, 3, 3), (2, 8, 8)]
    q = bench.normal(3, 24, 32)
    bench.assert_close("attention", paged.attend(q, pieces, scale=0.2), paged.expected(q, pieces, scale=0.2))


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("heads", ODD_HEADS, ids=str)
def test_heads_of_every_size(heads: Heads, dtype: DType) -> None:
    """Small, odd and large heads in prefill and decode: pages are padded to fragments, nothing else is."""
    bench = emulated_bench()
    paged = PagedSequences(bench, heads, [70, 21], dtype)
    paged.write_all()
    k, v = bench.backend.read_kv(paged.cache, [int(block) for block in paged.blocks[0]], 70)
    assert np.array_equal(k, op_oracle.stored(paged.k[0], dtype))
    assert np.array_equal(v, op_oracle.stored(paged.v[0], dtype))
    for pieces in ([(0, 30, 70), (1, 20, 21)], [(0, 69, 70), (1, 20, 21)]):
        q = bench.normal(sum(stop - start for _, start, stop in pieces), heads.num_heads, heads.key_dim)
        found = paged.attend(q, pieces, scale=0.15)
        bench.assert_close("attention", found, paged.expected(q, pieces, scale=0.15))
    plain = dtype is DType.F32 or heads.key_dim > 256
    assert ("attend_plain" in functions_of(bench)) == plain


def test_small_heads_feed_the_projection_that_follows() -> None:
    """Heads that are no whole blocks of 32 are not rounded in passing: the linear prepares its own input."""
    bench = emulated_bench()
    heads = Heads(8, 4, 16, 16)
    paged = PagedSequences(bench, heads, [20], DType.F16)
    paged.write_all()
    weight, (matrix,), _ = bench.weight((GgmlType.Q4_0, 32), cols=128)
    out = bench.output(1, 32)
    q = bench.normal(1, 8, 16)
    attended = paged.expected(q, [(0, 19, 20)], scale=0.25).reshape(1, -1)
    x = bench.output(1, 128)
    bench.step(1, 1)
    ops.attention(
        bench.backend,
        bench.floats(q.reshape(1, -1)),
        paged.cache,
        bench.ints([19]),
        bench.ints([0, 1], Extent.FIXED),
        paged.table([0]),
        x,
        scale=0.25,
    )
    ops.linear(bench.backend, x, weight, out)
    bench.assert_close("linear", bench.read(out), attended @ op_oracle.decoded(matrix).T)


@pytest.mark.parametrize("cc", [(9, 0), (7, 5)], ids=lambda cc: f"{cc[0]}.{cc[1]}")
def test_q8_caches(cc: tuple[int, int]) -> None:
    """Codes and scales of unlike heads in splits, chunks and decodes; half the bytes of f16 and a sixteenth more."""
    bench = emulated_bench(cc)
    heads = Heads(10, 2, 128, 64)
    paged = PagedSequences(bench, heads, [700, 33], DType.Q8_0)
    paged.write_all()
    sinks = bench.normal(10)
    for pieces in ([(0, 690, 700), (1, 0, 33)], [(0, 699, 700), (1, 32, 33)]):
        q = bench.normal(sum(stop - start for _, start, stop in pieces), 10, 128)
        rules = {"scale": 0.1, "window": 600, "softcap": 20.0, "sinks": sinks}
        found = paged.attend(q, pieces, **rules)  # type: ignore[arg-type]
        bench.assert_close("attention", found, paged.expected(q, pieces, **rules))  # type: ignore[arg-type]
    assert bench.backend.kv_bytes_per_block(2, 128, 64, DType.Q8_0) == 2 * 16 * (128 + 64) * 34 // 32


def test_unimplemented_heads_are_refused() -> None:
    """B-16: a head size or cache type without a kernel is an error when the cache is made."""
    backend = CudaBackend(device=EmulatedDevice())
    for dim, dtype in ((0, DType.F16), (1088, DType.F16), (80, DType.Q8_0), (64, DType.U8)):
        with pytest.raises(Unsupported, match="cuda"):
            backend.alloc_kv(1, 1, dim, 64, dtype)


def test_pages_hold_every_value_once() -> None:
    """The order inside a page is a permutation, for every head size."""
    for dim in (32, 64, 96, 128, 256):
        for order in (key_order(dim), value_order(dim)):
            assert np.array_equal(np.sort(order, axis=None), np.arange(16 * dim))
