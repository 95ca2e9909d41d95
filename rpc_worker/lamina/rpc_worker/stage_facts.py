"""A stage in figures, and the counting behind them. Pure but for the clock, which is time.perf_counter."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.spec.device import GraphCounts
from lamina.spec.step import StepPlan

_NEARLY = 0.8  # of the time that a step is expected to take nobody looks at the device,
_LONGEST_S = 5e-3  # but not for longer than this, should the expectation be wrong
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


class StepCounts(NamedTuple):
    """What `StageFacts` says of steps."""

    num_steps: int = 0
    busy_s: float = 0.0
    num_prefill_steps: int = 0
    prefill_busy_s: float = 0.0


class StepMeter:
    """Counts steps and times them. Written by the compute thread; `counts` is replaced as a whole, for any to read."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.counts = StepCounts()
        self._last_end_s = 0.0
        # What a step is expected to take, by its rows. Only one that was found unfinished shortly before it was found
        # finished has told how long it took; after another, which was looked at late, the expectation is halved.
        self._expected_s: dict[int, float] = {}
        self._unfinished_s = 0.0  # when a step was looked at in vain last

    def look(self, *, is_done: bool) -> bool:
        """The oldest step under way was looked at: what was seen is handed back."""
        if not is_done:
            self._unfinished_s = self._clock()
        return is_done

    def count(self, start_s: float, plan: StepPlan, *, recorded: bool = False, end_s: float | None = None) -> None:
        """A step began then and ended at `end_s` (None: now), recorded in passing. Time that two were under way counts
        once."""
        end_s = self._clock() if end_s is None else end_s
        begin_s = max(start_s, self._last_end_s)
        busy_s, unseen_s = end_s - begin_s, end_s - max(begin_s, self._unfinished_s)
        self._last_end_s = end_s
        rows = min(plan.num_rows, _MAX_TIMED_ROWS)
        if recorded:
            pass  # others need not record, and take less
        elif unseen_s <= busy_s / 4:
            self._expected_s[rows] = busy_s
        else:
            self._expected_s[rows] = self._expected_s.get(rows, 0.0) / 2
        before, has_prompt = self.counts, plan.num_rows > len(plan.slices)
        self.counts = StepCounts(
            before.num_steps + 1,
            before.busy_s + busy_s,
            before.num_prefill_steps + has_prompt,
            before.prefill_busy_s + has_prompt * busy_s,
        )

    def due_s(self, start_s: float, plan: StepPlan) -> float:
        """When to look at the oldest step under way: nearly done, if it takes as long as expected, or soon anyway."""
        expected_s = self._expected_s.get(min(plan.num_rows, _MAX_TIMED_ROWS), 0.0)
        return min(max(start_s, self._last_end_s) + _NEARLY * expected_s, self._clock() + _LONGEST_S)
