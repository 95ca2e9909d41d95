"""The ops of a mixture of experts against float64: the router, and matrices chosen row by row."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lamina.kernels import ops
from lamina.kernels.buffer import Buffer, DType, Extent, StepShape, Weight
from lamina.kernels.mock import MockBackend
from lamina.kernels.ops import LaunchError
from lamina.spec.quant import GgmlType
from support import op_oracle
from support.backends import Bench, host_tensor

F64 = NDArray[np.float64]
views = pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])


@dataclass(frozen=True, slots=True)
class Experts:
    """A weight of E experts and what it holds: matrices [E, parts, rows, in] and biases [E, parts, rows]."""

    weight: Weight
    matrices: F64
    biases: F64


def expert_weight(
    bench: Bench, num_experts: int, *kinds: GgmlType, rows: int, cols: int, bias: bool = False
) -> Experts:
    """Each expert has one part of each kind."""
    parts = [host_tensor(kind, rows, cols, bench.rng) for _ in range(num_experts) for kind in kinds]
    offset = bench.normal(len(parts) * rows, scale=0.3) if bias else None
    shape = (num_experts, len(kinds), rows)
    biases = np.zeros(shape) if offset is None else offset.astype(np.float64).reshape(shape)
    matrices = op_oracle.decoded(*parts).reshape(*shape, cols)
    return Experts(bench.backend.load_weight(parts, offset), matrices, biases)


def selection(bench: Bench, rows: int, num_experts: int, num_selected: int) -> NDArray[np.int32]:
    """Distinct random experts for each row."""
    ids = [bench.rng.permutation(num_experts)[:num_selected] for _ in range(rows)]
    return np.asarray(ids, np.int32).reshape(rows, num_selected)


def ints(bench: Bench, values: NDArray[np.int32]) -> Buffer:
    """One column is a vector, as an arena allocates it."""
    return bench.ints(values[:, 0] if values.shape[1] == 1 else values)


def floats(bench: Bench, values: NDArray[np.float32]) -> Buffer:
    return bench.floats(values[:, 0] if values.shape[1] == 1 else values)


def run_route(
    bench: Bench, logits: NDArray[np.float32], num_selected: int, **rule: object
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Experts and shares, [rows, num_selected]."""
    rows = len(logits)
    shape = (rows, num_selected) if num_selected > 1 else (rows,)
    experts = bench.backend.alloc(shape, DType.I32, Extent.ROWS)
    shares = bench.backend.alloc(shape, DType.F32, Extent.ROWS)
    bench.step(rows)
    ops.route(bench.backend, bench.floats(logits, view=True), experts, shares, **rule)  # type: ignore[arg-type]
    return bench.read(experts).reshape(rows, -1), bench.read(shares).reshape(rows, -1)


@pytest.mark.parametrize(("num_experts", "num_selected"), [(4, 1), (8, 2), (32, 4), (128, 8), (61, 32), (2, 2)])
@pytest.mark.parametrize("normalise", [False, True], ids=["", "normalised"])
@pytest.mark.parametrize("gating", ops.GATINGS)
def test_route(computing: Bench, gating: str, normalise: bool, num_experts: int, num_selected: int) -> None:
    """route: the largest logits in descending order with their softmax, over all or over those alone."""
    logits = computing.normal(19, num_experts, scale=3.0)
    rule = {"gating": gating, "normalise": normalise, "scale": 2.5}
    experts, shares = run_route(computing, logits, num_selected, **rule)
    wanted_experts, wanted_shares = op_oracle.route(logits, num_selected, **rule)  # type: ignore[arg-type]
    assert np.array_equal(experts, wanted_experts)
    computing.assert_close("route", shares, wanted_shares)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_route_of_any_logits(computing: Bench, data: st.DataObject) -> None:
    """Property: with ties, infinities and NaN, ids are distinct, in range and in order, shares as specified."""
    num_experts = data.draw(st.integers(1, 40))
    num_selected = data.draw(st.integers(1, min(num_experts, ops.MAX_SELECTED_EXPERTS)))
    values = st.sampled_from([-np.inf, -200.0, -1.0, -0.0, 0.0, 1e-30, 0.5, 0.5, 100.0, 3e38, np.inf, np.nan])
    logits = np.array(data.draw(st.lists(values, min_size=num_experts, max_size=num_experts)), np.float32)[None]
    gating, normalise = data.draw(st.sampled_from(ops.GATINGS)), data.draw(st.booleans())
    experts, shares = run_route(computing, logits, num_selected, gating=gating, normalise=normalise)
    if not np.isfinite(logits.max()):
        assert experts[0].tolist() == list(range(num_selected))
        assert np.isnan(shares).all()
        return
    wanted, wanted_shares = op_oracle.route(logits, num_selected, gating=gating, normalise=normalise, scale=1.0)
    assert experts[0].tolist() == wanted[0].tolist()
    assert np.allclose(shares, wanted_shares, rtol=1e-5, atol=1e-37)


