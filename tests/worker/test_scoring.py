"""Scoring: the last stage answers the log-probabilities of tokens it knows, beside what it samples."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lamina.kernels.registry import create_backend
from lamina.rpc_worker import filters
from lamina.rpc_worker.sampler import Sampler
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.spec.errors import InvalidPlan
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import AddSequence, SeqSlice, StepDone, StepPlan, Tokens
from support.inprocess import InProcessModel

MODEL = Path(__file__).parents[1] / "data" / "tiny_qwen3.gguf"
TEXTS = [[5, 3, 99, 41, 7, 7, 60], [12, 80, 2, 2, 31], [44, 9, 17]]


@pytest.fixture
def model() -> Iterator[InProcessModel]:
    backend = create_backend("reference")
    settings = StageSettings(max_rows=16, max_seqs=3, max_logit_rows=9, max_context=64, kv_dtype="f32")
    model = InProcessModel(MODEL, backend, settings=settings)
    yield model
    model.free()
    backend.close()


def logprobs_of(model: InProcessModel, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Of every token but the first, fed one by one, in float64."""
    model.reset()
    scores = []
    for token, following in pairwise(tokens):
        logits = model.step({0: [token]})[0].astype(np.float64)
        scores.append(logits[following] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    model.reset()
    return np.array(scores)


def add(stage: Stage, seq: int, history: Sequence[int]) -> None:
    stage.add_sequence(AddSequence(SeqId(seq), SamplingParams(), tuple(history), frozenset(), 100))


def run(stage: Stage, step: int, slices: Sequence[SeqSlice], num_scored: tuple[int, ...]) -> StepDone:
    plan = StepPlan(Epoch(1), StepId(step), tuple(slices), num_scored=num_scored)
    ids = [token for piece in slices if isinstance(piece.input, Tokens) for token in piece.input.ids]
    done = stage.run(ReadyStep(plan, np.array(ids, np.int32), None)).done
    assert done is not None
    return done


def piece(seq: int, pos: int, ids: Sequence[int], *, want_logits: bool) -> SeqSlice:
    blocks = ((BlockId(4 * seq),),) if pos == 0 else ((),)
    return SeqSlice(SeqId(seq), pos, len(ids), Tokens(tuple(ids)), blocks, want_logits)


def test_scores_are_the_log_probabilities_of_the_next_tokens(model: InProcessModel) -> None:
    """In company, over two steps, beside sampled rows: equal to one token at a time, in the plan's order."""
    expected = [logprobs_of(model, tokens) for tokens in TEXTS]
    model.reset()
    best = [int(logits.argmax()) for logits in model.step(dict(enumerate(TEXTS)))]
    model.reset()
    stage = model.stages[0]
    for seq, tokens in enumerate(TEXTS):
        add(stage, seq, tokens)
    first = [
        piece(0, 0, TEXTS[0][:4], want_logits=False),
        piece(1, 0, TEXTS[1], want_logits=True),
        piece(2, 0, TEXTS[2], want_logits=True),
    ]
    done = run(stage, 0, first, (3, 4, 0))
    # Rows 1-3 of the first text predict its tokens 2-4; the second's last row is sampled, those before are scored.
    np.testing.assert_allclose(done.scores, [*expected[0][1:4], *expected[1]], rtol=1e-5)
    assert [token.token for token in done.tokens] == best[1:]
    done = run(stage, 1, [piece(0, 4, TEXTS[0][4:6], want_logits=False)], (2,))
    np.testing.assert_allclose(done.scores, expected[0][4:6], rtol=1e-5)
    assert done.tokens == ()


def test_a_step_may_score_nothing(model: InProcessModel) -> None:
    """A first chunk without logits, of a sequence that will be scored later."""
    stage = model.stages[0]
    add(stage, 0, TEXTS[0])
    done = run(stage, 0, [piece(0, 0, TEXTS[0][:4], want_logits=False)], (0,))
    assert (done.tokens, done.scores) == ((), ())


def test_a_token_that_the_history_lacks_cannot_be_scored(model: InProcessModel) -> None:
    stage = model.stages[0]
    add(stage, 0, TEXTS[0])
    with pytest.raises(InvalidPlan, match="no tokens at 6-7"):
        run(stage, 0, [piece(0, 0, TEXTS[0], want_logits=False)], (2,))


def test_an_unknown_sequence_cannot_be_scored(model: InProcessModel) -> None:
    with pytest.raises(InvalidPlan, match="sequence 0: its history"):
        run(model.stages[0], 0, [piece(0, 0, [1, 2], want_logits=False)], (1,))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_scores_of_logits_that_are_not_finite_are_nan(poison: float) -> None:
    """B-35: never a number that looks like one. A token of probability 0 is not that: its logarithm is -inf."""
    sampler = Sampler(4)
    sampler.add(AddSequence(SeqId(3), SamplingParams(), (1, 2, 0), frozenset(), 9))
    logits = np.array([[0, 1, 2, 3], [poison] * 4], np.float32)
    scores = sampler.score([(SeqId(3), range(1, 3))], logits)
    assert scores[0] == pytest.approx(2 - np.log(np.exp([0, 1, 2, 3]).sum()), rel=1e-6)
    assert np.isnan(scores[1])
    assert filters.logprob(np.array([0, -np.inf], np.float32), 1) == -np.inf


def test_a_score_keeps_its_precision_over_a_large_vocabulary() -> None:
    """float32 sums of 200,000 terms would lose five digits."""
    logits = np.random.default_rng(3).normal(0, 4, 200_000).astype(np.float32) + np.float32(900)
    exact = logits.astype(np.float64)
    expected = exact[17] - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    assert filters.logprob(logits, 17) == pytest.approx(expected, rel=1e-6)
