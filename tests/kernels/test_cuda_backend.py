"""What only the CUDA backend has: its kernels on a CPU (support.cuda_emulated), its plans, its buckets."""

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.backend import Capabilities, GraphError, GraphMode, Unsupported
from lamina.kernels.buffer import DType, Extent, StepLimits, StepShape, Weight
from lamina.kernels.cuda.attention_plan import choose_splits
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.device import KernelCall, ProductCall
from lamina.kernels.cuda.graph import bucket_of
from lamina.kernels.cuda.kv_pages import key_order, value_order
from lamina.kernels.cuda.linear_plan import choose_warps, fits
from lamina.spec.quant import GgmlType
from support import op_oracle
from support.backends import BACKENDS, Bench, host_tensor, relative_error
from support.cuda_emulated import EmulatedDevice
from support.paged import Heads, PagedSequences

PACKED_PAIRS = [(GgmlType.Q4_K, 256), (GgmlType.Q6_K, 256), (GgmlType.Q2_K, 512), (GgmlType.Q8_0, 96)]
OLD_CARDS = [(6, 1), (7, 5), (8, 6)]


def _bench(cc: tuple[int, int] = (9, 0), seed: int = 0) -> Bench:
    device = EmulatedDevice(cc)
    return Bench(CudaBackend(device=device), BACKENDS["cuda_emulated"], np.random.default_rng(seed))


def _calls(bench: Bench) -> list[KernelCall | ProductCall]:
    device = bench.backend.device  # type: ignore[attr-defined]
    assert isinstance(device, EmulatedDevice)
    return device.calls


def _functions(bench: Bench) -> list[str]:
    return [call.program.function if isinstance(call, KernelCall) else "product" for call in _calls(bench)]


@pytest.mark.parametrize("rows", [1, 5, 12, 30, 50, 90])
@pytest.mark.parametrize(("kind", "cols"), PACKED_PAIRS, ids=lambda value: getattr(value, "name", str(value)))
def test_interleaved_gate_and_up(kind: GgmlType, cols: int, rows: int) -> None:
    """Two parts of one type share groups of rows: gated in the epilogue, plain as a linear, exact as an embedding."""
    bench = _bench()
    weight, parts, bias = bench.weight((kind, 43), (kind, 43), cols=cols, bias=True)
    assert bias is not None
    both = bench.normal(rows, cols)
    x, out, gated = bench.floats(both), bench.output(rows, 86), bench.output(rows, 43)
    wanted = both.astype(np.float64) @ op_oracle.decoded(*parts).T + bias
    bench.step(rows)
    ops.linear(bench.backend, x, weight, out)
    bench.assert_close("linear", bench.read(out), wanted)
    ops.gated_linear(bench.backend, x, weight, gated, "silu")
    bench.assert_close("gated_linear", bench.read(gated), op_oracle.silu(wanted[:, :43]) * wanted[:, 43:])
    tokens = [0, 42, 43, 85]
    rows_out = bench.output(4, cols)
    bench.step(4)
    ops.embed(bench.backend, bench.ints(tokens), weight, rows_out)
    assert np.array_equal(bench.read(rows_out), op_oracle.decoded(*parts)[tokens].astype(np.float32))


@pytest.mark.parametrize("kind", [GgmlType.Q4_K, GgmlType.F16, GgmlType.F32], ids=lambda kind: kind.name)
def test_products_in_slices(kind: GgmlType) -> None:
    """A weight larger than the scratch is decoded and multiplied piece by piece, gate and up in step."""
    bench = _bench()
    planner = bench.backend._planner  # type: ignore[attr-defined]
    planner.slice_bytes = 48 * 256 * 2
    weight, parts, bias = bench.weight((kind, 70), (kind, 70), cols=256, bias=True)
    assert bias is not None
    values = bench.normal(80, 256)
    x, out, gated = bench.floats(values), bench.output(80, 140), bench.output(80, 70)
    wanted = values.astype(np.float64) @ op_oracle.decoded(*parts).T + bias
    bench.step(80)
    ops.linear(bench.backend, x, weight, out)
    bench.assert_close("linear", bench.read(out), wanted)
    ops.gated_linear(bench.backend, x, weight, gated, "gelu_tanh")
    bench.assert_close("gated_linear", bench.read(gated), op_oracle.gelu_tanh(wanted[:, :70]) * wanted[:, 70:])
    assert _functions(bench).count("product") >= (2 if kind is GgmlType.F32 else 6)