def test_softmax_of_the_selected_is_the_normalised_softmax(computing: Bench) -> None:
    """Two families' rules for the same thing: equal unless the sum is below the clamp."""
    logits = computing.normal(9, 24, scale=4.0)
    _, ours = run_route(computing, logits, 5, gating="softmax", normalise=True)
    _, theirs = run_route(computing, logits, 5, gating="softmax_selected")
    computing.assert_close("route", ours, theirs)


def test_a_tiny_sum_of_shares_is_clamped(computing: Bench) -> None:
    """One expert of 2**20 equal ones would get all; of so many that its share is below 2**-14 it gets share * 2**14."""
    logits = np.zeros((1, 1 << 16), np.float32)
    _, shares = run_route(computing, logits, 1, gating="softmax", normalise=True)
    assert abs(float(shares[0, 0]) - 0.25) < 1e-3


@views
@pytest.mark.parametrize("activation", ops.EXPERT_ACTIVATIONS)
@pytest.mark.parametrize(("rows", "num_selected"), [(1, 2), (2, 1), (5, 3), (40, 2), (150, 5)])
def test_expert_gated_linear(computing: Bench, activation: str, rows: int, num_selected: int, view: bool) -> None:
    """Each row by each of its experts, gate and up of two types, biases on both, widths no multiple of anything."""
    held = expert_weight(computing, 5, GgmlType.Q4_1, GgmlType.Q5_0, rows=33, cols=64, bias=True)
    x = computing.normal(rows, 64, scale=4.0)
    experts = selection(computing, rows, 5, num_selected)
    out = computing.output(rows, num_selected * 33, view=view)
    computing.step(rows)
    source, chosen = computing.floats(x, view=view), ints(computing, experts)
    ops.expert_gated_linear(computing.backend, source, chosen, held.weight, out, activation)
    both = np.einsum("epoi,ri->repo", held.matrices, x.astype(np.float64)) + held.biases
    mine = both[np.arange(rows)[:, None], experts]  # [rows, selected, part, rows of it]
    wanted = op_oracle.gated(mine[:, :, 0], mine[:, :, 1], activation)
    computing.assert_close("expert_gated_linear", computing.read(out), wanted.reshape(rows, -1))


@views
@pytest.mark.parametrize("accumulate", [False, True], ids=["stored", "accumulated"])
@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.Q8_0, GgmlType.MXFP4], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "num_selected"), [(1, 4), (3, 1), (17, 2), (150, 5)])
def test_expert_linear(
    computing: Bench, kind: GgmlType, rows: int, num_selected: int, accumulate: bool, view: bool
) -> None:
    """The share-weighted sum of each row's experts with their biases, alone and onto what is there."""
    held = expert_weight(computing, 5, kind, rows=37, cols=96, bias=True)
    x, before = computing.normal(rows, num_selected * 96), computing.normal(rows, 37)
    experts, shares = selection(computing, rows, 5, num_selected), computing.normal(rows, num_selected)
    out = computing.floats(before, view=view)
    computing.step(rows)
    source = computing.floats(x, view=view)
    ops.expert_linear(
        computing.backend,
        source,
        ints(computing, experts),
        floats(computing, shares),
        held.weight,
        out,
        accumulate=accumulate,
    )
    by_rank = x.reshape(rows, num_selected, 96)
    wanted = op_oracle.expert_linear(by_rank, experts, shares, held.matrices[:, 0], held.biases[:, 0])
    computing.assert_close("expert_linear", computing.read(out), wanted + (before if accumulate else 0))


