"""A step in the making, and the sequences that may be in it. Pure; owned by the scheduler, which decides."""

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from operator import attrgetter

from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.coordinator.engine.sequence import Phase, Sequence
from lamina.spec.ids import StepId
from lamina.spec.step import BLOCK_TOKENS, AddSequence, SeqSlice, StepPlan

_by_last_step = attrgetter("last_step")


@dataclass(frozen=True, slots=True)
class Issue:
    """What to send now: `adds` to the last stage, then `plan` to all."""

    plan: StepPlan
    adds: tuple[AddSequence, ...]


class Batch:
    """The slices of one step so far, and what the step has left of each limit."""

    __slots__ = ("_config", "_share", "adds", "logits_left", "prefill_left", "rows_left", "seqs_left", "slices", "step")

    def __init__(self, step: StepId, config: SchedulerConfig) -> None:
        self.step = step
        self._config = config
        self.slices: list[SeqSlice] = []
        self.adds: list[AddSequence] = []
        self.rows_left = config.max_rows
        self.seqs_left = config.max_seqs
        self.logits_left = config.max_logit_rows
        self.prefill_left = self._share = 0

    def begin_prefill(self, num_rows: int) -> None:
        """Set how many rows of prefill the step takes, but for the rest of a sequence."""
        self.prefill_left = self._share = num_rows

    @property
    def has_room(self) -> bool:
        """Whether another prefill chunk fits and is wanted."""
        return self.prefill_left > 0 and self.rows_left > 0 and self.seqs_left > 0

    def chunk_end(self, seq: Sequence) -> int:
        """Where the sequence's next prefill chunk ends; on a block boundary, unless it is the last or falls short.

        A rest of less than a block goes with it, though the step then has more rows than it set out to take.
        """
        total = len(seq.tokens)
        wanted = max(self.prefill_left, min(self._share, BLOCK_TOKENS))
        if total - seq.pos - wanted < min(self._share / 2, BLOCK_TOKENS):
            wanted = total - seq.pos
        end = min(total, seq.pos + min(wanted, self._config.prefill_chunk_tokens, self.rows_left))
        if end == total and not self.logits_left:
            end -= 1
        if end == total:
            return end
        boundary = end - end % BLOCK_TOKENS
        return boundary if boundary > seq.pos else end

    def add_chunk(self, piece: SeqSlice) -> None:
        """Append a slice of any kind."""
        self.slices.append(piece)
        self.rows_left -= piece.num_tokens
        self.prefill_left -= piece.num_tokens
        self.seqs_left -= 1
        self.logits_left -= piece.want_logits

    def count_decodes(self, num_slices: int) -> None:
        """So many decode slices were put into `slices` directly."""
        self.rows_left -= num_slices
        self.seqs_left -= num_slices
        self.logits_left -= num_slices


class RunningSet:
    """The admitted sequences, by phase: PREFILL in the policy's order, DECODE from the least recently issued on."""

    def __init__(self) -> None:
        self.prefilling: list[Sequence] = []
        self.decoding: OrderedDict[Sequence, None] = OrderedDict()  # ascending in last_step
        self.closing: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.closing)

    @property
    def num_pending(self) -> int:
        """Rows left to prefill."""
        return sum(len(seq.tokens) - seq.pos for seq in self.prefilling)

    def next_decodes(self, step: StepId, lanes: int, *, may_stall: bool = False) -> tuple[list[Sequence], int]:
        """(decoding sequences that may be in `step`, how many of them it should take) if they take turns in `lanes`.

        One that is in the last `lanes` - 1 steps waits for its next turn, unless nobody is ready and `may_stall`. The
        share keeps the lanes equal: a fair part of all, and of those that are left for the other lanes of this turn.
        """
        order = list(self.decoding)
        if lanes <= 1 or not order:
            return order, len(order)
        horizon: int = step - lanes
        if may_stall:
            horizon = max(horizon, order[0].last_step)
        num_ready = bisect_right(order, horizon, key=_by_last_step)
        num_lanes_left = lanes - len({seq.last_step for seq in order[num_ready:]})
        return order[:num_ready], min(-(-len(order) // lanes), -(-num_ready // num_lanes_left))

    def start_prefill(self, seq: Sequence, index: int) -> None:
        """An admitted sequence, at its place among the prefilling ones."""
        seq.phase = Phase.PREFILL
        self.prefilling.insert(index, seq)

    def end_prefill(self, seq: Sequence) -> None:
        """Its last chunk is planned."""
        self.prefilling.remove(seq)
        seq.phase = Phase.DECODE
        self.decoding[seq] = None

    def end_decode(self, seq: Sequence) -> None:
        """Every position it may have is planned."""
        del self.decoding[seq]
        seq.phase = Phase.CLOSING
        self.closing.add(seq)

    def newest(self) -> Sequence | None:
        """The one that arrived last, of those that have something left to plan."""
        candidates = [*self.prefilling, *self.decoding]
        return max(candidates, key=lambda seq: seq.record.request_id, default=None)

    def remove(self, seq: Sequence) -> None:
        """Take out an admitted sequence."""
        match seq.phase:
            case Phase.PREFILL:
                self.prefilling.remove(seq)
            case Phase.DECODE:
                del self.decoding[seq]
            case Phase.CLOSING:
                self.closing.remove(seq)
