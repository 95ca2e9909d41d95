"""Mixtures of experts on an emulated card: few and many rows, old cards, odd arrangements of the matrices."""

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.buffer import DType, ExpertLimits, Extent, StepLimits, Weight
from lamina.kernels.cuda.device import KernelCall
from lamina.spec.quant import GgmlType
from support import op_oracle
from support.backends import Bench, host_tensor
from support.cuda_bench import calls_of, emulated_bench


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
    bench = emulated_bench(cc)
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
    used = [call for call in calls_of(bench) if isinstance(call, KernelCall) and call.program.file == kernel]
    assert len(used) == (2 if rows <= 8 else len(used))
    assert len(used) > 2 or rows <= 20


@pytest.mark.parametrize("cc", [(9, 0), (6, 1)], ids=str)
@pytest.mark.parametrize(("num_experts", "selected"), [(6, 3), (2, 2)])
def test_scratch_of_experts_is_taken_at_load(cc: tuple[int, int], num_experts: int, selected: int) -> None:
    """B-27, B-42: what workspace_bytes announced is what is taken, and steps of all sizes take nothing more."""
    bench = emulated_bench(cc)
    backend = bench.backend
    backend._planner.slice_bytes = 60_000  # type: ignore[attr-defined]
    limits = StepLimits(90, 4, 4, 8, ExpertLimits(num_experts, selected, hidden=256, intermediate=256))
    free = backend.device_facts().free_bytes
    backend.reserve_workspace(limits, 256, 512)
    assert free - backend.device_facts().free_bytes == backend.workspace_bytes(limits, 256, 512)
    weight, _ = _experts(bench, num_experts, GgmlType.Q4_K, GgmlType.Q4_K, rows=256, cols=256)
    down_weight, _ = _experts(bench, num_experts, GgmlType.Q4_K, rows=256, cols=256)
    for rows in (1, 8, 9, 90):
        x, vectors = bench.floats(bench.normal(rows, 256)), bench.floats(bench.normal(rows, selected * 256))
        chosen = bench.ints(np.stack([bench.rng.permutation(num_experts)[:selected] for _ in range(rows)]))
        shares, total = bench.floats(bench.normal(rows, selected)), bench.output(rows, 256)
        out = bench.output(rows, selected * 256)
        bench.step(rows)
        free = backend.device_facts().free_bytes
        ops.expert_gated_linear(backend, x, chosen, weight, out, "silu")
        ops.expert_linear(backend, vectors, chosen, shares, down_weight, total)
        backend.synchronize()
        assert backend.device_facts().free_bytes == free, rows


def test_more_pairs_of_rows_and_float_experts_than_a_grid_counts_in_y() -> None:
    """A grid's y and z end at 65,535: 8,192 rows with 8 experts each are one pair more."""
    bench = emulated_bench()
    weight, both = _experts(bench, 8, GgmlType.F16, GgmlType.F16, rows=2, cols=8)
    x, every = bench.normal(2, 8), np.tile(np.arange(8, dtype=np.int32), (2, 1))
    experts = bench.backend.alloc((8192, 8), DType.I32, Extent.ROWS)
    bench.backend.upload(experts, every)
    vectors = bench.backend.alloc((8192, 8), DType.F32, Extent.ROWS)
    bench.backend.upload(vectors, x)
    out = bench.output(8192, 16)
    bench.step(2)
    ops.expert_gated_linear(bench.backend, vectors, experts, weight, out, "silu")
    dots = np.einsum("epoi,ri->repo", both, x.astype(np.float64))
    wanted = op_oracle.gated(dots[:, :, 0], dots[:, :, 1], "silu").reshape(2, -1)
    bench.assert_close("expert_gated_linear", bench.read(out)[:2], wanted)


def test_experts_of_which_one_matrix_is_float() -> None:
    """Gate quantised and up float: kernels take both or none, so the quantised one is decoded at load, and says so."""
    bench = emulated_bench()
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
    bench = emulated_bench()
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