@pytest.mark.parametrize("kind", [GgmlType.Q4_K, GgmlType.Q6_K, GgmlType.IQ2_XS, GgmlType.BF16], ids=lambda k: k.name)
def test_types_of_experts(computing: Bench, kind: GgmlType) -> None:
    """Types with blocks of 256, a type that is decoded at load, and a float type, without biases."""
    held = expert_weight(computing, 3, kind, kind, rows=48, cols=256)
    x, experts = computing.normal(7, 256), selection(computing, 7, 3, 2)
    out = computing.output(7, 96)
    computing.step(7)
    ops.expert_gated_linear(computing.backend, computing.floats(x), computing.ints(experts), held.weight, out, "silu")
    both = np.einsum("epoi,ri->repo", held.matrices, x.astype(np.float64))[np.arange(7)[:, None], experts]
    wanted = op_oracle.gated(both[:, :, 0], both[:, :, 1], "silu")
    computing.assert_close("expert_gated_linear", computing.read(out), wanted.reshape(7, -1))


def test_only_the_rows_of_the_step_are_routed_and_written(computing: Bench) -> None:
    """A recording replayed at fewer rows leaves the others alone, whatever ids stale rows hold."""
    held = expert_weight(computing, 4, GgmlType.Q8_0, rows=32, cols=32)
    logits, x = computing.floats(computing.normal(6, 4)), computing.normal(6, 64)
    stale = np.full((6, 2), 10**6, np.int32)
    experts, shares = computing.ints(stale), computing.floats(np.zeros((6, 2)))
    out, source = computing.floats(np.full((6, 32), 5.0)), computing.floats(x)

    def launch() -> None:
        ops.route(computing.backend, logits, experts, shares, gating="softmax", normalise=True)
        ops.expert_linear(computing.backend, source, experts, shares, held.weight, out)

    graph = computing.backend.capture(launch, StepShape(6, 1, 0))
    computing.backend.replay(graph, StepShape(5, 1, 0))
    found, ids = computing.read(out), computing.read(experts)
    assert (found[5:] == 5).all()
    assert (ids[5:] == 10**6).all()
    first = op_oracle.expert_linear(
        x[:5].reshape(5, 2, 32), ids[:5], computing.read(shares)[:5], held.matrices[:, 0], held.biases[:, 0]
    )
    computing.assert_close("expert_linear", found[:5], first)


def test_a_spoiled_row_harms_no_other(computing: Bench) -> None:
    """A-05: a row whose router gives NaN ends in NaN, its neighbours in what they would be without it."""
    held = expert_weight(computing, 4, GgmlType.Q8_0, rows=32, cols=32)
    logits, x = computing.normal(3, 4), computing.normal(3, 64)
    results = []
    for spoiled in (False, True):
        if spoiled:
            logits[1, 2] = np.nan
        experts = computing.ints(np.zeros((3, 2)))
        shares, out = computing.floats(np.zeros((3, 2))), computing.output(3, 32)
        computing.step(3)
        ops.route(computing.backend, computing.floats(logits), experts, shares, gating="softmax_selected")
        ops.expert_linear(computing.backend, computing.floats(x), experts, shares, held.weight, out)
        results.append(computing.read(out))
    assert np.isnan(results[1][1]).all()
    assert np.allclose(results[0][[0, 2]], results[1][[0, 2]], rtol=1e-6)


