"""Every op that maps rows to rows, against float64 (support.op_oracle), at odd shapes and on views."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from lamina.kernels import ops
from lamina.kernels.buffer import DType, Extent
from lamina.spec.quant import WEIGHT_TYPES, GgmlType
from support import op_oracle
from support.backends import Bench

ROWS = [1, 2, 5, 17, 40]
views = pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.F16, GgmlType.Q4_1, GgmlType.Q6_K], ids=lambda k: k.name)
def test_embed_gives_the_exact_row(computing: Bench, kind: GgmlType, rows: int) -> None:
    """embed: the dequantised row itself, then scaled."""
    weight, (table,), _ = computing.weight((kind, 23), cols=256)
    tokens = computing.rng.integers(0, 23, rows)
    out = computing.output(rows, 256, view=True)
    computing.step(rows)
    ops.embed(computing.backend, computing.ints(tokens), weight, out)
    exact = op_oracle.decoded(table)[tokens]
    assert np.array_equal(computing.read(out), exact.astype(np.float32))
    ops.embed(computing.backend, computing.ints(tokens), weight, out, scale=15.5)
    computing.assert_close("embed", computing.read(out), 15.5 * exact)


@views
@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 67, 67), (17, 192, 64), (33, 576, 576), (5, 8, 4)])
def test_rms_norm(computing: Bench, rows: int, columns: int, group: int, view: bool) -> None:
    """rms_norm over whole rows and per head, into another buffer and in place."""
    x, gain = computing.normal(rows, columns, scale=3.0), computing.normal(group)
    source, out = computing.floats(x, view=view), computing.output(rows, columns, view=view)
    computing.step(rows)
    ops.rms_norm(computing.backend, source, computing.vector(gain), out, 1e-3)
    wanted = op_oracle.rms_norm(x, gain, 1e-3)
    computing.assert_close("rms_norm", computing.read(out), wanted)
    ops.rms_norm(computing.backend, source, computing.vector(gain), source, 1e-3)
    computing.assert_close("rms_norm", computing.read(source), wanted)


def test_rms_norm_of_tiny_and_zero_rows(computing: Bench) -> None:
    """eps keeps a zero row zero and a tiny row finite."""
    x = np.zeros((3, 32), np.float32)
    x[1] = 1e-20
    out = computing.output(3, 32)
    computing.step(3)
    ops.rms_norm(computing.backend, computing.floats(x), computing.vector(np.ones(32)), out, 1e-6)
    found = computing.read(out)
    assert not found[[0, 2]].any()
    assert np.allclose(found[1], 1e-17, rtol=1e-5)


@views
@pytest.mark.parametrize("rows", ROWS)
def test_linear(computing: Bench, rows: int, view: bool) -> None:
    """linear with a quantised weight whose out_features are no multiple of anything."""
    weight, parts, _ = computing.weight((GgmlType.Q8_0, 37), cols=96)
    x = computing.normal(rows, 96)
    out = computing.output(rows, 37, view=view)
    computing.step(rows)
    ops.linear(computing.backend, computing.floats(x, view=view), weight, out)
    computing.assert_close("linear", computing.read(out), x.astype(np.float64) @ op_oracle.decoded(*parts).T)


@pytest.mark.parametrize("rows", [1, 17])
def test_linear_of_odd_float_matrix(computing: Bench, rows: int) -> None:
    """Float weights have no block size: 45 inputs, 19 outputs."""
    weight, parts, bias = computing.weight((GgmlType.F32, 19), cols=45, bias=True)
    assert bias is not None
    x = computing.normal(rows, 45)
    out = computing.output(rows, 19)
    computing.step(rows)
    ops.linear(computing.backend, computing.floats(x), weight, out)
    computing.assert_close("linear", computing.read(out), x.astype(np.float64) @ op_oracle.decoded(*parts).T + bias)


@views
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_stacked_parts_of_other_types_with_bias(computing: Bench, rows: int, view: bool) -> None:
    """One launch over q, k and v of three quantisations, with bias, accumulated onto what is there."""
    kinds = ((GgmlType.Q4_0, 50), (GgmlType.Q6_K, 11), (GgmlType.F16, 7))
    weight, parts, bias = computing.weight(*kinds, cols=256, bias=True)
    assert bias is not None
    assert (weight.part_rows, weight.in_features, weight.out_features) == ((50, 11, 7), 256, 68)
    x, before = computing.normal(rows, 256), computing.normal(rows, 68)
    source, out = computing.floats(x, view=view), computing.floats(before, view=view)
    wanted = x.astype(np.float64) @ op_oracle.decoded(*parts).T + bias
    computing.step(rows)
    ops.linear(computing.backend, source, weight, out, accumulate=True)
    computing.assert_close("linear", computing.read(out), wanted + before)
    ops.linear(computing.backend, source, weight, out)
    computing.assert_close("linear", computing.read(out), wanted)


def test_only_the_rows_of_the_step_are_written(computing: Bench) -> None:
    """Buffers are sized for the worst case; a step of 3 rows touches 3."""
    weight, _, _ = computing.weight((GgmlType.Q8_0, 8), cols=32)
    out = computing.floats(np.full((9, 8), 5.0))
    computing.step(3)
    ops.linear(computing.backend, computing.floats(computing.normal(9, 32)), weight, out)
    found = computing.read(out)
    assert (found[3:] == 5).all()
    assert not (found[:3] == 5).any()


@views
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_gated_linear(computing: Bench, activation: str, rows: int, view: bool) -> None:
    """act(gate) * up of two equal parts of two types, with a bias on both."""
    weight, parts, bias = computing.weight((GgmlType.Q4_1, 33), (GgmlType.Q5_0, 33), cols=64, bias=True)
    assert bias is not None
    x = computing.normal(rows, 64, scale=4.0)
    out = computing.output(rows, 33, view=view)
    computing.step(rows)
    ops.gated_linear(computing.backend, computing.floats(x, view=view), weight, out, activation)
    both = x.astype(np.float64) @ op_oracle.decoded(*parts).T + bias
    act = op_oracle.silu if activation == "silu" else op_oracle.gelu_tanh
    computing.assert_close("gated_linear", computing.read(out), act(both[:, :33]) * both[:, 33:])


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("kind", [GgmlType.Q8_0, GgmlType.Q6_K, GgmlType.F16], ids=lambda kind: kind.name)
def test_a_single_value_that_is_not_finite_shows(computing: Bench, kind: GgmlType, rows: int) -> None:
    """A-05: also where activations are rounded to int8 by blocks, whose maximum passes over NaN. Elsewhere not."""
    weight, _, _ = computing.weight((kind, 24), cols=256)
    x = computing.normal(rows, 256)
    x[0, 37] = np.nan
    out = computing.output(rows, 24)
    computing.step(rows)
    with np.errstate(invalid="ignore"):
        ops.linear(computing.backend, computing.floats(x), weight, out)
    found = computing.read(out)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1:]).all()


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_activations_of_extreme_gates_are_finite(computing: Bench, activation: str) -> None:
    """Gates of +-2000 neither overflow nor give NaN: act(-2000) = 0, act(2000) = 2000."""
    weight, (gate, up), _ = computing.weight((GgmlType.F32, 1), (GgmlType.F32, 1), cols=32)
    sign = np.sign(op_oracle.decoded(gate)[0])
    reach = float((sign * op_oracle.decoded(gate)[0]).sum())
    x = (np.stack([sign, -sign]) * 2000 / reach).astype(np.float32)
    out = computing.output(2, 1)
    computing.step(2)
    ops.gated_linear(computing.backend, computing.floats(x), weight, out, activation)
    found = computing.read(out)
    lifted = x[0].astype(np.float64) @ op_oracle.decoded(up)[0]
    assert abs(found[0, 0] / (2000 * lifted) - 1) < 0.05
    assert abs(found[1, 0]) < 1e-6


@pytest.mark.parametrize("kind", [GgmlType.Q4_1, GgmlType.F16], ids=lambda kind: kind.name)
def test_tied_weight_serves_embed_and_linear(computing: Bench, kind: GgmlType) -> None:
    """One copy of a tied table is both the embedding (exact) and the head."""
    weight, (table,), _ = computing.weight((kind, 41), cols=64)
    matrix = op_oracle.decoded(table)
    tokens = np.array([40, 0, 7])
    embedded, logits = computing.output(3, 64), computing.output(3, 41)
    computing.step(3)
    ops.embed(computing.backend, computing.ints(tokens), weight, embedded)
    ops.linear(computing.backend, embedded, weight, logits)
    assert np.array_equal(computing.read(embedded), matrix[tokens].astype(np.float32))
    computing.assert_close("linear", computing.read(logits), matrix[tokens] @ matrix.T)


@pytest.mark.parametrize("kind", sorted(WEIGHT_TYPES), ids=lambda kind: kind.name)
def test_every_tensor_type_loads(computing: Bench, kind: GgmlType) -> None:
    """A-03: every GGUF type, floats included, embeds exactly as gguf decodes it and multiplies as it should."""
    weight, (table,), _ = computing.weight((kind, 21), cols=512)
    raw = quants.dequantize(table.data, GGMLQuantizationType(kind.value)).reshape(21, 512)
    x = computing.normal(3, 512)
    rows, products = computing.output(3, 512), computing.output(3, 21)
    computing.step(3)
    ops.embed(computing.backend, computing.ints([20, 0, 11]), weight, rows)
    ops.linear(computing.backend, computing.floats(x), weight, products)
    assert np.array_equal(computing.read(rows), raw[[20, 0, 11]])
    computing.assert_close("linear", computing.read(products), x.astype(np.float64) @ raw.astype(np.float64).T)


@views
@pytest.mark.parametrize("layout", ops.ROPE_LAYOUTS)
@pytest.mark.parametrize(("head_dim", "half", "magnitude"), [(64, 32, 1.0), (80, 16, 1.0), (6, 1, 1.3), (128, 64, 0.7)])
def test_rope(computing: Bench, layout: str, head_dim: int, half: int, magnitude: float, view: bool) -> None:
    """rope of 3 heads in both layouts, with fewer rotated dimensions than the head has, and with a magnitude."""
    positions = [0, 1, 2, 511, 30000, 7, 7]
    x = computing.normal(len(positions), 3 * head_dim)
    inv_freq = (1e4 ** (-np.arange(half) / half)).astype(np.float32)
    buffer = computing.floats(x, view=view)
    computing.step(len(positions))
    where, table = computing.ints(positions), computing.vector(inv_freq)
    ops.rope(computing.backend, buffer, where, table, head_dim=head_dim, layout=layout, magnitude=magnitude)
    found, wanted = computing.read(buffer), op_oracle.rope(x, positions, inv_freq, head_dim, layout, magnitude)
    computing.assert_close("rope", found, wanted)
    untouched = np.arange(3 * head_dim) % head_dim >= 2 * half
    assert np.array_equal(found[:, untouched], x[:, untouched])


@views
def test_add_also_onto_an_operand(computing: Bench, view: bool) -> None:
    """add is the float32 sum, and may write one of its operands."""
    x, y = computing.normal(17, 33), computing.normal(17, 33)
    a, b, out = computing.floats(x, view=view), computing.floats(y), computing.output(17, 33, view=view)
    computing.step(17)
    ops.add(computing.backend, a, b, out)
    assert np.array_equal(computing.read(out), x + y)
    ops.add(computing.backend, a, b, a)
    assert np.array_equal(computing.read(a), x + y)
    ops.add(computing.backend, out, b, b)
    assert np.array_equal(computing.read(b), (x + y) + y)


def test_softcap(computing: Bench) -> None:
    """softcap in place: large values approach the cap, small ones pass."""
    x = computing.normal(5, 37, scale=60.0)
    buffer = computing.floats(x, view=True)
    computing.step(5)
    ops.softcap(computing.backend, buffer, 30.0)
    computing.assert_close("softcap", computing.read(buffer), 30 * np.tanh(x.astype(np.float64) / 30))


def test_gather_rows(computing: Bench) -> None:
    """gather_rows takes as many rows as want logits, in any order, also none."""
    x = computing.normal(9, 20)
    source, out = computing.floats(x, view=True), computing.output(4, 20, Extent.LOGIT_ROWS)
    before = computing.read(out)
    indices = computing.ints([8, 0, 3, 3], Extent.LOGIT_ROWS)
    computing.step(9, 1, 0)
    ops.gather_rows(computing.backend, source, indices, out)
    assert np.array_equal(computing.read(out), before)
    computing.step(9, 1, 3)
    ops.gather_rows(computing.backend, source, indices, out)
    assert np.array_equal(computing.read(out), np.concatenate([x[[8, 0, 3]], before[3:]]))


def test_argmax_ties_and_non_finite_rows(computing: Bench) -> None:
    """B-35, A-05: the first of equals wins; a NaN or no finite value gives -1, never token 0."""
    inf, nan = np.inf, np.nan
    rows = np.tile(np.arange(101, dtype=np.float32) % 50, (9, 1))
    rows[1] = -inf
    rows[2] = nan
    rows[3, 100] = nan
    rows[4, 70] = inf
    rows[5] = -inf
    rows[5, 64] = -1e30
    rows[6] = 3.0
    rows[7] = inf
    rows[8, [0, 60]] = [-0.0, 50.0]
    out = computing.backend.alloc((9,), DType.I32, Extent.ROWS)
    computing.step(9)
    ops.argmax(computing.backend, computing.floats(rows, view=True), out)
    assert computing.read(out).tolist() == [49, -1, -1, -1, 70, 64, 0, -1, 60]


def test_argmax_of_a_real_vocabulary(computing: Bench) -> None:
    """argmax over 49,152 columns, the largest anywhere."""
    logits = computing.normal(4, 49152)
    out = computing.backend.alloc((4,), DType.I32, Extent.LOGIT_ROWS)
    computing.step(1, 1, 4)
    ops.argmax(computing.backend, computing.floats(logits, Extent.LOGIT_ROWS), out)
    assert computing.read(out).tolist() == logits.argmax(axis=1).tolist()
