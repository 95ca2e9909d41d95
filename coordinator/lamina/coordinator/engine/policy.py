"""What the operator may choose, and the order in which sequences wait. Pure."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from lamina.coordinator.engine.sequence import Sequence
from lamina.spec.errors import InvalidConfig
from lamina.spec.step import MAX_RUN_AHEAD

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
    admission: str = "optimistic"
    policy: str = "fcfs"
    prefix_caching: bool = True
    prefill_chunk_tokens: int = 512  # of one sequence in one step, at most
    min_chunk_tokens: int = 32  # a prompt is not cut smaller than this for the sake of the pipeline
    run_ahead: int = 2  # samples of one sequence that are planned and not known: one running, the others ahead
    max_waiting: int = 256

    def __post_init__(self) -> None:
        if self.admission not in ADMISSIONS:
            raise InvalidConfig(f"admission {self.admission!r} is none of {', '.join(ADMISSIONS)}")
        if self.policy not in POLICIES:
            raise InvalidConfig(f"policy {self.policy!r} is none of {', '.join(POLICIES)}")
        if not self.num_blocks:
            raise InvalidConfig("num_blocks names no cache group")
        limits = {name: getattr(self, name) for name in ("num_stages", "max_rows", "max_seqs", "max_logit_rows")}
        limits |= {
            name: getattr(self, name)
            for name in ("max_context", "prefill_chunk_tokens", "min_chunk_tokens", "run_ahead", "max_waiting")
        }
        limits["num_blocks"] = min(self.num_blocks)
        for name, value in limits.items():
            if value < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}")

    @property
    def max_outstanding(self) -> int:
        """Steps that may be issued and not done: every stage runs one and has the next at hand."""
        return min(max(self.run_ahead, 2 * self.num_stages), MAX_RUN_AHEAD)

    @property
    def max_decodes(self) -> int:
        """Decode slices that fit one step."""
        return min(self.max_rows, self.max_seqs, self.max_logit_rows)

    @property
    def max_running(self) -> int:
        """Admitted sequences: as many as one micro-batch per stage can decode, so that none waits for a slot."""
        return self.num_stages * self.max_decodes


class WaitingQueue:
    """Sequences in the policy's order, which nothing bypasses (A-41): if the first does not fit, nobody is admitted.

    fcfs: by arrival. spf: those that have run before (preempted, re-planned) in front, then the fewest tokens first; a
    long prompt waits for as long as shorter ones keep coming.
    """

    def __init__(self, policy: str) -> None:
        self._shortest_first = policy == "spf"
        self._sequences: list[Sequence] = []

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

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that waits."""
        del self._sequences[bisect_left(self._sequences, seq.key, key=by_key)]
