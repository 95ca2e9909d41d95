"""The step contract as values: what the coordinator plans, what the last stage answers. Immutable, no IO.

Rules that everything relies on (design, section 5): steps of an epoch run in ascending order on every stage; issued
plans never change; a sequence appears at most once in a step; blocks are released only when every issued step that
names them is done; a `SeqId` is never reused.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeVar, cast

from lamina.spec.errors import InvalidPlan
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.sampling import SamplingParams

BLOCK_TOKENS = 16  # tokens per KV block on every stage
TOKEN_BYTES = 4  # of a packed token id
MAX_RUN_AHEAD = 64  # steps that may be issued and not done; bounds what a stage holds back


Part = TypeVar("Part", bound=tuple[object, ...])


# The parts of a slice and of an answer are NamedTuples, not dataclasses: a step of 64 is built in Python while tokens
# wait, and a frozen dataclass costs three times as much to make.
def from_tuple(kind: type[Part]) -> Callable[[tuple[object, ...]], Part]:
    """Makes a NamedTuple of all its fields in order, twice as fast as its own constructor, which is Python code."""
    # The type is a string because this runs in every step: making a Callable[...] takes longer than making a slice.
    return cast("Callable[[tuple[object, ...]], Part]", partial(tuple.__new__, kind))


class Tokens(tuple[bytes]):
    """Input known when the step is planned: token ids, packed as they travel (uint32, little-endian).

    A prompt of thousands goes from the scheduler to the device without becoming that many Python integers again.
    """

    __slots__ = ()

    def __new__(cls, ids: Iterable[int]) -> "Tokens":
        """Of ids in [0, 2**32); what is packed already is made by `from_tuple`."""
        return tuple.__new__(cls, (pack_ids(ids),))

    def __repr__(self) -> str:
        return f"Tokens({self.ids})"

    @property
    def packed(self) -> bytes:
        """TOKEN_BYTES for every id."""
        return self[0]

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids as integers."""
        return unpack_ids(self[0])


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as they travel: uint32, little-endian. Raises OverflowError for one that is none."""
    return array("I", ids).tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """The ids behind `pack_ids`; raises ValueError if the length is no multiple of TOKEN_BYTES."""
    return tuple(array("I", packed))


class FromSample(NamedTuple):
    """Input is the token that slice `row` of the earlier step `step` samples; it may not exist yet."""

    step: StepId
    row: int


SliceInput = Tokens | FromSample


class SeqSlice(NamedTuple):
    """`num_tokens` consecutive tokens of one sequence from position `pos`, and the blocks its table gains before."""

    seq: SeqId
    pos: int
    num_tokens: int
    input: SliceInput
    new_blocks: tuple[tuple[BlockId, ...], ...]  # by cache group
    want_logits: bool

    @property
    def end(self) -> int:
        """Position after the slice's last token: the context length once the step has run."""
        return self.pos + self.num_tokens


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block of a cache group before the step runs: a partly filled block is copied, never shared."""

    group: int
    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One micro-batch, the same for every stage. Rows of the batch are the slices' tokens, in order.

    `num_scored` has one entry per slice, or none if nothing is scored: the last stage answers the log-probabilities of
    the tokens that follow so many of the slice's rows, the last ones before the sampled row. What follows is in the
    sequence's history, so no logits travel.
    """

    epoch: Epoch
    step: StepId
    slices: tuple[SeqSlice, ...]
    block_copies: tuple[BlockCopy, ...] = ()
    num_scored: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.slices:
            raise InvalidPlan(f"step {self.step} has no slices")
        if len({piece[0] for piece in self.slices}) != len(self.slices):
            raise InvalidPlan(f"step {self.step} names a sequence twice")
        oldest = self.step - MAX_RUN_AHEAD
        for seq, pos, num_tokens, source, _, _ in self.slices:
            if pos < 0 or num_tokens < 1:
                raise InvalidPlan(f"sequence {seq}: {num_tokens} tokens at position {pos}")
            if isinstance(source, FromSample):
                if num_tokens != 1:
                    raise InvalidPlan(f"sequence {seq}: a sampled input is one token, not {num_tokens}")
                if not oldest <= source.step < self.step or source.row < 0:
                    raise InvalidPlan(f"step {self.step}: sequence {seq} refers to step {source.step}")
            elif len(source.packed) != num_tokens * TOKEN_BYTES:
                raise InvalidPlan(f"sequence {seq}: {len(source.packed) // TOKEN_BYTES} ids for {num_tokens} tokens")
        if self.num_scored:
            self._check_scored()

    def _check_scored(self) -> None:
        if len(self.num_scored) != len(self.slices):
            raise InvalidPlan(f"step {self.step}: {len(self.num_scored)} counts of scored rows, not one per slice")
        for piece, count in zip(self.slices, self.num_scored, strict=True):
            if not 0 <= count <= piece.num_tokens - piece.want_logits:
                raise InvalidPlan(f"sequence {piece.seq}: {count} scored rows in {piece.num_tokens} tokens")

    @property
    def num_rows(self) -> int:
        """Token rows of the micro-batch."""
        return sum(piece.num_tokens for piece in self.slices)

    @property
    def num_logit_rows(self) -> int:
        """Rows whose logits are wanted, to sample or to score."""
        return sum(piece.want_logits for piece in self.slices) + sum(self.num_scored)

    def sampled(self) -> Iterator[SeqSlice]:
        """The slices that sample, in order."""
        return (piece for piece in self.slices if piece.want_logits)

    def scored(self) -> Iterator[tuple[SeqId, range]]:
        """(sequence, positions of the tokens whose log-probability is wanted) of every slice that has any, in order."""
        for piece, count in zip(self.slices, self.num_scored, strict=False):
            if count:
                last = piece.end - piece.want_logits
                yield piece.seq, range(last - count + 1, last + 1)


class FinishReason(Enum):
    """Why the last stage ended a sequence."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class SampledToken(NamedTuple):
    """A token sampled for position `pos` of a sequence; logprobs are natural logs, of the unmodified distribution."""

    seq: SeqId
    pos: int
    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepDone:
    """The last stage's answer to a step: every stage has run it, and these tokens were sampled.

    `scores` are the natural log-probabilities that the plan's `num_scored` asked for, in its order; NaN where the
    logits were not finite.
    """

    epoch: Epoch
    step: StepId
    tokens: tuple[SampledToken, ...]
    needs_relay: bool = False
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AddSequence:
    """What the last stage must know of a sequence before its first step.

    Its tokens so far are the prompt (prefix-cached part included) and, after a re-plan or preemption, the
    `num_generated` made already. `history_ids` are the last of them, those that anything looks back at; `num_omitted`
    others come before. `max_tokens` counts all output. `grammar` is an llguidance grammar, empty for none.
    """

    seq: SeqId
    sampling: SamplingParams
    history_ids: tuple[int, ...]
    stop_ids: frozenset[int]
    max_tokens: int
    num_generated: int = 0
    choice: int = 0
    grammar: str = ""
    num_omitted: int = 0

    @property
    def num_prompt(self) -> int:
        """Tokens before the first that is generated."""
        return self.num_omitted + len(self.history_ids) - self.num_generated


@dataclass(frozen=True, slots=True)
class RemoveSequence:
    """Forget a sequence: every issued step that names it is done."""

    seq: SeqId


@dataclass(frozen=True, slots=True)
class SampleToken:
    """A sampled token relayed by the coordinator to stage 0, keyed like those of the direct edge."""

    epoch: Epoch
    seq: SeqId
    pos: int
    token: int


StepCommand = StepPlan | AddSequence | RemoveSequence | SampleToken
