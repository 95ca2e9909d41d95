"""Non-finite answers: whose KV blocks are found no more, and whose still are."""

import pytest

from lamina.spec.ids import SeqId
from lamina.spec.step import FinishReason
from support.sim_engine import SimEngine, config, request

SYSTEM = tuple(range(1, 33))
PROMPT = (*SYSTEM, *range(40, 80))


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_poisoned_prompt_is_computed_again(num_stages: int) -> None:
    """A-05, A-08: the same prompt, sent again after NumericalError, must not continue from the blocks that failed."""
    sim = SimEngine(config(num_stages=num_stages))
    first = sim.add(request(SYSTEM, 20))
    sim.drain()
    bad = sim.add(request(PROMPT, 20))
    sim.pipeline.nonfinite.add(SeqId(1))
    sim.drain()
    assert sim.ends[bad].finish is FinishReason.ERROR
    assert sim.outputs[bad] == []
    sim.check_blocks()
    again = sim.add(request(PROMPT, 20))
    sim.drain()
    third = sim.add(request(PROMPT, 20))
    sim.drain()
    cached = [sim.records[i].num_cached_tokens for i in (first, bad, again, third)]
    assert cached == [0, 32, 32, 64], "what another sequence has proven is kept, what only failed is not"
    sim.check_outputs()
    sim.check_blocks()
    sim.check_idle()


def test_poison_of_a_cancelled_sequence_lasts_for_one_answer() -> None:
    """Its client left before it had an answer; the next reader fails, and the one after it computes everything."""
    sim = SimEngine(config(prefill_chunk_tokens=48))
    cancelled = sim.add(request(PROMPT, 20))
    sim.issue()
    sim.cancel(cancelled)
    sim.drain()
    bad = sim.add(request(PROMPT, 20))
    sim.pipeline.nonfinite.add(SeqId(1))
    sim.drain()
    good = sim.add(request(PROMPT, 20))
    sim.drain()
    assert [sim.records[i].num_cached_tokens for i in (bad, good)] == [48, 0]
    sim.check_outputs()
    sim.check_idle()


def test_a_sequence_that_fails_late_loses_what_no_answer_has_read() -> None:
    """Blocks below the last finite answer are sound and stay; others that share them go on."""
    sim = SimEngine(config())
    bad = sim.add(request(SYSTEM, 60))
    while len(sim.outputs[bad]) < 20:
        sim.step()
    fellow = sim.add(request((*SYSTEM, *sim.outputs[bad][:17]), 30))
    sim.issue()
    sim.pipeline.nonfinite.add(SeqId(0))
    sim.drain()
    assert sim.ends[bad].finish is FinishReason.ERROR
    assert sim.records[fellow].num_cached_tokens == 48
    sim.check_outputs()
    again = sim.add(request((*SYSTEM, *sim.outputs[bad][:17]), 2))
    sim.drain()
    assert sim.records[again].num_cached_tokens == 48
    sim.check_blocks()
    sim.check_idle()
