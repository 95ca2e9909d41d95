"""A scheduler and a simulated pipeline, driven together: what the engine loop does, in any order a test wants."""

from collections import Counter
from dataclasses import replace

from lamina.coordinator.engine.batch import Issue
from lamina.coordinator.engine.block_pool import Block, BlockState
from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.coordinator.engine.sequence import RequestId, RequestRecord, Sequence, SequenceRequest, TokenEvent
from lamina.spec.ids import Epoch, SeqId
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import FinishReason
from support.sim_pipeline import SimPipeline, generate

BASE = SchedulerConfig(
    num_stages=1, max_rows=64, max_seqs=8, max_logit_rows=8, max_context=256, num_blocks=(64,), prefill_chunk_tokens=64
)


def config(**changes: object) -> SchedulerConfig:
    """BASE with changes."""
    return replace(BASE, **changes)  # type: ignore[arg-type]


def request(
    prompt: tuple[int, ...] | range, max_tokens: int = 8, *, salt: str = "", stop_ids: tuple[int, ...] = ()
) -> SequenceRequest:
    """A greedy request."""
    return SequenceRequest(tuple(prompt), SamplingParams(), frozenset(stop_ids), max_tokens, cache_salt=salt)


class SimEngine:
    """Requests in, outputs collected. `now` counts absorbed steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.pipeline = SimPipeline(config, Epoch(0))
        self.requests: dict[RequestId, SequenceRequest] = {}
        self.records: dict[RequestId, RequestRecord] = {}
        self.outputs: dict[RequestId, list[int]] = {}
        self.ends: dict[RequestId, TokenEvent] = {}
        self.cancelled: set[RequestId] = set()
        self.issues: list[Issue] = []
        self.now = 0.0

    def add(self, wanted: SequenceRequest) -> RequestId:
        """Queue a request."""
        request_id = self.scheduler.add(wanted, self.now)
        self.requests[request_id] = wanted
        self.records[request_id] = self.scheduler.record(request_id)
        self.outputs[request_id] = []
        return request_id

    def cancel(self, request_id: RequestId) -> None:
        """Nobody wants it any more."""
        self.scheduler.cancel(request_id)
        if request_id not in self.ends:
            self.cancelled.add(request_id)

    def issue(self) -> Issue | None:
        """One step, if one may be issued."""
        issue = self.scheduler.schedule(self.now)
        for removal in self.scheduler.take_removals():
            self.pipeline.remove(removal)
        if issue is not None:
            self.issues.append(issue)
            self.pipeline.issue(issue, {add.seq: self._history_of(add.seq) for add in issue.adds})
        return issue

    def _history_of(self, seq: SeqId) -> tuple[int, ...]:
        """The tokens so far of a sequence that was issued just now."""
        request_id = self.scheduler._by_seq[seq].record.request_id
        return (*self.requests[request_id].prompt_ids, *self.outputs[request_id])

    def issue_all(self) -> list[Issue]:
        """Every step that may be issued now."""
        issued = []
        while (issue := self.issue()) is not None:
            issued.append(issue)
        return issued

    def run_stages(self) -> bool:
        """Let every stage and the feedback edge go as far as they can; whether anything moved."""
        moved, progress = False, True
        while progress:
            progress = False
            while self.pipeline.feedback:
                self.pipeline.deliver_feedback()
            for index in range(len(self.pipeline.stages)):
                progress |= self.pipeline.run_stage(index)
            moved |= progress
        return moved

    def absorb(self) -> tuple[TokenEvent, ...]:
        """The next answer reaches the scheduler."""
        self.now += 1
        events = self.scheduler.absorb(self.pipeline.pop_answer(), self.now)
        for event in events:
            self._take(event)
        return events

    def step(self) -> tuple[TokenEvent, ...]:
        """Issue all that may be issued, run it, absorb one answer."""
        self.issue_all()
        self.run_stages()
        return self.absorb()

    def restart(self, changed: SchedulerConfig | None = None) -> None:
        """The epoch is lost with everything on the stages."""
        self.pipeline = SimPipeline(changed or self.scheduler.config, Epoch(self.pipeline.epoch + 1))
        for event in self.scheduler.restart(self.pipeline.epoch, changed):
            self._take(event)

    def drain(self, max_steps: int = 100_000) -> None:
        """Run until every request has ended; fails if nothing can move, or within `max_steps` nothing ends."""
        for _ in range(max_steps):
            self.issue_all()
            self.run_stages()
            if not self.pipeline.answers:
                break
            self.absorb()
        assert not self.pipeline.answers, f"not done after {max_steps} steps"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0, "stuck"

    def _take(self, event: TokenEvent) -> None:
        assert event.request_id not in self.cancelled, "a cancelled request has no events"
        assert event.request_id not in self.ends, "nothing comes after the end"
        if event.finish is not FinishReason.ERROR:
            self.outputs[event.request_id].append(event.token)
        if event.finish is not None:
            self.ends[event.request_id] = event

    # -- checks

    def check_outputs(self) -> None:
        """Finished requests have the output of the sequential reference, cancelled ones a beginning of it."""
        for request_id, wanted in self.requests.items():
            expected = generate(wanted.prompt_ids, self.records[request_id].max_tokens, wanted.stop_ids)
            output = self.outputs[request_id]
            if request_id in self.cancelled or self.ends[request_id].finish is FinishReason.ERROR:
                assert output == expected[: len(output)]
                continue
            assert output == expected
            stopped = output[-1] in wanted.stop_ids
            assert self.ends[request_id].finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)

    def check_blocks(self) -> None:
        """Conservation: every id is free, cached or held, once; users and promises add up; one writer per block."""
        ledger = self.scheduler._ledger
        pool, cache = ledger._pool, ledger._cache
        users = Counter(block for seq in self._holders() for block in self._held(seq))
        unused = [node.block for node in cache._unused]
        assert all(block.num_users == count for block, count in users.items())
        assert all(block.state is BlockState.WRITTEN_NOT_IN_USE and not block.num_users for block in unused)
        assert all(users[block] == 1 for block in users if block.state is BlockState.PENDING_WRITE)
        ids = [*(block.id for block in (*users, *unused)), *pool._free]
        assert sorted(ids) == list(range(self.scheduler.config.num_kept_blocks))
        assert ledger._num_promised == sum(seq.promised for seq in self._holders())
        assert ledger.slack >= 0
        self._check_window_blocks()

    def _check_window_blocks(self) -> None:
        """The same in the groups with a window, with the invariant that lets every sequence go on."""
        windows = self.scheduler._ledger._windows
        if windows is None:
            return
        users = Counter(block for seq in self._holders() for block in seq.windows)
        unused = list(windows.pool._unused)
        assert not any(block.is_gone for block in (*users, *unused))
        assert all(block.num_users == count for block, count in users.items())
        assert all(block.is_indexed and not block.num_users for block in unused)
        assert all(block.is_indexed for block, count in users.items() if count > 1)
        ids = [*(block.id for block in (*users, *unused)), *windows.pool._free]
        assert sorted(ids) == list(range(windows.pool.num_blocks))
        claims = [max(seq.window_quota, len(seq.windows)) for seq in self._holders()]
        assert windows._num_spoken_for == sum(claims) <= windows.pool.num_blocks
        assert all(seq.window_start + len(seq.windows) == len(seq.blocks) for seq in self._holders())

    def check_idle(self) -> None:
        """Nothing is left of any request, but what is cached."""
        scheduler = self.scheduler
        assert self.issue() is None
        assert not self.pipeline.num_sequences
        assert not scheduler._requests
        assert not scheduler._by_seq
        assert not scheduler._draining
        assert scheduler.kv_usage_ratio == 0
        assert scheduler._ledger.slack == scheduler.config.num_kept_blocks
        assert not scheduler._ledger.is_waiting

    def _holders(self) -> list[Sequence]:
        draining = [seq for drained in self.scheduler._draining.values() for seq in drained]
        return list({*self.scheduler._requests.values(), *draining})

    @staticmethod
    def _held(seq: Sequence) -> list[Block]:
        twins = [node.block for node, block in zip(seq.chain, seq.blocks, strict=False) if node.block is not block]
        return [*seq.blocks, *twins]
