"""Which tokens go into which step: continuous batching, chunked prefill, run-ahead, preemption by recompute.

A pure state machine: the engine loop owns it, calls `schedule` until it returns None, sends what it returned, and
feeds every StepDone to `absorb`. No IO, no clock, no randomness: the same calls give the same plans.

Decodes come first. With N stages the decoding sequences take turns in N micro-batches, least recently issued first; one
whose input is still to be sampled by one of the last N - 1 steps is not ready, for at stage 0 its step would wait while
others could run. Only a step that has nothing else to do takes such sequences: with a single stream that is its one
step of run-ahead. What is left of the budget goes to prefill chunks in the policy's order, with several stages only as
much as lets the steps fill the pipeline (`policy.prefill_rows`).

Blocks come back, and a preempted sequence waits again, only when every issued step that names them is done.
"""

from array import array

from lamina.coordinator.engine.batch import Batch, Issue, RunningSet
from lamina.coordinator.engine.kv_ledger import KvLedger, PrefixPlace
from lamina.coordinator.engine.policy import PrefillPace, SchedulerConfig, WaitingQueue
from lamina.coordinator.engine.sequence import (
    NO_SEQ,
    Phase,
    RequestId,
    RequestRecord,
    Sequence,
    SequenceRequest,
    TokenEvent,
)
from lamina.spec.errors import CapacityExceeded, InvalidPlan, InvalidRequest
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.step import (
    BLOCK_TOKENS,
    FinishReason,
    FromSample,
    RemoveSequence,
    SeqSlice,
    StepDone,
    StepPlan,
    from_tuple,
)

FIRST_EPOCH = Epoch(0)
_ERROR = FinishReason.ERROR


