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


def run(meter: StepMeter, clock: Clock, seconds: float, num_rows: int = 1, *, recorded: bool = False) -> float:
    """A step that takes so long, looked at when it is due and then all the time; how long it seemed to take."""
    start_s = clock.now
    clock.now = max(start_s, meter.due_s(start_s, plan(num_rows)))
    while not meter.look(is_done=clock.now >= start_s + seconds):
        clock.now = start_s + seconds
    meter.count(start_s, plan(num_rows), recorded=recorded)
    return clock.now - start_s


def test_a_step_is_looked_at_when_the_last_one_would_be_nearly_done() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    assert meter.due_s(0.0, plan(1)) == 0.0, "at once, as long as nothing is known"
    assert run(meter, clock, 1.0) == 1.0
    assert meter.due_s(1.0, plan(1)) == pytest.approx(1.8)
    assert meter.due_s(0.5, plan(1)) == pytest.approx(1.8), "behind the step that ended at 1"
    assert meter.due_s(1.0, plan(7)) == 1.0


def test_a_slow_step_does_not_make_the_next_ones_slow() -> None:
    """What was looked at late tells nothing: three steps later all is as before, whatever the first one took."""
    clock = Clock()
    meter = StepMeter(clock)
    times = [run(meter, clock, seconds) for seconds in (1.0, 4.0, 1.0, 1.0, 1.0, 1.0)]
    assert times == pytest.approx([1.0, 4.0, 3.2, 1.6, 1.0, 1.0])
    assert run(meter, clock, 100.0, recorded=True) == 100.0
    assert run(meter, clock, 1.0) == 1.0, "the time to record is not of the step"
