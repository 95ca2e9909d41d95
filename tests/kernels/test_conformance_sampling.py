"""The op `sample` on every backend against sorting and adding up in float64 (support.op_oracle)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lamina.kernels import ops
from lamina.kernels.buffer import Buffer, DType, Extent, StepShape
from support import op_oracle
from support.backends import Bench

Logits = NDArray[np.float32]
LOGIT_ROWS = Extent.LOGIT_ROWS
NEUTRAL = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 0.0, "uniform": 0.0}
ROUNDING = 1e-5  # of a running sum of probabilities
FILTERS: dict[str, dict[str, float]] = {
    "temperature alone": {"temperature": 0.8},
    "hot": {"temperature": 5.0},
    "top_k": {"top_k": 40},
    "top_k of most": {"top_k": 250, "temperature": 3.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "hot top_p": {"temperature": 5.0, "top_p": 0.9},
    "small top_p": {"top_p": 0.05},
    "top_k and top_p": {"top_k": 20, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "top_n_sigma": {"top_n_sigma": 1.5, "temperature": 2.0},
    "all": {"temperature": 1.3, "top_k": 100, "top_p": 0.8, "min_p": 0.01, "top_n_sigma": 3.0},
    "nearly greedy": {"temperature": 1e-9, "top_p": 0.5},
    "infinitely hot": {"temperature": float("inf"), "top_k": 7},
}


def params_of(*rows: dict[str, float]) -> Logits:
    """Rows of SAMPLE_PARAMS; what is not named is neutral."""
    return np.array([[(NEUTRAL | row)[name] for name in ops.SAMPLE_PARAMS] for row in rows], np.float32)


def drawn(bench: Bench, logits: Logits, params: Logits, *, view: bool = False) -> list[int]:
    """argmax, then sample, as a stage launches them."""
    rows = len(logits)
    x, out = bench.floats(logits, LOGIT_ROWS, view=view), bench.backend.alloc((rows,), DType.I32, LOGIT_ROWS)
    table = bench.floats(params, LOGIT_ROWS, view=view)
    bench.step(1, 1, rows)
    ops.argmax(bench.backend, x, out)
    ops.sample(bench.backend, x, table, out)
    found = bench.read(out).tolist()
    for buffer in (x, out, table):
        bench.backend.free(buffer)
    return [int(token) for token in found]


def assert_drawn(found: list[int], logits: Logits, params: Logits) -> None:
    """Each token is one that the filters leave, and the row's number lies in its part of the running sum."""
    for token, row, values in zip(found, logits, params.tolist(), strict=True):
        kept, sums, clearance = op_oracle.distribution(row, values)
        place = int(np.searchsorted(kept, token))
        assert (place < len(kept) and kept[place] == token) or clearance < ROUNDING
        below = sums[place - 1] if place else 0.0
        assert below - ROUNDING <= values[-1] <= sums[min(place, len(sums) - 1)] + ROUNDING


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize(("columns", "spread"), [(5, 1.0), (67, 3.0), (300, 0.5), (1000, 3.0)])
def test_every_filter(computing: Bench, columns: int, spread: float, filters: dict[str, float]) -> None:
    """B-30, B-31, B-33: each filter and all together, peaked and flat rows, on views of odd widths."""
    logits = computing.normal(10, columns, scale=spread)
    uniforms = computing.rng.random(10, np.float32)
    params = params_of(*({**filters, "uniform": float(u)} for u in uniforms))
    assert_drawn(drawn(computing, logits, params, view=True), logits, params)


@pytest.mark.parametrize(("columns", "spread"), [(49_152, 0.3), (151_936, 4.0)], ids=["flat", "peaked"])
def test_a_real_vocabulary(computing: Bench, columns: int, spread: float) -> None:
    """Nuclei of a hundred tokens and of most of the vocabulary."""
    names = ("top_p", "top_k and top_p", "temperature alone", "min_p")
    logits = computing.normal(len(names), columns, scale=spread)
    uniforms = (0.11, 0.37, 0.62, 0.93)
    rows = [FILTERS[name] | {"uniform": u} for name, u in zip(names, uniforms, strict=True)]
    params = params_of(*rows)
    assert_drawn(drawn(computing, logits, params), logits, params)


