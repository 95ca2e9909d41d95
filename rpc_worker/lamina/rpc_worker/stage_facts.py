"""A stage in figures, and the counting behind them. Pure but for the clock, which is time.perf_counter."""

import time
from dataclasses import dataclass, field

from lamina.spec.device import GraphCounts
from lamina.spec.step import StepPlan

_NEARLY = 0.9  # of the time that a step is expected to take nobody looks at the device
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

    def __init__(self) -> None:
        self.num_steps = self.num_prefill_steps = 0
        self.busy_s = self.prefill_busy_s = 0.0
        self._last_end_s = 0.0
        self._seconds: dict[int, float] = {}  # that a step took last, by its rows

    def count(self, start_s: float, plan: StepPlan) -> None:
        """A step that began then has ended. Time in which the step before it was still under way counts once."""
        end_s = time.perf_counter()
        busy_s = end_s - max(start_s, self._last_end_s)
        self._last_end_s = end_s
        self._seconds[min(plan.num_rows, _MAX_TIMED_ROWS)] = busy_s
        self.num_steps += 1
        self.busy_s += busy_s
        if plan.num_rows > len(plan.slices):
            self.num_prefill_steps += 1
            self.prefill_busy_s += busy_s

    def due_s(self, start_s: float, plan: StepPlan) -> float:
        """When the oldest step under way is nearly done, if it takes as long as the last of as many rows."""
        expected_s = self._seconds.get(min(plan.num_rows, _MAX_TIMED_ROWS), 0.0)
        return max(start_s, self._last_end_s) + _NEARLY * expected_s
