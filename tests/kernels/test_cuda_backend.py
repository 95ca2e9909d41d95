"""What only the CUDA backend has: its kernels on a CPU (support.cuda_emulated), its plans, its buckets."""

from unittest.mock import Mock

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.backend import Capabilities, GraphError, GraphMode
from lamina.kernels.buffer import DType, Extent, HostTensor, StepLimits, StepShape
from lamina.kernels.cuda.attention_plan import choose_splits
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.byte_linear import choose_warps, fits
from lamina.kernels.cuda.graph import bucket_of
from lamina.kernels.cuda.workspace import Workspace
from lamina.spec.errors import CapacityExceeded
from lamina.spec.quant import GgmlType
from support import op_oracle
from support.backends import relative_error
from support.cuda_bench import emulated_bench, functions_of
from support.cuda_emulated import EmulatedDevice

PACKED_PAIRS = [(GgmlType.Q4_K, 256), (GgmlType.Q6_K, 256), (GgmlType.Q2_K, 512), (GgmlType.Q8_0, 96)]
OLD_CARDS = [(6, 1), (7, 5), (8, 6)]


@pytest.mark.parametrize("rows", [1, 5, 12, 30, 50, 90])
@pytest.mark.parametrize(("kind", "cols"), PACKED_PAIRS, ids=lambda value: getattr(value, "name", str(value)))
def test_interleaved_gate_and_up(kind: GgmlType, cols: int, rows: int) -> None:
    """Two parts of one type share groups of rows: gated in the epilogue, plain as a linear, exact as an embedding."""
    bench = emulated_bench()
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
    bench = emulated_bench()
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
    assert functions_of(bench).count("product") >= (2 if kind is GgmlType.F32 else 6)


@pytest.mark.parametrize("cc", OLD_CARDS, ids=lambda cc: f"{cc[0]}.{cc[1]}")
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_linears_of_older_cards(cc: tuple[int, int], rows: int) -> None:
    """6.1 multiplies by dp4a and in f32, 7.5 on tensor cores and in f16: the same weights, the same results."""
    bench = emulated_bench(cc)
    kinds = ((GgmlType.Q4_K, 20), (GgmlType.Q6_K, 9), (GgmlType.Q2_K, 16), (GgmlType.F16, 5))
    weight, parts, _ = bench.weight(*kinds, cols=256)
    values = bench.normal(rows, 256)
    out = bench.output(rows, 50)
    bench.step(rows)
    ops.linear(bench.backend, bench.floats(values), weight, out)
    bench.assert_close("linear", bench.read(out), values.astype(np.float64) @ op_oracle.decoded(*parts).T)
    assert ("product" in functions_of(bench)) == (rows > 8)


def test_a_norm_prepares_the_linear_that_follows() -> None:
    """No launch of its own quantises what a norm wrote, unless somebody else wrote to it in between."""
    bench = emulated_bench()
    weight, (matrix,), _ = bench.weight((GgmlType.Q4_0, 16), cols=64)
    x, normed, out = bench.floats(bench.normal(2, 64)), bench.output(2, 64), bench.output(2, 16)
    bench.step(2)
    for _ in range(2):
        ops.rms_norm(bench.backend, x, bench.vector(np.ones(64)), normed, 1e-6)
        ops.linear(bench.backend, normed, weight, out)
    assert "prepare" not in functions_of(bench)
    other = bench.normal(2, 64)
    bench.backend.upload(normed, other)
    ops.linear(bench.backend, normed, weight, out)
    assert functions_of(bench).count("prepare") == 1
    bench.assert_close("linear", bench.read(out), other.astype(np.float64) @ op_oracle.decoded(matrix).T)


def test_rotations_join_the_cache_write() -> None:
    """rope of q, rope of k and kv_write are one launch; anything else in between sends out what waits."""
    bench = emulated_bench()
    cache = bench.backend.alloc_kv(2, 2, 32, 32, DType.F16)
    q, k, v = (bench.floats(bench.normal(3, heads * 32)) for heads in (4, 2, 2))
    positions, slots = bench.ints([5, 6, 7]), bench.ints([5, 6, 7])
    inv_freq = bench.vector(1e4 ** (-np.arange(16) / 16))
    bench.step(3)
    for part in (q, k):
        ops.rope(bench.backend, part, positions, inv_freq, head_dim=32, layout="neox")
    ops.kv_write(bench.backend, k, v, slots, cache)
    assert functions_of(bench).count("rope_and_store") == 1
    rotated = bench.read(k)
    stored, _ = bench.backend.read_kv(cache, [0], 8)
    assert np.array_equal(stored[5:8].reshape(3, -1), op_oracle.stored(np.asarray(rotated, np.float32), DType.F16))
    ops.rope(bench.backend, q, positions, inv_freq, head_dim=32, layout="neox")
    ops.add(bench.backend, q, q, q)
    assert functions_of(bench)[-2:] == ["rope_and_store", "add"]


