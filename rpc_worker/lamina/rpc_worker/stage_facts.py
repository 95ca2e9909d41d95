"""A stage in figures, and the counting behind them. Pure but for the clock, which is time.perf_counter."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lamina.spec.device import GraphCounts
from lamina.spec.step import StepPlan

_NEARLY = 0.8  # of the time that a step takes at the least nobody looks at the device
_MAX_TIMED_ROWS = 1024  # steps of more count as of so many


@dataclass(frozen=True, slots=True)
class StageFacts:
    """A stage in figures: memory in bytes, what it has done since it was loaded."""

    weight_bytes: int = 0
    arena_bytes: int = 0
    cache_bytes: int = 0
    block_bytes: tuple[int, ...] = ()
    num_steps: int = 0
    busy_s: float = 0.0
    num_sequences: int = 0
    graphs: GraphCounts = field(default_factory=GraphCounts)
    compute_dtype: str = ""
    num_prefill_steps: int = 0  # of num_steps, those with a prompt's chunk in them
    prefill_busy_s: float = 0.0  # of busy_s, in those


class StepMeter:
    """Counts steps and times them. Written by the compute thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.num_steps = self.num_prefill_steps = 0
        self.busy_s = self.prefill_busy_s = 0.0
        self._last_end_s = 0.0
        # What a step took at the least, by its rows. Not what the last one took: a slow one, looked at late for that,
        # would make the next one slow.
        self._least_s: dict[int, float] = {}

    def count(self, start_s: float, plan: StepPlan) -> None:
        """A step that began then has ended. Time in which the step before it was still under way counts once."""
        end_s = self._clock()
        busy_s = end_s - max(start_s, self._last_end_s)
        self._last_end_s = end_s
        rows = min(plan.num_rows, _MAX_TIMED_ROWS)
        self._least_s[rows] = min(busy_s, self._least_s.get(rows, busy_s))
        self.num_steps += 1
        self.busy_s += busy_s
        if plan.num_rows > len(plan.slices):
            self.num_prefill_steps += 1
            self.prefill_busy_s += busy_s

    def due_s(self, start_s: float, plan: StepPlan) -> float:
        """When the oldest step under way is nearly done, if it is as fast as the fastest of as many rows was."""
        least_s = self._least_s.get(min(plan.num_rows, _MAX_TIMED_ROWS), 0.0)
        return max(start_s, self._last_end_s) + _NEARLY * least_s
