"""What of a sequence's tokens travels to the last stage: those that something looks back at, and they are enough."""

from array import array
from dataclasses import replace

import numpy as np
import pytest

from lamina.coordinator.engine.sequence import RequestId, RequestRecord, Sequence, SequenceRequest
from lamina.rpc_worker.sampler import Sampler
from lamina.spec.errors import InvalidPlan
from lamina.spec.ids import SeqId
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import AddSequence

VOCAB = 32
TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 24))
NUM_GENERATED = 9
DRAWN = {"temperature": 1.0, "seed": 11}


def introduced(sampling: SamplingParams, num_generated: int, grammar: str = "") -> AddSequence:
    """A sequence that comes to the last stage with TOKENS, the last of which were generated before it was preempted."""
    num_prompt = len(TOKENS) - num_generated
    request = SequenceRequest(TOKENS[:num_prompt], sampling, frozenset(), 100, grammar=grammar)
    record = RequestRecord(RequestId(0), num_prompt, 100, 0.0)
    return Sequence(request, record, array("I", TOKENS), 200).introduce(SeqId(0))


@pytest.mark.parametrize("num_generated", [0, NUM_GENERATED])
@pytest.mark.parametrize(
    ("changes", "num_sent"),
    [
        ({}, (0, 0)),
        ({"logit_bias": {3: 2.0}, "top_k": 5}, (0, 0)),
        ({"presence_penalty": 1.5}, (0, NUM_GENERATED)),
        ({"frequency_penalty": 1.5, "penalty_window": 4}, (0, 4)),
        ({"frequency_penalty": 1.5, "penalty_window": 15}, (0, NUM_GENERATED)),
        ({"repetition_penalty": 3.0}, (24, 24)),
        ({"repetition_penalty": 3.0, "frequency_penalty": 2.0, "penalty_window": 5}, (5, 5)),
        ({"repetition_penalty": 3.0, "presence_penalty": 1.0, "penalty_window": 15}, (15, 15)),
        ({"repetition_penalty": 3.0, "penalty_window": 0}, (0, 0)),
    ],
)
def test_what_is_looked_back_at_is_sent_and_is_enough(
    changes: dict[str, object], num_sent: tuple[int, int], num_generated: int
) -> None:
    """The same tokens as with the whole history, also once the window has moved on."""
    add = introduced(SamplingParams(**(DRAWN | changes)), num_generated)  # type: ignore[arg-type]
    assert len(add.history_ids) == num_sent[bool(num_generated)]
    assert add.history_ids == TOKENS[add.num_omitted :]
    whole = replace(add, history_ids=TOKENS, num_omitted=0)
    logits = np.random.default_rng(4).normal(0, 1, (40, 1, VOCAB)).astype(np.float32)
    assert drawn(add, logits) == drawn(whole, logits)


def drawn(add: AddSequence, logits: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> list[int]:
    sampler = Sampler(VOCAB)
    sampler.add(add)
    return [sampler.sample([(add.seq, len(TOKENS) + i)], row)[0].token for i, row in enumerate(logits)]


def test_a_grammar_is_given_all_output() -> None:
    assert introduced(SamplingParams(), NUM_GENERATED, "start: /a*/").history_ids == TOKENS[-NUM_GENERATED:]
    params = SamplingParams(presence_penalty=1.0, penalty_window=2)
    assert introduced(params, NUM_GENERATED, "start: /a*/").history_ids == TOKENS[-NUM_GENERATED:]
    assert introduced(SamplingParams(), 0, "start: /a*/").history_ids == ()


def test_scores_need_the_whole_history() -> None:
    sampler = Sampler(VOCAB)
    sampler.add(introduced(SamplingParams(), 0))
    with pytest.raises(InvalidPlan, match="its history has no tokens at 3-4 to be scored"):
        sampler.score([(SeqId(0), range(3, 5))], np.zeros((2, VOCAB), np.float32))