@pytest.mark.parametrize("rotates_q_apart", [False, True])
def test_one_rotation_of_all_heads_joins_the_cache_write(rotates_q_apart: bool) -> None:
    """q and k side by side, as a layer has them: what is stored is the rotated k, and q is rotated as well."""
    bench = emulated_bench()
    cache = bench.backend.alloc_kv(2, 2, 32, 32, DType.F16)
    values, other = bench.normal(3, 8 * 32), bench.normal(3, 64)
    qkv, apart = bench.floats(values), bench.floats(other)
    positions, slots = bench.ints([5, 6, 7]), bench.ints([5, 6, 7])
    inv_freq = bench.vector(1e4 ** (-np.arange(16) / 16))
    heads, k, v = qkv.columns(0, 192), qkv.columns(128, 192), qkv.columns(192, 256)
    rotated = [bench.floats(values[:, :192]), bench.floats(other)]
    bench.step(3)
    parts = [apart, heads] if rotates_q_apart else [heads]
    for part in (*parts, *rotated):
        ops.rope(bench.backend, part, positions, inv_freq, head_dim=32, layout="neox")
        if part is heads:
            ops.kv_write(bench.backend, k, v, slots, cache)
            assert functions_of(bench).count("rope_and_store") == len(parts)
    wanted, wanted_apart = (np.asarray(bench.read(part), np.float32) for part in rotated)
    assert np.array_equal(bench.read(heads), wanted)
    assert np.array_equal(bench.read(apart), wanted_apart if rotates_q_apart else other)
    keys, stored_values = bench.backend.read_kv(cache, [0], 8)
    assert np.array_equal(keys[5:8].reshape(3, -1), op_oracle.stored(wanted[:, 128:], DType.F16))
    assert np.array_equal(stored_values[5:8].reshape(3, -1), op_oracle.stored(values[:, 192:], DType.F16))


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
    bench = emulated_bench()
    x, out = bench.floats(np.ones((6, 4))), bench.output(6, 4)
    graph = bench.backend.capture(lambda: ops.add(bench.backend, x, x, out), StepShape(3, 3, 0))
    with pytest.raises(GraphError, match="bucket"):
        bench.backend.replay(graph, StepShape(5, 5, 0))


def test_conversions_are_explained() -> None:
    """A-03: a type without kernels loads as what holds it exactly, and says so."""
    bench = emulated_bench()
    backend = bench.backend
    assert isinstance(backend, CudaBackend)
    weight, _, _ = bench.weight((GgmlType.Q4_K, 32), (GgmlType.IQ2_XXS, 16), cols=256)
    explained = backend.explain_weight(weight)
    assert "32 rows Q4_K packed" in explained
    assert "16 rows IQ2_XXS decoded to F32" in explained
    assert backend.weight_bits(GgmlType.IQ2_XXS) == 32
    assert backend.weight_bits(GgmlType.Q4_K) == pytest.approx(4.5, rel=0.03)
    assert backend.weight_bits(GgmlType.BF16) == 16


def test_a_weight_that_cannot_be_unpacked_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """B-29: the worker goes on, and its next load needs the memory."""
    device = EmulatedDevice()
    backend = CudaBackend(device=device)
    blocks = HostTensor(GgmlType.Q4_K, 32, 256, np.zeros((32, 144), np.uint8))
    before = device.memory_bytes()
    found = device.allocate(32 * 256)
    monkeypatch.setattr(device, "allocate", Mock(side_effect=[found, CapacityExceeded("no room to unpack")]))
    with pytest.raises(CapacityExceeded, match="no room to unpack"):
        backend.load_weight([blocks])
    assert device.memory_bytes() == before


def test_a_region_that_may_not_grow_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """C-04: the next step uses it, and nothing is given back twice."""
    device = EmulatedDevice()
    workspace = Workspace(device)
    before = workspace.region("slice", 64)
    with monkeypatch.context() as full:
        full.setattr(device, "allocate", Mock(side_effect=CapacityExceeded("full")))
        with pytest.raises(CapacityExceeded):
            workspace.region("slice", 128)
    assert workspace.region("slice", 64) is before
    released = Mock()
    monkeypatch.setattr(device, "release", released)
    workspace.close()
    released.assert_called_once_with(before)


def test_a_reserved_workspace_never_grows() -> None:
    """B-27, B-42: what workspace_bytes announced is what is taken, and steps of all sizes take nothing more."""
    bench = emulated_bench()
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
        asynchronous=True,
        kv_dtypes=frozenset({DType.F32, DType.F16, DType.BF16, DType.Q8_0}),
        compute_dtype="f32",
        compute_dtypes=("f32", "f16"),
        kernel="int8 dp4a, cuBLAS f32",
    )
    assert relative_error(np.ones(2), np.ones(2)) == 0.0