@pytest.mark.parametrize("cc", OLD_CARDS, ids=lambda cc: f"{cc[0]}.{cc[1]}")
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_linears_of_older_cards(cc: tuple[int, int], rows: int) -> None:
    """6.1 multiplies by dp4a and in f32, 7.5 on tensor cores and in f16: the same weights, the same results."""
    bench = _bench(cc)
    kinds = ((GgmlType.Q4_K, 20), (GgmlType.Q6_K, 9), (GgmlType.Q2_K, 16), (GgmlType.F16, 5))
    weight, parts, _ = bench.weight(*kinds, cols=256)
    values = bench.normal(rows, 256)
    out = bench.output(rows, 50)
    bench.step(rows)
    ops.linear(bench.backend, bench.floats(values), weight, out)
    bench.assert_close("linear", bench.read(out), values.astype(np.float64) @ op_oracle.decoded(*parts).T)
    assert ("product" in _functions(bench)) == (rows > 8)


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
    bench = _bench(cc)
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
    bench = _bench()
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
    bench = _bench()
    paged = PagedSequences(bench, Heads(4, 2, 64, 64), [300, 9], dtype)
    paged.write_all()
    pieces = [(0, 213, 300), (1, 0, 9)]
    q = bench.normal(96, 4, 64)
    found = paged.attend(q, pieces, scale=0.2, window=window)
    bench.assert_close("attention", found, paged.expected(q, pieces, scale=0.2, window=window))


def test_as_many_rows_as_sequences_but_unevenly() -> None:
    """Three rows of one sequence and two empty ones look like decode, and are still right."""
    bench = _bench()
    paged = PagedSequences(bench, Heads(24, 2, 32, 32), [50, 9, 8], DType.F16)
    paged.write_all()
    pieces = [(0, 47, 50), (1, 3, 3), (2, 8, 8)]
    q = bench.normal(3, 24, 32)
    bench.assert_close("attention", paged.attend(q, pieces, scale=0.2), paged.expected(q, pieces, scale=0.2))


def test_a_norm_prepares_the_linear_that_follows() -> None:
    """No launch of its own quantises what a norm wrote, unless somebody else wrote to it in between."""
    bench = _bench()
    weight, (matrix,), _ = bench.weight((GgmlType.Q4_0, 16), cols=64)
    x, normed, out = bench.floats(bench.normal(2, 64)), bench.output(2, 64), bench.output(2, 16)
    bench.step(2)
    for _ in range(2):
        ops.rms_norm(bench.backend, x, bench.vector(np.ones(64)), normed, 1e-6)
        ops.linear(bench.backend, normed, weight, out)
    assert "prepare" not in _functions(bench)
    other = bench.normal(2, 64)
    bench.backend.upload(normed, other)
    ops.linear(bench.backend, normed, weight, out)
    assert _functions(bench).count("prepare") == 1
    bench.assert_close("linear", bench.read(out), other.astype(np.float64) @ op_oracle.decoded(matrix).T)


def test_rotations_join_the_cache_write() -> None:
    """rope of q, rope of k and kv_write are one launch; anything else in between sends out what waits."""
    bench = _bench()
    cache = bench.backend.alloc_kv(2, 2, 32, 32, DType.F16)
    q, k, v = (bench.floats(bench.normal(3, heads * 32)) for heads in (4, 2, 2))
    positions, slots = bench.ints([5, 6, 7]), bench.ints([5, 6, 7])
    inv_freq = bench.vector(1e4 ** (-np.arange(16) / 16))
    bench.step(3)
    for part in (q, k):
        ops.rope(bench.backend, part, positions, inv_freq, head_dim=32, layout="neox")
    ops.kv_write(bench.backend, k, v, slots, cache)
    assert _functions(bench).count("rope_and_store") == 1
    rotated = bench.read(k)
    stored, _ = bench.backend.read_kv(cache, [0], 8)
    assert np.array_equal(stored[5:8].reshape(3, -1), op_oracle.stored(np.asarray(rotated, np.float32), DType.F16))
    ops.rope(bench.backend, q, positions, inv_freq, head_dim=32, layout="neox")
    ops.add(bench.backend, q, q, q)
    assert _functions(bench)[-2:] == ["rope_and_store", "add"]


