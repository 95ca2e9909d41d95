"""Counting and timing of steps, and when it is time to look at the device again."""

import pytest

from lamina.rpc_worker.stage_facts import StepMeter
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
    assert (meter.num_steps, meter.busy_s) == (3, 9.0)
    assert (meter.num_prefill_steps, meter.prefill_busy_s) == (1, 5.0)


def test_a_slow_step_does_not_put_off_the_look_at_the_next() -> None:
    """Once a step took long, be it that it was looked at late: the next is looked at as early as ever."""
    clock = Clock()
    meter = StepMeter(clock)
    assert meter.due_s(0.0, plan(1)) == 0.0, "at once, as long as nothing is known"
    for seconds in (1.0, 100.0):
        start_s = clock.now
        clock.now += seconds
        meter.count(start_s, plan(1))
    assert meter.due_s(101.0, plan(1)) == pytest.approx(101.8)
    assert meter.due_s(99.0, plan(1)) == pytest.approx(101.8), "behind the step that ended at 101"
    assert meter.due_s(101.0, plan(7)) == 101.0