class Operands:
    """Well-formed operands of the expert ops, for tests to spoil one at a time."""

    def __init__(self, bench: Bench) -> None:
        self.b = bench.backend
        self.logits, self.x, self.out = bench.output(3, 4), bench.output(3, 64), bench.output(3, 64)
        self.experts, self.shares = bench.ints(np.zeros((3, 2))), bench.floats(np.zeros((3, 2)))
        self.many = bench.ints(np.zeros((3, 5)))
        self.gated = expert_weight(bench, 4, GgmlType.Q8_0, GgmlType.Q8_0, rows=32, cols=64).weight
        self.plain = expert_weight(bench, 4, GgmlType.Q8_0, rows=64, cols=32).weight
        self.uneven = bench.weight((GgmlType.Q8_0, 64), (GgmlType.Q8_0, 32), cols=64)[0]
        bench.step(3)

    def route(self, gating: str = "softmax", **others: Buffer) -> None:
        args = {"logits": self.logits, "experts": self.experts, "shares": self.shares} | others
        ops.route(self.b, **args, gating=gating)

    def gate(self, activation: str = "silu", **others: Buffer | Weight) -> None:
        args = {"x": self.x, "experts": self.experts, "weight": self.gated, "out": self.out} | others
        ops.expert_gated_linear(self.b, **args, activation=activation)  # type: ignore[arg-type]

    def down(self, **others: Buffer | Weight) -> None:
        args: dict[str, Buffer | Weight] = {"x": self.x, "experts": self.experts, "shares": self.shares}
        ops.expert_linear(self.b, **args | {"weight": self.plain, "out": self.out} | others)  # type: ignore[arg-type]


BAD_LAUNCHES = {
    "route: unknown gating": lambda o: o.route("sigmoid"),
    "route: shares unlike experts": lambda o: o.route(shares=o.logits),
    "route: more experts than logits": lambda o: o.route(experts=o.many, shares=o.x.columns(0, 5)),
    "expert_gated_linear: unknown activation": lambda o: o.gate("relu"),
    "expert_gated_linear: uneven parts": lambda o: o.gate(weight=o.uneven),
    "expert_gated_linear: x too narrow": lambda o: o.gate(x=o.x.columns(0, 32)),
    "expert_gated_linear: out of one expert": lambda o: o.gate(out=o.out.columns(0, 32)),
    "expert_gated_linear: more experts a row than there are": lambda o: o.gate(experts=o.many),
    "expert_linear: uneven parts": lambda o: o.down(weight=o.uneven),
    "expert_linear: x of one expert": lambda o: o.down(x=o.x.columns(0, 32)),
    "expert_linear: shares unlike experts": lambda o: o.down(shares=o.logits),
    "expert_linear: out too narrow": lambda o: o.down(out=o.out.columns(0, 32)),
}


@pytest.mark.parametrize("spoiled", BAD_LAUNCHES, ids=lambda name: name.replace(" ", "_"))
def test_a_bad_launch_is_refused(bench: Bench, spoiled: str) -> None:
    """B-05: as for the other ops; and the same operands unspoiled pass."""
    operands = Operands(bench)
    with pytest.raises(LaunchError, match=spoiled.split(":")[0]):
        BAD_LAUNCHES[spoiled](operands)
    operands.route()
    operands.gate()
    operands.down()


def test_the_simulated_cost_counts_the_experts_that_are_read() -> None:
    """B-06: one row of 2 experts reads 2 of 8; forty rows read all 8 once."""
    backend = MockBackend()
    bench = Bench(backend, None, np.random.default_rng(1))  # type: ignore[arg-type]
    weight = backend.load_weight([host_tensor(GgmlType.Q8_0, 32, 64, bench.rng)] * 8)
    x, out = bench.output(40, 128), bench.output(40, 32)
    experts, shares = bench.ints(np.zeros((40, 2))), bench.floats(np.zeros((40, 2)))
    for rows, read in ((1, 2), (40, 8)):
        bench.step(rows)
        ops.expert_linear(backend, x, experts, shares, weight, out)
        record = backend.history[-1]
        assert record.num_bytes == 4 * rows * (128 + 32) + read * 32 * 64 * 34 // 32
        assert record.num_flops == 2 * rows * 2 * 64 * 32