def test_steps_of_one_bucket_share_a_recording() -> None:
    """Powers of two for decode, coarser steps for prefill, none beyond 4,096 rows; decode is kept apart."""
    assert bucket_of(StepShape(5, 5, 5), 64) == bucket_of(StepShape(8, 8, 6), 64)
    assert bucket_of(StepShape(5, 5, 5), 64) != bucket_of(StepShape(8, 5, 5), 64)
    assert bucket_of(StepShape(3, 3, 0), 64) != bucket_of(StepShape(3, 3, 1), 64)
    assert bucket_of(StepShape(129, 1, 1), 64) == bucket_of(StepShape(256, 1, 1), 64)
    assert bucket_of(StepShape(5000, 1, 1), 64) is None
    backend = CudaBackend(device=EmulatedDevice(), graphs=GraphMode.OFF)
    assert not backend.capabilities.graphs
    assert not backend.graph_decision().enabled


def test_a_recording_of_another_bucket_is_refused() -> None:
    """Grids are made for a bucket: a larger step in it would be computed in part only."""
    bench = _bench()
    x, out = bench.floats(np.ones((6, 4))), bench.output(6, 4)
    graph = bench.backend.capture(lambda: ops.add(bench.backend, x, x, out), StepShape(3, 3, 0))
    with pytest.raises(GraphError, match="bucket"):
        bench.backend.replay(graph, StepShape(5, 5, 0))


ODD_HEADS = [Heads(4, 2, 16, 16), Heads(6, 2, 80, 80), Heads(3, 1, 13, 21), Heads(2, 1, 576, 512)]


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("heads", ODD_HEADS, ids=str)
def test_heads_of_every_size(heads: Heads, dtype: DType) -> None:
    """Small, odd and large heads in prefill and decode: pages are padded to fragments, nothing else is."""
    bench = _bench()
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
    assert ("attend_plain" in _functions(bench)) == plain


def test_small_heads_feed_the_projection_that_follows() -> None:
    """Heads that are no whole blocks of 32 are not rounded in passing: the linear prepares its own input."""
    bench = _bench()
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
    bench = _bench(cc)
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


def test_conversions_are_explained() -> None:
    """A-03: a type without kernels loads as what holds it exactly, and says so."""
    bench = _bench()
    backend = bench.backend
    assert isinstance(backend, CudaBackend)
    weight, _, _ = bench.weight((GgmlType.Q4_K, 32), (GgmlType.IQ2_XXS, 16), cols=256)
    explained = backend.explain_weight(weight)
    assert "32 rows Q4_K packed" in explained
    assert "16 rows IQ2_XXS decoded to F32" in explained
    assert backend.weight_bits(GgmlType.IQ2_XXS) == 32
    assert backend.weight_bits(GgmlType.Q4_K) == pytest.approx(4.5, rel=0.03)
    assert backend.weight_bits(GgmlType.BF16) == 16


def test_a_reserved_workspace_never_grows() -> None:
    """B-27, B-42: what workspace_bytes announced is what is taken, and steps of all sizes take nothing more."""
    bench = _bench()
    backend = bench.backend
    assert isinstance(backend, CudaBackend)
    limits = StepLimits(96, 4, 4, 8)
    free = backend.device_facts().free_bytes
    backend.reserve_workspace(limits, 256, 512)
    taken = free - backend.device_facts().free_bytes
    assert taken == backend.workspace_bytes(limits, 256, 512)
    weight, _, _ = bench.weight((GgmlType.Q4_K, 256), (GgmlType.Q4_K, 256), cols=256)
    x, out = bench.floats(bench.normal(96, 256)), bench.output(96, 256)
    index = backend.alloc((4,), DType.I32, Extent.ROWS)
    free = backend.device_facts().free_bytes
    for rows in (1, 4, 7, 40, 96):
        bench.step(rows)
        ops.rms_norm(backend, x, bench.vector(np.ones(256)), x, 1e-6)
        ops.gated_linear(backend, x, weight, out, "silu")
        if rows <= 4:
            ops.argmax(backend, out, index)
    buffers = 5 * 256 * 4  # the norms' weights
    assert free - backend.device_facts().free_bytes == buffers


