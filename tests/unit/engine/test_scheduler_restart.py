"""An epoch is lost: every open request goes on in the next, from its tokens so far."""

import pytest

from lamina.spec.step import FinishReason, Tokens
from support.sim_engine import SimEngine, config, request


@pytest.mark.parametrize("num_absorbed", [0, 1, 7])
def test_restart_goes_on_where_it_was(num_absorbed: int) -> None:
    """A worker is lost, the request is not: prompt and known output are the history under a new SeqId, steps from 0."""
    sim = SimEngine(config(num_stages=2))
    running, waiting = sim.add(request((1, 2, 3), 12)), sim.add(request((4, 5, 6), 12))
    for _ in range(num_absorbed):
        sim.step()
    sim.issue_all()
    num_known = len(sim.outputs[running])
    sim.restart()
    assert sim.scheduler.take_removals() == ()
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting, sim.scheduler.num_outstanding) == (0, 2, 0)
    issue = sim.issue()
    assert issue is not None
    assert (issue.plan.epoch, issue.plan.step) == (1, 0)
    add = issue.adds[0]
    assert add.seq == 2, "0 and 1 were used in the epoch before"
    assert add.num_prompt == 3
    assert issue.plan.slices[0].input == Tokens((1, 2, 3, *sim.outputs[running]))
    assert (add.num_generated, add.max_tokens) == (num_known, 12)
    sim.drain()
    sim.check_outputs()
    assert len(sim.outputs[waiting]) == 12
    sim.check_idle()


def test_restart_forgets_the_prefix_cache() -> None:
    """The workers' blocks are gone with the epoch."""
    sim = SimEngine(config())
    sim.add(request(range(64), 2))
    sim.drain()
    sim.restart()
    later = sim.add(request(range(64), 2))
    sim.drain()
    assert sim.records[later].num_cached_tokens == 0
    sim.check_outputs()


def test_restart_on_a_smaller_placement() -> None:
    """A re-plan on what is left: limits shrink, outputs are cut to them, what no longer fits ends with both numbers."""
    sim = SimEngine(config())
    long, cut, fits = (sim.add(request(range(1, num + 1), 30)) for num in (60, 30, 5))
    sim.restart(config(num_blocks=(3,), num_stages=3))
    assert sim.ends[long].finish is FinishReason.ERROR
    assert "60 tokens so far, after the re-plan at most 48 fit" in sim.ends[long].error
    sim.drain()
    sim.check_outputs()
    assert (len(sim.outputs[cut]), len(sim.outputs[fits])) == (19, 30)
    sim.check_idle()
