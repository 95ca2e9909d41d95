"""Admission and preemption, on a simulated pipeline that checks every block that is read or written."""

import pytest

from lamina.spec.step import StepPlan
from support.sim_engine import SimEngine, config, request


def engine(**changes: object) -> SimEngine:
    return SimEngine(config(**changes))


def computed(plan: StepPlan) -> dict[int, tuple[int, int]]:
    """Sequence -> positions that the step computes."""
    return {piece.seq: (piece.pos, piece.end) for piece in plan.slices}


# -- admission


def test_optimistic_admission_leaves_a_margin() -> None:
    """A-41: the prompt's blocks and one for each running sequence; the second waits though its prompt would fit."""
    sim = engine(num_blocks=(5,))
    sim.add(request((1,) * 40, 8))
    sim.add(request((2,) * 32, 8))
    sim.issue()
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (1, 1)
    sim.drain()
    sim.check_outputs()
    roomy = engine(num_blocks=(6,))
    roomy.add(request((1,) * 40, 8))
    roomy.add(request((2,) * 32, 8))
    roomy.issue()
    assert roomy.scheduler.num_running == 2


@pytest.mark.parametrize(("max_tokens", "num_admitted"), [(16, 2), (17, 1)])
def test_reserve_admission_is_exact(max_tokens: int, num_admitted: int) -> None:
    """A-41: prompt + max_new - 1 positions, rounded up: 17 + 16 - 1 = 32 are two blocks, one more is three."""
    sim = engine(num_blocks=(4,), admission="reserve")
    for first in (1, 2):
        sim.add(request((first,) * 17, max_tokens))
    sim.issue()
    assert sim.scheduler.num_running == num_admitted
    sim.drain()
    sim.check_outputs()
    assert sim.scheduler.num_preemptions == 0


def test_policy_order_is_never_bypassed() -> None:
    """A-41: the first that waits does not fit, so the small one behind it is not admitted either."""
    sim = engine(num_blocks=(8,))
    sim.add(request((1,) * 60, 30))
    big, small = sim.add(request((2,) * 60, 30)), sim.add(request((3,) * 4, 4))
    for _ in range(12):
        sim.step()
    assert sim.records[big].scheduled_s is None
    assert sim.records[small].scheduled_s is None
    sim.drain()
    sim.check_outputs()
    first, second = sim.records[big].scheduled_s, sim.records[small].scheduled_s
    assert first is not None
    assert second is not None
    assert first <= second


# -- preemption


def test_newest_is_preempted_when_blocks_run_out() -> None:
    """A-41: the newest gives way, drains first, waits at the head, and comes back with its output as history."""
    sim = engine(num_blocks=(4,), num_stages=2, prefix_caching=False)
    old, new, behind = (sim.add(request((i,) * 15, 30)) for i in (1, 2, 3))
    while not sim.scheduler.num_preemptions:
        sim.step()
    assert sim.records[new].num_preemptions + sim.records[behind].num_preemptions == 1
    preempted = behind if sim.records[behind].num_preemptions else new
    assert preempted == max(i for i in (old, new, behind) if sim.records[i].scheduled_s is not None)
    num_known = len(sim.outputs[preempted])
    sim.drain()
    sim.check_outputs()
    again = [add for issue in sim.issues for add in issue.adds if add.num_generated]
    assert again[0].num_prompt == 15
    assert again[0].num_generated >= num_known
    assert sim.records[old].num_preemptions == 0
    assert len({add.seq for issue in sim.issues for add in issue.adds}) == sum(len(issue.adds) for issue in sim.issues)
    sim.check_idle()


def test_preempted_sequence_keeps_its_blocks_until_its_steps_are_done() -> None:
    """While a step that names it is outstanding nothing of it is free, and its samples still count."""
    sim = engine(num_blocks=(3,), prefix_caching=False, max_context=32)
    sim.add(request((1,) * 15, 10))
    new = sim.add(request((2,) * 15, 10))
    while not sim.scheduler.num_preemptions:
        sim.issue_all()
        if not sim.scheduler.num_preemptions:
            sim.run_stages()
            sim.absorb()
    num_known = len(sim.outputs[new])
    (last_step,) = [issue.plan.step for issue in sim.issues if 1 in computed(issue.plan)][-1:]
    assert last_step >= sim.pipeline.num_answered
    sim.run_stages()
    while sim.pipeline.num_answered <= last_step:
        assert sim.scheduler.kv_usage_ratio == 1.0
        sim.absorb()
    assert sim.scheduler.kv_usage_ratio == 2 / 3
    assert len(sim.outputs[new]) > num_known
    sim.drain()
    sim.check_outputs()


@pytest.mark.parametrize("policy", ["fcfs", "spf"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_everybody_finishes_when_one_context_fits_the_pool(policy: str, num_stages: int) -> None:
    """No deadlock: twelve requests that each need the whole pool in the end."""
    sim = engine(num_blocks=(6,), max_context=96, policy=policy, num_stages=num_stages)
    for i in range(12):
        sim.add(request((i + 1,) * (3 + 5 * i), 96))
    sim.drain(max_steps=5_000)
    sim.check_outputs()
    assert sim.scheduler.num_preemptions
    assert all(len(sim.requests[i].prompt_ids) + len(output) == 97 for i, output in sim.outputs.items())
    sim.check_idle()


def test_reserve_never_preempts_under_pressure() -> None:
    """A-41: an admitted request always finishes without preemption."""
    sim = engine(num_blocks=(6,), max_context=96, admission="reserve", num_stages=2)
    for i in range(12):
        sim.add(request((i % 3 + 1,) * (3 + 5 * i), 30))
    sim.drain()
    sim.check_outputs()
    assert sim.scheduler.num_preemptions == 0


def test_decode_does_not_take_what_is_promised_to_a_prefill() -> None:
    """The old sequence grows while the new one's prompt goes in token by token: the new one gives way as a whole."""
    sim = engine(num_blocks=(6,), prefill_chunk_tokens=1, prefix_caching=False)
    sim.add(request((1,) * 16, 60))
    new = sim.add(request((2,) * 60, 4))
    for _ in range(80):
        sim.step()
        sim.check_blocks()
    assert sim.records[new].num_preemptions
    sim.drain()
    sim.check_outputs()