def test_pages_hold_every_value_once() -> None:
    """The order inside a page is a permutation, for every head size."""
    for dim in (32, 64, 96, 128, 256):
        for order in (key_order(dim), value_order(dim)):
            assert np.array_equal(np.sort(order, axis=None), np.arange(16 * dim))


def test_warps_and_splits_fill_the_card() -> None:
    """The model behind block sizes ranks as measured on 132 multiprocessors; splits never outgrow their scratch."""
    assert choose_warps(224, 14, (14, 2), 132) == 14  # one wave of whole rows
    assert choose_warps(288, 14, (14, 2), 132) == 7  # 14 would leave 24 blocks to a second wave
    assert choose_warps(224, 74, (14, 2), 132) == 13
    assert choose_warps(224, 74, (8, 2), 132) == 8
    assert choose_warps(3, 1, (14, 2), 132) == 1
    assert fits(288, 7, (12, 2), 132)
    assert not fits(224, 14, (12, 2), 132)  # a block too large for these bounds
    assert not fits(2368, 3, (12, 2), 132)
    assert [choose_splits(units, 132) for units in (1, 4, 32, 256)] == [32, 32, 4, 1]


def test_capabilities_say_what_runs() -> None:
    """The capability table names compute type and kernels, by card."""
    assert CudaBackend(device=EmulatedDevice((6, 1))).capabilities == Capabilities(
        graphs=True,
        events=True,
        pinned_memory=True,
        kv_dtypes=frozenset({DType.F32, DType.F16, DType.BF16, DType.Q8_0}),
        compute_dtype="f32",
        compute_dtypes=("f32", "f16"),
        kernel="int8 dp4a, cuBLAS f32",
    )
    assert relative_error(np.ones(2), np.ones(2)) == 0.0


def _experts(bench: Bench, num_experts: int, *kinds: GgmlType, rows: int, cols: int) -> tuple[Weight, np.ndarray]:
    """A weight with one part of each kind an expert, and its matrices [experts, kinds, rows, cols]."""
    parts = [host_tensor(kind, rows, cols, bench.rng) for _ in range(num_experts) for kind in kinds]
    shape = (num_experts, len(kinds), rows, cols)
    return bench.backend.load_weight(parts, None), op_oracle.decoded(*parts).reshape(shape)