class Scheduler:
    """Sequences in, plans out; answers in, tokens out."""

    def __init__(self, config: SchedulerConfig, epoch: Epoch = FIRST_EPOCH) -> None:
        self._next_request = RequestId(0)
        self._next_seq = SeqId(0)
        self._requests: dict[RequestId, Sequence] = {}  # those that have not ended
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens looked up, at every admission
        self.num_prefix_hits = 0  # of those, tokens found
        self._begin_epoch(config, epoch)

    def _begin_epoch(self, config: SchedulerConfig, epoch: Epoch) -> None:
        self.config = config
        self._epoch = epoch
        self._next_step = StepId(0)
        self._done_step = StepId(-1)
        self._ledger = KvLedger(config)
        self._no_blocks: tuple[tuple[BlockId, ...], ...] = ((),) * len(config.num_blocks)
        self._waiting = WaitingQueue(config.policy)
        self._pace = PrefillPace(config)
        self._running = RunningSet()
        self._by_seq: dict[SeqId, Sequence] = {}  # whose tokens are wanted
        self._draining: dict[StepId, list[Sequence]] = {}  # ended or preempted, by the last step that names them
        self._removals: list[RemoveSequence] = []
        self._refused: tuple[RequestId, int, int] | None = None  # (who, slack it needs, returns seen)

    # -- requests

    @property
    def capacity_tokens(self) -> int:
        """Positions that one sequence can have at most."""
        return min(self.config.max_context, self._ledger.capacity_tokens)

    def add(self, request: SequenceRequest, now: float) -> RequestId:
        """Queue a request; max_tokens is reduced to what fits (A-43), see `record`.

        Raises InvalidRequest if the prompt is empty or too long or no token is wanted, CapacityExceeded if too many
        requests wait already.
        """
        num_prompt = len(request.prompt_ids)
        if not num_prompt:
            raise InvalidRequest("the prompt is empty; send at least one token")
        if num_prompt > self.capacity_tokens:
            raise InvalidRequest(f"the prompt has {num_prompt} tokens, at most {self.capacity_tokens} fit; shorten it")
        if request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {request.max_tokens}")
        if len(self._waiting) >= self.config.max_waiting:
            raise CapacityExceeded(f"{len(self._waiting)} requests wait, the limit is {self.config.max_waiting}")
        limit = min(num_prompt + request.max_tokens - 1, self.capacity_tokens)
        record = RequestRecord(self._next_request, num_prompt, limit - num_prompt + 1, now)
        self._next_request = RequestId(record.request_id + 1)
        seq = Sequence(request, record, array("I", request.prompt_ids), limit)
        self._requests[record.request_id] = seq
        self._waiting.add(seq)
        return record.request_id

    def cancel(self, request_id: RequestId) -> None:
        """End a request without an event; one that is unknown or has ended is fine."""
        seq = self._requests.get(request_id)
        if seq is not None:
            self._end(seq)

    def record(self, request_id: RequestId) -> RequestRecord:
        """The live record of a request that has not ended; raises KeyError otherwise. Keep it: it stays valid."""
        return self._requests[request_id].record

    # -- steps

    def schedule(self, now: float) -> Issue | None:
        """The next step, or None if nothing may be issued before the next `absorb` or `add`."""
        step, config = self._next_step, self.config
        if step - self._done_step > config.max_outstanding:
            return None
        batch, running = Batch(step, config), self._running
        self._plan_decodes(batch, *running.next_decodes(step, config.num_lanes))
        self._plan_prefills(batch, now)
        if not batch.slices:  # stage 0 has nothing better to do than to wait for a sample
            lanes = min(config.num_lanes, len(running.decoding))
            self._plan_decodes(batch, *running.next_decodes(step, lanes, may_stall=True))
            if not batch.slices and not self.num_outstanding and self._waiting.first is not None:
                self._plan_prefills(batch, now)  # whoever was preempted just now: no answer will wake it
        if not batch.slices:
            return None
        self._next_step = StepId(step + 1)
        return Issue(StepPlan(self._epoch, step, tuple(batch.slices)), tuple(batch.adds))

    def absorb(self, done: StepDone, now: float) -> tuple[TokenEvent, ...]:
        """Take an answer. Those of another epoch and tokens of sequences that have ended are discarded.

        Raises InvalidPlan if it is not the answer to the oldest outstanding step, or a token is out of place.
        """
        if done.epoch != self._epoch:
            return ()
        step = done.step
        if step != self._done_step + 1 or step >= self._next_step:
            raise InvalidPlan(f"answer to step {step}, expected that of step {self._done_step + 1}")
        self._done_step = step
        events = []
        by_seq, new_event = self._by_seq, from_tuple(TokenEvent)
        for seq_id, at, token, logprob, top, finish, error in done.tokens:
            seq = by_seq.get(seq_id)
            if seq is None:
                continue
            tokens, record = seq.tokens, seq.record
            pos = len(tokens)
            if at != pos:
                raise InvalidPlan(f"step {step}: token of sequence {seq_id} for position {at}, expected {pos}")
            seq.num_ahead -= 1
            if finish is not _ERROR:
                tokens.append(token)
                if record.first_token_s is None:
                    record.first_token_s = now
                if pos == seq.limit:
                    finish = finish or FinishReason.LENGTH
                if not pos % BLOCK_TOKENS:
                    self._ledger.publish(seq, pos)
                if seq.num_proven < len(seq.chain):
                    self._ledger.prove(seq)
            else:
                self._ledger.distrust(seq)
            events.append(new_event((record.request_id, token, logprob, top, finish, error)))
            if finish is not None:
                record.finished_s = now
                self._end(seq)
        self._ledger.end_step(step)
        for seq in self._draining.pop(step, ()):
            self._release(seq)
        return tuple(events)

    def take_removals(self) -> tuple[RemoveSequence, ...]:
        """Sequences that every stage may forget by now; each is returned once."""
        removals = tuple(self._removals)
        self._removals.clear()
        return removals

    def restart(self, epoch: Epoch, config: SchedulerConfig | None = None) -> tuple[TokenEvent, ...]:
        """The epoch was lost: nothing is in flight, cached or known to a stage; all unfinished requests wait again.

        With `config`, the new placement's limits hold. Returns the ends of requests that no longer fit.
        """
        self._begin_epoch(config or self.config, epoch)
        ends = []
        for seq in list(self._requests.values()):
            seq.rewind()
            if len(seq.tokens) > self.capacity_tokens:
                cause = f"{len(seq.tokens)} tokens so far, after the re-plan at most {self.capacity_tokens} fit"
                request_id = seq.record.request_id
                del self._requests[request_id]
                ends.append(TokenEvent(request_id, 0, None, (), FinishReason.ERROR, f"CapacityExceeded: {cause}"))
                continue
            seq.limit = min(seq.limit, self.capacity_tokens)
            seq.record.max_tokens = seq.limit - seq.record.num_prompt_tokens + 1
            self._waiting.add(seq)
        return tuple(ends)

    # -- metrics

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, preempted ones included."""
        return len(self._requests) - len(self._running)

    @property
    def num_outstanding(self) -> int:
        """Steps issued and not done."""
        return self._next_step - self._done_step - 1

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the KV blocks that sequences hold; blocks that are only cached count as free."""
        return self._ledger.usage_ratio

    @property
    def ledger(self) -> KvLedger:
        """Who has which blocks, to be read only."""
        return self._ledger

    # -- planning

    def _plan_decodes(self, batch: Batch, candidates: list[Sequence], share: int) -> None:
        """Add at most `share` slices of one token each, of the first candidates that may go on."""
        room = min(share, batch.rows_left, batch.seqs_left, batch.logits_left)
        step, slices, no_blocks, decode = batch.step, batch.slices, self._no_blocks, Phase.DECODE
        new_slice, new_sample = from_tuple(SeqSlice), from_tuple(FromSample)
        row, running, most_ahead = 0, self._running, self.config.run_ahead
        move_to_end = running.decoding.move_to_end  # the order of last_step
        for seq in candidates:
            if row == room:
                break
            ahead, pos = seq.num_ahead, seq.pos
            if ahead == most_ahead or seq.phase is not decode:  # another phase: preempted for a block, just now
                continue
            blocks = no_blocks
            if pos == seq.room:
                if not self._find_block(seq):
                    continue
                blocks = self._ledger.take_new_blocks(seq)
            source = new_sample((seq.last_step, seq.last_row)) if ahead else seq.known_input(pos, pos + 1)
            slices.append(new_slice((seq.id, pos, 1, source, blocks, True)))
            seq.last_step, seq.last_row = step, row
            seq.num_ahead = ahead + 1
            seq.pos = pos = pos + 1
            row += 1
            if pos == seq.limit:
                running.end_decode(seq)
            else:
                move_to_end(seq)
        batch.count_decodes(row)

    def _find_block(self, seq: Sequence) -> bool:
        """Room for one more position, if need be at the expense of the newest sequence (A-41)."""
        ledger = self._ledger
        ledger.pass_by(seq, self._done_step)
        while not ledger.grow(seq, seq.pos + 1):
            if self._draining or self._running.closing or ledger.is_waiting:
                return False  # blocks come back without a preemption
            victim = self._running.newest()
            if victim is None:
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _plan_prefills(self, batch: Batch, now: float) -> None:
        """Chunks in the policy's order, of admitted and, while they fit, of waiting sequences."""
        coming: set[PrefixPlace] = set()  # blocks that sequences further ahead will compute next
        index, admitting = 0, True
        prefilling = self._running.prefilling
        num_pending = self._running.num_pending + self._waiting.num_tokens
        batch.begin_prefill(self._pace.next_rows(num_pending, batch.rows_left))
        while batch.has_room:
            first = self._waiting.first if admitting else None
            if first is not None and (index == len(prefilling) or first.key < prefilling[index].key):
                admitting = self._admit(first, index)
                continue
            if index == len(prefilling):
                return
            seq = prefilling[index]
            self._plan_chunk(seq, batch, coming, now)
            if seq.pos < len(seq.tokens):
                index += 1
                continue
            self._running.end_prefill(seq)
            self._ledger.end_prefill(seq)
            if seq.pos == seq.limit:
                self._running.end_decode(seq)

    def _admit(self, seq: Sequence, index: int) -> bool:
        """Move the first waiting sequence to place `index` of the prefilling ones, if it fits.

        The margin of optimistic admission is a block for each running sequence: the next that each may need.
        """
        if len(self._running) >= self.config.max_running:
            return False
        ledger, who = self._ledger, seq.record.request_id
        num_positions, margin = len(seq.tokens), len(self._running)
        if self.config.admission == "reserve":
            num_positions, margin = seq.limit, 0
        if not ledger.fits_windows(seq, num_positions):
            return False
        if self._refused is not None:
            refused, needed, num_returns = self._refused
            if refused == who and needed > ledger.slack and num_returns == ledger.num_returns:
                return False  # nothing came back since; matching a long prompt again is not free
        needed = ledger.cost(seq, num_positions) + margin
        if needed > ledger.slack:
            self._refused = (who, needed, ledger.num_returns)
            return False
        self._waiting.remove(seq)
        ledger.admit(seq, num_positions)
        self._running.start_prefill(seq, index)
        return True

    def _plan_chunk(self, seq: Sequence, batch: Batch, coming: set[PrefixPlace], now: float) -> None:
        """Add a chunk, unless a sequence further ahead is about to compute the very block it would begin with."""
        ledger = self._ledger
        is_new = seq.id == NO_SEQ
        if is_new:
            ledger.adopt(seq)
            if ledger.awaited_block(seq) in coming:
                return
        pos, end = seq.pos, batch.chunk_end(seq)
        ledger.pass_by(seq, self._done_step)
        if end > pos and ledger.grow(seq, end):
            if is_new:
                self._introduce(seq, batch, now)
            is_last = end == len(seq.tokens)
            blocks = ledger.take_new_blocks(seq)
            seq.last_step, seq.last_row = batch.step, len(batch.slices)
            batch.add_chunk(SeqSlice(seq.id, pos, end - pos, seq.known_input(pos, end), blocks, is_last))
            seq.num_ahead = int(is_last)
            seq.pos = end
            ledger.publish(seq, end)  # later steps, and this one, run after the write on every stage
        if (place := ledger.coming_block(seq)) is not None:
            coming.add(place)

    def _introduce(self, seq: Sequence, batch: Batch, now: float) -> None:
        """The sequence's first slice is in this step."""
        batch.adds.append(seq.introduce(self._next_seq))
        self._by_seq[seq.id] = seq
        self._next_seq = SeqId(self._next_seq + 1)
        self.num_prefix_queries += len(seq.tokens)
        self.num_prefix_hits += seq.pos
        if seq.record.scheduled_s is None:
            seq.record.scheduled_s = now
        if not seq.num_generated:
            seq.record.num_cached_tokens = seq.pos

    # -- ends

    def _preempt(self, seq: Sequence) -> None:
        """Plan it no more; its tokens so far will be its prompt."""
        self._running.remove(seq)
        seq.phase = Phase.PREEMPTED
        seq.record.num_preemptions += 1
        self.num_preemptions += 1
        self._drain(seq)

    def _end(self, seq: Sequence) -> None:
        """The request is over; what is issued of it still runs."""
        del self._requests[seq.record.request_id]
        self._by_seq.pop(seq.id, None)
        if seq.phase is Phase.WAITING:
            self._waiting.remove(seq)
        elif seq.phase is Phase.PREEMPTED:
            seq.phase = Phase.ENDED  # it drains already
        else:
            self._running.remove(seq)
            seq.phase = Phase.ENDED
            self._drain(seq)

    def _drain(self, seq: Sequence) -> None:
        if seq.last_step > self._done_step:
            self._draining.setdefault(seq.last_step, []).append(seq)
        else:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Every issued step that names it is done."""
        self._ledger.close(seq)
        if seq.id != NO_SEQ:
            self._by_seq.pop(seq.id, None)
            self._removals.append(RemoveSequence(seq.id))
        if seq.phase is Phase.PREEMPTED:
            seq.rewind()
            self._waiting.add(seq)
