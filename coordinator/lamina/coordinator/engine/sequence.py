"""A request as the scheduler sees it: what came in, what goes out, and the working state between. No IO, no clock.

`Sequence` is mutable and owned by the engine loop through its `Scheduler`; the others are values.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

from lamina.coordinator.engine.block_pool import Block
from lamina.coordinator.engine.prefix_cache import PrefixNode
from lamina.coordinator.engine.window_pool import WindowBlock
from lamina.spec.ids import BlockId, SeqId, StepId
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import BLOCK_TOKENS, AddSequence, FinishReason, Tokens, from_tuple

RequestId = NewType("RequestId", int)  # ascends with arrival; survives preemptions and restarts, unlike a SeqId
NO_SEQ = SeqId(-1)
NO_STEP = StepId(-1)


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to generate. n choices are n requests that differ in `choice`: with prefix caching on, the full
    blocks of their prompt are computed once and shared; with it off, each prefills on its own."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    choice: int = 0
    grammar: str = ""
    cache_salt: str = ""  # prefixes are shared among equal salts only: tenant, adapter (B-22)


class TokenEvent(NamedTuple):
    """A token of a request. With FinishReason.ERROR there is no token (it is 0) and `error` says why."""

    request_id: RequestId
    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    finish: FinishReason | None
    error: str


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What usage and metrics want to know of a request, updated in place until it ends; times are the `now`s given."""

    request_id: RequestId
    num_prompt_tokens: int
    max_tokens: int  # after reduction to the remaining capacity
    queued_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0  # prompt tokens that were not computed, the first token's prefill counts
    num_preemptions: int = 0


class Phase(Enum):
    """What the scheduler may do with a sequence."""

    WAITING = "waiting"  # in the queue, holds nothing
    PREFILL = "prefill"  # admitted, known tokens left to compute
    DECODE = "decode"
    CLOSING = "closing"  # every position it may have is planned
    PREEMPTED = "preempted"  # planned no more; waits again when its issued steps are done
    ENDED = "ended"  # gone for the user; holds its blocks until its issued steps are done


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids, place in the schedule and block table of one request.

    Positions below `pos` are planned. `num_ahead` samples are planned and not known, so in decode
    pos == len(tokens) - 1 + num_ahead.
    """

    request: SequenceRequest
    record: RequestRecord
    tokens: "array[int]"  # prompt and known output, uint32
    limit: int  # positions that may be planned in all: prompt + max_tokens - 1, for the last token is never cached
    phase: Phase = Phase.WAITING
    key: tuple[int, ...] = ()  # its place in the policy's order
    id: SeqId = NO_SEQ  # given with the first slice
    pos: int = 0
    num_ahead: int = 0
    last_step: StepId = NO_STEP  # the last issued step that names it
    last_row: int = 0
    blocks: list[Block] = field(default_factory=list)
    num_sent_blocks: int = 0  # of `blocks`, those that issued plans have named
    room: int = 0  # positions that `blocks` hold
    chain: list[PrefixNode] = field(default_factory=list)  # index entries of its first blocks, each in use by it
    num_proven: int = 0  # of `chain`, those known to hold finite values where this sequence reads them
    indexing: bool = False  # whether `chain` may grow
    promised: int = 0  # blocks set aside for it and not allocated yet
    windows: list[WindowBlock] = field(default_factory=list)  # of `blocks`, from `window_start` on, in windowed layers
    window_start: int = 0
    window_passed: int = 0  # where `window_start` will be when its issued steps are done
    window_quota: int = 0  # blocks that it can have at any time

    @property
    def num_generated(self) -> int:
        """Known output tokens."""
        return len(self.tokens) - self.record.num_prompt_tokens

    def add_blocks(self, blocks: list[Block]) -> None:
        """Lengthen the table."""
        self.blocks += blocks
        self.room += len(blocks) * BLOCK_TOKENS

    def known_input(self, start: int, stop: int) -> Tokens:
        """Its tokens at these positions, for a slice."""
        return from_tuple(Tokens)((self.tokens[start:stop].tobytes(),))

    def take_new_blocks(self) -> tuple[BlockId, ...]:
        """The blocks that no plan has named yet; the same ids in every cache group that keeps all positions."""
        new = self.blocks[self.num_sent_blocks :]
        self.num_sent_blocks = len(self.blocks)
        return tuple([block.id for block in new])

    def window_ids(self, first: int) -> tuple[BlockId, ...]:
        """Of its table from entry `first` on, the blocks in layers with a window; any id where none is held.

        No position still to be computed sees those entries; a table has no gaps.
        """
        num_passed = max(0, self.window_start - first)
        held = self.windows[max(0, first - self.window_start) :]
        return (BlockId(0),) * min(num_passed, len(self.blocks) - first) + tuple([block.id for block in held])

    def introduce(self, seq: SeqId) -> AddSequence:
        """Give it an identity; what the last stage must know of it."""
        self.id = seq
        request, num_tokens, num_generated = self.request, len(self.tokens), self.num_generated
        num_wanted = request.sampling.num_looked_back(num_tokens, num_generated)
        if request.grammar:
            num_wanted = max(num_wanted, num_generated)
        return AddSequence(
            seq=seq,
            sampling=request.sampling,
            history_ids=tuple(self.tokens[num_tokens - num_wanted :]),
            stop_ids=request.stop_ids,
            max_tokens=self.record.max_tokens,
            num_generated=num_generated,
            choice=request.choice,
            grammar=request.grammar,
            num_omitted=num_tokens - num_wanted,
        )

    def rewind(self) -> None:
        """Forget what was planned under the present identity, keep the tokens; the blocks are given back already."""
        self.id = NO_SEQ
        self.pos = self.num_ahead = self.last_row = self.num_sent_blocks = self.room = self.promised = 0
        self.num_proven = 0
        self.last_step = NO_STEP
        self.blocks = []
        self.chain = []
        self.windows = []
        self.window_start = self.window_passed = self.window_quota = 0
        self.indexing = False
        self.phase = Phase.WAITING