@pytest.mark.parametrize(
    ("cc", "rows", "kernel"),
    [
        ((9, 0), 3, "expert_row.cu"),
        ((9, 0), 90, "expert_rows.cu"),
        ((6, 1), 3, "expert_row.cu"),
        ((6, 1), 20, "expert_row.cu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kinds", [(GgmlType.Q4_K, GgmlType.Q6_K), (GgmlType.Q2_K, GgmlType.Q2_K)], ids=str)
def test_experts_of_few_and_many_rows(
    cc: tuple[int, int], rows: int, kernel: str, kinds: tuple[GgmlType, GgmlType]
) -> None:
    """Gate, up and down by pairs or by sorted tiles, on old cards too, and in slices when the scratch is small."""
    bench = _bench(cc)
    planner = bench.backend._planner  # type: ignore[attr-defined]
    planner.slice_bytes = 60_000
    weight, both = _experts(bench, 6, *kinds, rows=32, cols=256)
    down_weight, down = _experts(bench, 6, kinds[1], rows=48, cols=256)
    x, vectors = bench.normal(rows, 256), bench.normal(rows, 3 * 256)
    chosen = np.stack([bench.rng.permutation(6)[:3] for _ in range(rows)]).astype(np.int32)
    chosen[:, 0] = np.where((chosen != 4).all(1), 4, chosen[:, 0])  # an expert of all rows
    shares, before = bench.normal(rows, 3), bench.normal(rows, 48)
    out, total = bench.output(rows, 3 * 32), bench.floats(before)
    experts = bench.ints(chosen)
    bench.step(rows)
    ops.expert_gated_linear(bench.backend, bench.floats(x), experts, weight, out, "silu")
    ops.expert_linear(
        bench.backend, bench.floats(vectors), experts, bench.floats(shares), down_weight, total, accumulate=True
    )
    dots = np.einsum("epoi,ri->repo", both, x.astype(np.float64))[np.arange(rows)[:, None], chosen]
    wanted = op_oracle.gated(dots[:, :, 0], dots[:, :, 1], "silu").reshape(rows, -1)
    bench.assert_close("expert_gated_linear", bench.read(out), wanted)
    summed = op_oracle.expert_linear(vectors.reshape(rows, 3, 256), chosen, shares, down[:, 0], np.zeros((6, 48)))
    bench.assert_close("expert_linear", bench.read(total), before + summed)
    used = [call for call in _calls(bench) if isinstance(call, KernelCall) and call.program.file == kernel]
    assert len(used) == (2 if rows <= 8 else len(used))
    assert len(used) > 2 or rows <= 20


def test_experts_of_which_one_matrix_is_float() -> None:
    """Gate quantised and up float: kernels take both or none, so the quantised one is decoded at load, and says so."""
    bench = _bench()
    weight, both = _experts(bench, 3, GgmlType.Q8_0, GgmlType.F16, rows=20, cols=64)
    x, chosen = bench.normal(5, 64), np.array([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]], np.int32)
    out = bench.output(5, 40)
    bench.step(5)
    ops.expert_gated_linear(bench.backend, bench.floats(x), bench.ints(chosen), weight, out, "silu")
    dots = np.einsum("epoi,ri->repo", both, x.astype(np.float64))[np.arange(5)[:, None], chosen]
    wanted = op_oracle.gated(dots[:, :, 0], dots[:, :, 1], "silu").reshape(5, -1)
    bench.assert_close("expert_gated_linear", bench.read(out), wanted)
    explained = bench.backend.explain_weight(weight)  # type: ignore[attr-defined]
    assert "20 rows Q8_0 decoded to F32: no kernel for gate and up of experts, of which one is float" in explained


@pytest.mark.parametrize(("rows", "selected"), [(2, 1), (2, 2), (70, 2)])
def test_one_and_two_experts(rows: int, selected: int) -> None:
    """Two equal parts are interleaved at load, whatever they are for: one expert's gate and up, or two experts."""
    bench = _bench()
    weight, both = _experts(bench, 1, GgmlType.Q8_0, GgmlType.Q8_0, rows=24, cols=64)
    x, only = bench.normal(rows, 64), bench.ints(np.zeros(rows))
    out = bench.output(rows, 24)
    bench.step(rows)
    ops.expert_gated_linear(bench.backend, bench.floats(x), only, weight, out, "swiglu_clamped")
    dots = np.einsum("epoi,ri->epro", both, x.astype(np.float64))[0]
    bench.assert_close("expert_gated_linear", bench.read(out), op_oracle.gated(dots[0], dots[1], "swiglu_clamped"))
    weight, down = _experts(bench, 2, GgmlType.Q8_0, rows=24, cols=64)
    chosen = np.stack([bench.rng.permutation(2)[:selected] for _ in range(rows)]).astype(np.int32)
    vectors, shares = bench.normal(rows, selected * 64), bench.normal(rows, selected)
    experts = bench.ints(chosen if selected > 1 else chosen[:, 0])
    weights_of = bench.floats(shares if selected > 1 else shares[:, 0])
    ops.expert_linear(bench.backend, bench.floats(vectors), experts, weights_of, weight, out)
    wanted = op_oracle.expert_linear(vectors.reshape(rows, selected, 64), chosen, shares, down[:, 0], np.zeros((2, 24)))
    bench.assert_close("expert_linear", bench.read(out), wanted)