def test_rows_that_are_not_sampled_keep_their_argmax(computing: Bench) -> None:
    """B-32, B-35: temperature 0 is argmax, the first of equals; what is not finite stays -1, never token 0."""
    logits = np.tile(np.arange(101, dtype=np.float32) % 50, (6, 1))
    logits[1, 3] = np.nan
    logits[2] = -np.inf
    logits[4] = -np.inf
    logits[4, 64] = -1e30
    hot, greedy = {"temperature": 2.0, "uniform": 0.5}, {"temperature": 0.0, "uniform": 0.5, "top_k": 3}
    found = drawn(computing, logits, params_of(greedy, hot, hot, greedy, hot, hot | {"top_k": 1}))
    assert found == [49, -1, -1, 49, 64, 49]


def shares(bench: Bench, logits: Sequence[float], **filters: Any) -> set[int]:
    """Tokens that can be drawn."""
    uniforms = (np.arange(24) + 0.5) / 24
    rows = np.tile(np.array(logits, np.float32), (24, 1))
    return set(drawn(bench, rows, params_of(*({**filters, "uniform": float(u)} for u in uniforms))))


def test_ties_go_to_the_lowest_ids(computing: Bench) -> None:
    """B-35: wherever a filter must choose among equal logits; -0 equals 0."""
    flat = [0.0, -0.0] * 10
    assert shares(computing, flat, top_k=3) == {0, 1, 2}
    assert shares(computing, flat, top_p=0.24) == {0, 1, 2, 3, 4}
    assert shares(computing, [1, 2, 2, 2, 0], top_k=2) == {1, 2}
    assert shares(computing, [1, 2, 2, 2, 0], top_p=0.3) == {1, 2}
    assert shares(computing, [5.0] * 2500, top_k=2) == {0, 1}
    assert len(shares(computing, [5.0] * 2500)) == 24


def test_masked_tokens_are_never_drawn(computing: Bench) -> None:
    """-inf has no share, whatever the temperature and the filters; sigma is over finite logits."""
    logits = [-np.inf, 1.0, -np.inf, 0.5, 0.0, -np.inf]
    for filters in ({}, {"temperature": np.inf}, {"top_k": 5}, {"top_p": 0.999999}, {"top_n_sigma": 50.0}):
        assert shares(computing, logits, **filters) == {1, 3, 4}, filters
    assert shares(computing, [4.0, -np.inf, 10.0, 2.0], top_n_sigma=2.0, temperature=1e6) == {0, 2}
    last = params_of({"uniform": float(np.nextafter(np.float32(1), np.float32(0)))})
    assert drawn(computing, np.array([logits], np.float32), last) == [4]


FIVE = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15]))  # by likelihood: 1, 3, 4, 0, 2


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"min_p": 0.8}, {1}),
        ({"min_p": 0.8, "temperature": 2.0}, {1, 3}),
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.65, "temperature": 2.0}, {1, 3, 4}),
        ({"top_p": 0.45}, {1, 3}),
        ({"top_p": 0.45, "top_k": 3}, {1}),
        ({"top_p": 0.55}, {1, 3}),
        ({"top_p": 0.55, "min_p": 0.5}, {1}),
        ({"top_n_sigma": 1.0, "temperature": 5.0, "min_p": 0.99}, {1}),
    ],
    ids=str,
)
def test_the_order_of_the_filters(computing: Bench, filters: dict[str, float], kept: set[int]) -> None:
    """B-31: temperature before min_p and top_p, top_k and min_p before top_p; each set depends on the order."""
    assert shares(computing, FIVE.tolist(), **filters) == kept


def test_a_recording_reads_its_parameters_at_replay(computing: Bench) -> None:
    """Logits, parameters and the number of rows are a step's own, not the recording's."""
    backend = computing.backend
    x, out = computing.output(4, 200, LOGIT_ROWS), backend.alloc((4,), DType.I32, LOGIT_ROWS)
    table: Buffer = backend.alloc((4, len(ops.SAMPLE_PARAMS)), DType.F32, LOGIT_ROWS)

    def launch() -> None:
        ops.argmax(backend, x, out)
        ops.sample(backend, x, table, out)

    graph = backend.capture(launch, StepShape(4, 4, 4))
    for rows, filters in ((4, FILTERS["top_p"]), (3, FILTERS["top_k"]), (4, {"temperature": 0.0})):
        logits = computing.normal(rows, 200, scale=2.0)
        params = params_of(*({**filters, "uniform": (i + 0.37) / 5} for i in range(rows)))
        backend.upload(x, logits)
        backend.upload(table, params)
        if backend.graph_bucket(StepShape(4, 4, 4)) == backend.graph_bucket(StepShape(rows, rows, rows)):
            backend.replay(graph, StepShape(rows, rows, rows))
            found = computing.read(out).tolist()[:rows]
            if filters.get("temperature", 1.0) > 0:
                assert_drawn(found, logits, params)
            else:
                assert found == logits.argmax(axis=1).tolist()
