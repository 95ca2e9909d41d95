"""Perplexity's pure parts: how a text is cut, which rows are scored in which step, the figures of the scores."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.coordinator.perplexity import cut_windows, perplexity_of, plan_windows
from lamina.spec.errors import InvalidRequest
from lamina.spec.ids import Epoch
from lamina.spec.placement import StageSettings
from lamina.spec.step import BLOCK_TOKENS, Tokens


def test_windows_are_whole_and_adjacent() -> None:
    """The rest of the text is dropped, as llama-perplexity does (n_chunk = tokens / n_ctx)."""
    assert cut_windows(range(29), 9) == [tuple(range(9)), tuple(range(9, 18)), tuple(range(18, 27))]
    assert cut_windows(range(29), 9, limit=2) == [tuple(range(9)), tuple(range(9, 18))]


def test_a_begin_token_replaces_the_first_of_each_window() -> None:
    """As llama-perplexity does where the vocabulary adds one; the tokens after it keep their places."""
    assert cut_windows(range(20), 9, bos_id=99) == [(99, *range(1, 9)), (99, *range(10, 18))]


@pytest.mark.parametrize(("length", "said"), [(512, "the text has 100 tokens, one chunk takes 512"), (7, "at least 8")])
def test_a_window_that_cannot_be(length: int, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        cut_windows(range(100), length)


@given(
    st.integers(8, 150), st.integers(1, 4), st.integers(1, 70), st.integers(1, 40), st.integers(1, 3), st.integers(1, 2)
)
def test_every_token_of_the_second_half_is_scored_once(
    length: int, num_windows: int, max_rows: int, max_logit_rows: int, num_lanes: int, num_groups: int
) -> None:
    """Rows in order, each token fed once but the last of a window; no limit is passed; blocks stay within the lane."""
    windows = cut_windows(range(length * num_windows), length)
    settings = StageSettings(max_rows=max_rows, max_seqs=1, max_logit_rows=max_logit_rows, max_context=length)
    steps = list(plan_windows(windows, Epoch(3), settings, num_groups, num_lanes))
    assert [step.plan.step for step in steps] == list(range(len(steps)))
    fed: dict[int, list[int]] = {}
    scored: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    for step in steps:
        plan = step.plan
        (piece,) = plan.slices
        assert plan.epoch == 3
        assert plan.num_rows <= max_rows
        assert plan.num_logit_rows <= max_logit_rows
        assert piece.seq == step.window
        assert step.is_first == (step.window not in fed)
        assert piece.pos == len(fed.setdefault(step.window, []))
        assert isinstance(piece.input, Tokens)
        fed[step.window] += piece.input.ids
        for _, positions in plan.scored():
            scored.setdefault(step.window, []).extend(positions)
        assert len(piece.new_blocks) == num_groups
        blocks.setdefault(step.window, []).extend(piece.new_blocks[0])
        assert len(blocks[step.window]) * BLOCK_TOKENS >= len(fed[step.window])
        assert step.is_last == (len(fed[step.window]) == length - 1)
    for index, window in enumerate(windows):
        assert tuple(fed[index]) == window[:-1]
        assert scored[index] == list(range(length // 2 + 1, length))
        lane = index % num_lanes * settings.max_blocks_per_seq
        assert all(lane <= block < lane + settings.max_blocks_per_seq for block in blocks[index])
        assert len(set(blocks[index])) == len(blocks[index])
    assert all(earlier.window <= later.window for earlier, later in pairwise(steps))


def test_figures_of_scores() -> None:
    """exp(mean) and its error to first order, as llama-perplexity prints them: sqrt(variance / (n - 1)) * value."""
    scores = -np.random.default_rng(1).gamma(2.0, 1.5, 1000)
    result = perplexity_of(scores.tolist())
    assert result.value == pytest.approx(math.exp(-scores.mean()), rel=1e-12)
    assert result.standard_error == pytest.approx(result.value * scores.std() / math.sqrt(999), rel=1e-9)
    assert result.num_scored == 1000
    assert perplexity_of([-math.log(50.0)] * 7).value == pytest.approx(50.0)
