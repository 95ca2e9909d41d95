"""Counting and timing of steps, and when it is time to look at the device again."""

import pytest

from lamina.rpc_worker.stage_facts import StepCounts, StepMeter
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.step import SeqSlice, StepPlan, Tokens


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(num_rows: int) -> StepPlan:
    return StepPlan(Epoch(1), StepId(0), (SeqSlice(SeqId(0), 0, num_rows, Tokens((1,) * num_rows), ((),), True),))


def test_overlapping_steps_are_busy_once() -> None:
    """A step launched at 1 while another runs until 3 has the device from 3 on."""
    clock = Clock()
    meter = StepMeter(clock)
    for start_s, end_s, num_rows in ((0.0, 3.0, 1), (1.0, 4.0, 1), (9.0, 14.0, 5)):
        clock.now = end_s
        meter.count(start_s, plan(num_rows))
    assert meter.counts == StepCounts(3, 9.0, num_prefill_steps=1, prefill_busy_s=5.0)


def test_counts_are_of_one_moment() -> None:
    """A scrape between two additions must not see a prompt's step among those without: a counter would step back."""
    clock = Clock()
    meter = StepMeter(clock)
    seen = meter.counts
    meter.count(0.0, plan(2))
    assert seen == StepCounts()
    assert meter.counts == StepCounts(1, 0.0, 1, 0.0)


def run(meter: StepMeter, clock: Clock, seconds: float, *, looks_s: float = 0.0, recorded: bool = False) -> float:
    """A step of one row that takes so long: looked at when launched, when it is due, and from then on every `looks_s`
    seconds, at once when it ends where that is 0. How long it seemed to take."""
    start_s = clock.now
    end_s = start_s + seconds
    assert not meter.look(is_done=False)
    clock.now = max(start_s, meter.due_s(start_s, plan(1)))
    while not meter.look(is_done=clock.now >= end_s):
        clock.now = min(end_s, clock.now + looks_s) if looks_s else end_s
    meter.count(start_s, plan(1), recorded=recorded)
    return clock.now - start_s


def test_a_step_is_looked_at_when_the_last_one_would_be_nearly_done() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    assert meter.due_s(0.0, plan(1)) == 0.0, "at once, as long as nothing is known"
    assert run(meter, clock, 1e-3, looks_s=2e-5) == pytest.approx(1e-3)
    now = clock.now
    assert meter.due_s(now, plan(1)) == pytest.approx(now + 0.8e-3)
    assert meter.due_s(now / 2, plan(1)) == pytest.approx(now + 0.8e-3), "behind the step that ended now"
    assert meter.due_s(now, plan(7)) == now


def test_a_slow_step_does_not_make_the_next_ones_slow() -> None:
    """What was looked at late tells nothing, though it was looked at in vain when it was launched."""
    clock = Clock()
    meter = StepMeter(clock)
    times = [run(meter, clock, 1e-3 * ms, looks_s=2e-5) for ms in (1.0, 4.0, 1.0, 1.0, 1.0, 1.0)]
    assert times == pytest.approx([1e-3, 4e-3, 3.2e-3, 1.6e-3, 1e-3, 1e-3])
    assert run(meter, clock, 100.0, looks_s=1.0, recorded=True) == pytest.approx(100.0)
    assert run(meter, clock, 1e-3, looks_s=2e-5) == pytest.approx(1e-3), "the time to record is not of the step"


def test_a_step_that_took_for_ever_costs_milliseconds() -> None:
    """One that waited behind a compiler, or for another process on the card: nobody stays away so long again."""
    clock = Clock()
    meter = StepMeter(clock)
    assert run(meter, clock, 60.0, looks_s=1.0) == pytest.approx(60.0)
    assert meter.due_s(clock.now, plan(1)) == pytest.approx(clock.now + 5e-3)
    assert sum(run(meter, clock, 1e-3, looks_s=2e-5) for _ in range(20)) < 0.12
