"""What the operator may choose, how prompts are cut, and the order in which sequences wait. Pure."""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from lamina.coordinator.engine.sequence import Sequence
from lamina.coordinator.engine.window_ledger import WindowLimits
from lamina.spec.errors import InvalidConfig
from lamina.spec.step import BLOCK_TOKENS, MAX_RUN_AHEAD

ADMISSIONS = ("optimistic", "reserve")
POLICIES = ("fcfs", "spf")

by_key = attrgetter("key")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step (those of StageSettings), the pool, and the policies (A-41, A-42)."""

    num_stages: int
    max_rows: int  # tokens of a step
    max_seqs: int  # slices of a step
    max_logit_rows: int
    max_context: int  # tokens of one sequence
    num_blocks: tuple[int, ...]  # by cache group
    windows: tuple[int | None, ...] = ()  # by cache group; None keeps all positions, as all do if it is empty
    admission: str = "optimistic"
    policy: str = "fcfs"
    prefix_caching: bool = True
    prefill_chunk_tokens: int = 512  # of one sequence in one step, at most
    pipeline_width: float | None = None  # see `prefill_rows`; None: as many as stages
    min_prefill_rows: int = 24  # see `prefill_rows`
    step_cost_rows: int = 8  # see `prefill_rows`
    run_ahead: int = 2  # samples of one sequence that are planned and not known: one running, the others ahead
    max_waiting: int = 256

    def __post_init__(self) -> None:
        if self.admission not in ADMISSIONS:
            raise InvalidConfig(f"admission {self.admission!r} is none of {', '.join(ADMISSIONS)}")
        if self.policy not in POLICIES:
            raise InvalidConfig(f"policy {self.policy!r} is none of {', '.join(POLICIES)}")
        if not self.num_blocks:
            raise InvalidConfig("num_blocks names no cache group")
        if self.windows and (len(self.windows) != len(self.num_blocks) or None not in self.windows):
            raise InvalidConfig(
                f"windows {self.windows} of {len(self.num_blocks)} cache groups, of which one keeps all"
            )
        limits = {name: getattr(self, name) for name in ("num_stages", "max_rows", "max_seqs", "max_logit_rows")}
        limits |= {
            name: getattr(self, name)
            for name in ("max_context", "prefill_chunk_tokens", "min_prefill_rows", "run_ahead", "max_waiting")
        }
        limits |= {"num_blocks": min(self.num_blocks), "step_cost_rows": self.step_cost_rows}
        for name, value in limits.items():
            if value < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}")

    @property
    def is_windowed(self) -> tuple[bool, ...]:
        """By cache group: whether blocks are given back once they are out of the window."""
        return tuple(window is not None for window in self.windows) or (False,) * len(self.num_blocks)

    @property
    def num_kept_blocks(self) -> int:
        """Blocks of the smallest group that keeps all positions: one is taken in each of these at a time."""
        pairs = zip(self.num_blocks, self.is_windowed, strict=True)
        return min(count for count, is_windowed in pairs if not is_windowed)

    @property
    def window_limits(self) -> WindowLimits | None:
        """What holds for the groups with a window together; None if there are none."""
        windowed = [(count, w) for count, w in zip(self.num_blocks, self.windows, strict=False) if w is not None]
        if not windowed:
            return None
        counts, widths = zip(*windowed, strict=True)
        max_chunk = min(self.prefill_chunk_tokens, self.max_rows)
        return WindowLimits(min(counts), max(widths), max_chunk, self.run_ahead)

    @property
    def max_outstanding(self) -> int:
        """Steps that may be issued and not done: every stage runs one and has the next at hand."""
        return min(max(self.run_ahead, 2 * self.num_stages), MAX_RUN_AHEAD)

    @property
    def num_lanes(self) -> int:
        """Micro-batches that decode in turns: as many as it takes to keep the busiest device at work, each of which
        reads the weights anew. One where all stages are of one device."""
        return self.num_stages if self.pipeline_width is None else math.ceil(self.pipeline_width)

    @property
    def max_decodes(self) -> int:
        """Decode slices that fit one step."""
        return min(self.max_rows, self.max_seqs, self.max_logit_rows)

    @property
    def max_running(self) -> int:
        """Admitted sequences: as many as a micro-batch of every lane can decode, so that none waits for a slot."""
        return self.num_lanes * self.max_decodes


def prefill_rows(num_pending: int, num_total: int, budget: int, *, width: float, min_rows: int, step_cost: int) -> int:
    """Rows of prefill that the next step should take: `num_pending` are left of `num_total`, at most `budget` fit.

    `width` is how many equal stages would overlap as much: the work of all over that of the busiest device. A step of r
    rows takes a device as long as step_cost + r rows would on their own. So k equal steps of n rows in all take
    (k + width - 1) (step_cost + n / k), which is least at k = sqrt((width - 1) n / step_cost); but none is cut to less
    than `min_rows`, below which devices lose more than that. Steps are whole blocks, and a rest for which a step would
    be mostly cost goes with the last. With a width of 1 nothing overlaps, and a step takes what it can. Decodes have no
    place here: they ride along.
    """
    if width <= 1:
        return min(num_pending, budget)
    wanted = max(min_rows, math.sqrt(step_cost * num_total / (width - 1)))
    whole = budget - budget % BLOCK_TOKENS or budget
    num_steps = max(1, min(round(num_total / wanted), num_total // min_rows), -(-num_total // whole))
    rows = min(whole, max(1, int(num_total / num_steps / BLOCK_TOKENS + 0.5)) * BLOCK_TOKENS)
    is_last = num_pending <= budget and num_pending - rows < min(2 * step_cost, rows / 2)
    return num_pending if is_last else rows


class PrefillPace:
    """How many rows of prefill each step takes, equal over all steps of what waited when the last prompt came."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._num_pending = 0
        self._num_total = 0

    def next_rows(self, num_pending: int, budget: int) -> int:
        """Of `num_pending` tokens that are to be computed, those that a step with room for `budget` rows takes."""
        if num_pending > self._num_pending:
            self._num_total = num_pending
        self._num_pending = num_pending
        config = self._config
        if not num_pending or budget <= 0:
            return 0
        return prefill_rows(
            num_pending,
            self._num_total,
            budget,
            width=config.num_stages if config.pipeline_width is None else config.pipeline_width,
            min_rows=config.min_prefill_rows,
            step_cost=config.step_cost_rows,
        )


class WaitingQueue:
    """Sequences in the policy's order, which nothing bypasses (A-41): if the first does not fit, nobody is admitted.

    fcfs: by arrival. spf: those that have run before (preempted, re-planned) in front, then the fewest tokens first; a
    long prompt waits for as long as shorter ones keep coming.
    """

    def __init__(self, policy: str) -> None:
        self._shortest_first = policy == "spf"
        self._sequences: list[Sequence] = []
        self.num_tokens = 0  # of all

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def first(self) -> Sequence | None:
        """The next to be admitted."""
        return self._sequences[0] if self._sequences else None

    def add(self, seq: Sequence) -> None:
        """Put a sequence in its place; its `key` is its place in the order of prefill, too."""
        arrival = seq.record.request_id
        has_run = seq.record.scheduled_s is not None
        seq.key = (not has_run, len(seq.tokens), arrival) if self._shortest_first else (arrival,)
        insort(self._sequences, seq, key=by_key)
        self.num_tokens += len(seq.tokens)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that waits."""
        del self._sequences[bisect_left(self._sequences, seq.key, key=by_key)]
        self.num_tokens -= len(seq.tokens)
