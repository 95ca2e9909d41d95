"""A pipeline without numbers: stages that store token ids in their KV slots and check what every plan would read.

The model is f(all previous tokens), so a wrong input, block, position or order gives another output. Contract checks
are the workers' own (StepQueue, SequenceTables). Stages, the feedback edge and the answers advance one by one, in any
order.
"""

import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from lamina.coordinator.engine.batch import Issue
from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.rpc_worker.kv_pool import SequenceTables
from lamina.rpc_worker.step_queue import StepQueue
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.placement import StageSettings
from lamina.spec.step import (
    BLOCK_TOKENS,
    MAX_RUN_AHEAD,
    AddSequence,
    FinishReason,
    FromSample,
    RemoveSequence,
    SampledToken,
    StepDone,
    StepPlan,
)

VOCAB = 200  # a token is a byte


def next_token(tokens: list[int]) -> int:
    """The model: a token in [1, VOCAB); 0 is what workers feed for a sequence that has ended."""
    return 1 + zlib.crc32(bytes(tokens)) % (VOCAB - 1)


def generate(prompt: tuple[int, ...], max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """The sequential reference: what a request's output has to be."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class _LastStageSequence:
    """What the sampler knows."""

    add: AddSequence
    history: tuple[int, ...]  # tokens when it was added
    tokens: list[int]
    num_generated: int
    ended: bool = False


@dataclass
class _Stage:
    tables: SequenceTables
    slots: list[dict[int, tuple[int, int]]]  # by group: slot -> (token, position)
    inbox: deque[tuple[StepPlan, list[int]]] = field(default_factory=deque)


class SimPipeline:
    """Issues in, answers out; raises AssertionError for a plan that would compute something wrong."""

    def __init__(self, config: SchedulerConfig, epoch: Epoch) -> None:
        self.config = config
        self.epoch = epoch
        settings = StageSettings(
            max_rows=config.max_rows,
            max_seqs=config.max_seqs,
            max_logit_rows=config.max_logit_rows,
            max_context=config.max_context,
        )
        self._queue = StepQueue(epoch, settings, takes_tokens=True, hidden=1, vocab_size=VOCAB)
        groups = range(len(config.num_blocks))
        self.stages = [
            _Stage(SequenceTables(config.num_blocks, settings), [{} for _ in groups]) for _ in range(config.num_stages)
        ]
        self.feedback: deque[StepDone] = deque()
        self.answers: deque[StepDone] = deque()
        self.plans: list[StepPlan] = []
        self.num_answered = 0
        self.nonfinite: set[SeqId] = set()  # sequences whose logits are not finite from now on
        self._sampler: dict[SeqId, _LastStageSequence] = {}
        self._truth: dict[SeqId, list[int]] = {}  # tokens by position, as far as they are sampled
        self._windows = config.windows or (None,) * len(config.num_blocks)
        self._issued_tables: dict[SeqId, list[list[int]]] = {}  # by group: blocks in the order given
        self._answered: dict[SeqId, int] = {}  # positions of steps that the coordinator knows to be done
        self._positions: dict[SeqId, int] = {}
        self._last_step: dict[SeqId, StepId] = {}

    # -- the coordinator's side

    def issue(self, issue: Issue, histories: Mapping[SeqId, tuple[int, ...]]) -> None:
        """Take what `schedule` returned, with every rule of the contract checked.

        `histories` are the tokens so far of the sequences that it adds.
        """
        plan = issue.plan
        assert plan.epoch == self.epoch
        assert plan.step == len(self.plans), "steps ascend from 0"
        assert plan.step - self.num_answered < self.config.max_outstanding <= MAX_RUN_AHEAD
        assert plan.num_rows <= self.config.max_rows
        assert len(plan.slices) <= self.config.max_seqs
        assert plan.num_logit_rows <= self.config.max_logit_rows
        for add in issue.adds:
            assert add.seq not in self._truth, "a SeqId is never reused"
            assert add.num_generated < add.max_tokens
            history = histories[add.seq]
            assert add.history_ids == history[add.num_omitted :]
            assert add.num_omitted <= len(history)
            self._sampler[add.seq] = _LastStageSequence(add, history, list(history), add.num_generated)
            self._truth[add.seq] = list(history)
            self._issued_tables[add.seq] = [[] for _ in self._windows]
            assert add.seq in {piece.seq for piece in plan.slices}
        for piece in plan.slices:
            tables = self._issued_tables[piece.seq]
            for table, blocks in zip(tables, piece.new_blocks, strict=True):
                table.extend(blocks)
            assert len({len(table) for table in tables}) == 1, "tables are equally long"
            self._answered.setdefault(piece.seq, piece.pos)
            self._check_writes(plan, piece.seq, piece.pos, piece.end)
            if isinstance(piece.input, FromSample):
                source = self.plans[piece.input.step].slices[piece.input.row]
                assert (source.seq, source.end, source.want_logits) == (piece.seq, piece.pos, True)
                assert piece.input.step >= self.num_answered, "a token that is known travels with the plan"
            else:
                history = self._sampler[piece.seq].history
                known = history[piece.pos : piece.end]
                assert piece.want_logits == (piece.end >= len(history))
                assert not known or piece.input.ids == known
            self._positions[piece.seq] = piece.end
            self._last_step[piece.seq] = plan.step
        self.plans.append(plan)
        self._queue.add_plan(plan)

    def _check_writes(self, plan: StepPlan, seq: SeqId, pos: int, end: int) -> None:
        """Blocks that this slice writes are in no other table so far: one writer, never a reader (B-21).

        In a group with a window those do not count that only steps saw which the coordinator knows to be done.
        """
        expected = self._positions.get(seq)
        assert pos == expected if expected is not None else pos % BLOCK_TOKENS == 0
        first, stop = pos // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)
        for group, window in enumerate(self._windows):
            table = self._issued_tables[seq][group]
            written = set(table[first:stop])
            assert len(written) == stop - first, "a block is missing"
            assert written.isdisjoint(table[self._first_read(seq, window) : first])
            for other, tables in self._issued_tables.items():
                read = tables[group][self._first_read(other, window) :]
                assert other == seq or written.isdisjoint(read), f"step {plan.step}: {seq} writes into {other}'s blocks"

    def _first_read(self, seq: SeqId, window: int | None) -> int:
        """The first block that a step reads which the coordinator does not know to be done."""
        return 0 if window is None else max(0, self._answered.get(seq, 0) - window + 1) // BLOCK_TOKENS

    def remove(self, remove: RemoveSequence) -> None:
        """Forget a sequence: every step that names it must have been answered."""
        assert self._last_step[remove.seq] < self.num_answered
        for stage in self.stages:
            stage.tables.remove(remove.seq)
        del self._sampler[remove.seq], self._issued_tables[remove.seq], self._answered[remove.seq]

    @property
    def num_sequences(self) -> int:
        """Sequences that the stages remember."""
        return len(self._sampler)

    def pop_answer(self) -> StepDone:
        """The next answer to the coordinator."""
        for piece in self.plans[self.num_answered].slices:
            self._answered[piece.seq] = piece.end
        self.num_answered += 1
        return self.answers.popleft()

    # -- the stages' side

    def deliver_feedback(self) -> None:
        """The oldest answer reaches stage 0."""
        self._queue.add_done(self.feedback.popleft())

    def run_stage(self, index: int) -> bool:
        """Run the stage's next step if its input is there."""
        stage = self.stages[index]
        if index == 0:
            ready = self._queue.pop_ready()
            if ready is None or ready.tokens is None:
                return False
            plan, tokens = ready.plan, ready.tokens.tolist()
        elif stage.inbox:
            plan, tokens = stage.inbox.popleft()
        else:
            return False
        histories = self._run(stage, plan, tokens)
        if index + 1 < len(self.stages):
            self.stages[index + 1].inbox.append((plan, tokens))
        else:
            done = StepDone(plan.epoch, plan.step, self._sample(plan, histories))
            self.feedback.append(done)
            self.answers.append(done)
        return True

    def _run(self, stage: _Stage, plan: StepPlan, tokens: list[int]) -> list[list[int]]:
        """Write all rows, then read every context; as each layer does."""
        stage.tables.apply(plan)
        start = 0
        for piece in plan.slices:
            for offset in range(piece.num_tokens):
                pos = piece.pos + offset
                for group, slots in enumerate(stage.slots):
                    slots[self._slot(stage, piece.seq, group, pos)] = tokens[start + offset], pos
            start += piece.num_tokens
        histories = []
        for piece in plan.slices:
            truth = self._truth[piece.seq][: piece.end]
            for group, (slots, window) in enumerate(zip(stage.slots, self._windows, strict=True)):
                seen = range(0 if window is None else max(0, piece.pos - window + 1), piece.end)
                read = [slots.get(self._slot(stage, piece.seq, group, pos)) for pos in seen]
                wanted = [(truth[pos], pos) for pos in seen]
                assert read == wanted, f"step {plan.step}, sequence {piece.seq}, group {group}: {read} is not {wanted}"
            histories.append(truth)
        return histories

    @staticmethod
    def _slot(stage: _Stage, seq: SeqId, group: int, pos: int) -> int:
        return int(stage.tables.blocks_of(seq, group)[pos // BLOCK_TOKENS]) * BLOCK_TOKENS + pos % BLOCK_TOKENS

    def _sample(self, plan: StepPlan, histories: list[list[int]]) -> tuple[SampledToken, ...]:
        sampled = []
        for piece, history in zip(plan.slices, histories, strict=True):
            if piece.want_logits:
                token = self._sample_one(piece.seq, history)
                self._truth[piece.seq].append(token.token)
                sampled.append(token)
        return tuple(sampled)

    def _sample_one(self, seq: SeqId, history: list[int]) -> SampledToken:
        state, pos = self._sampler[seq], len(history)
        if state.ended:
            return SampledToken(seq, pos, 0)
        assert state.tokens == history, "the sampler's history is the context"
        if seq in self.nonfinite:
            state.ended = True
            return SampledToken(seq, pos, 0, finish=FinishReason.ERROR, error="NumericalError: not finite")
        token = next_token(history)
        state.tokens.append(token)
        state.num_generated += 1
        finish = None
        if token in state.add.stop_ids:
            finish = FinishReason.STOP
        elif state.num_generated >= state.add.max_tokens:
            finish = FinishReason.LENGTH
        state.ended = finish is not None
        return SampledToken(seq, pos, token, finish=finish)
