"""Drives the scheduler over a pipeline: requests in, token streams out. The only part of the engine that does IO.

A pipeline may be lost and another come in its place: an engine that `keeps_requests` is suspended meanwhile, its
streams stay open, and `resume` has their sequences computed again from their token ids.

Owned by the coordinator's event loop, which alone touches the scheduler. It wakes up for two things: a request (or its
cancellation), and a step's answer.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.coordinator.engine.sequence import RequestId, RequestRecord, SequenceRequest, TokenEvent
from lamina.coordinator.mailbox import Mailbox
from lamina.spec.errors import CapacityExceeded, LaminaError, StaleEpoch, Unavailable, WorkerLost, WorkerUnreachable
from lamina.spec.grammars import KEPT_CHARACTERS
from lamina.spec.ids import Epoch, PlacementId

Clock = Callable[[], float]
# What waiting may cure: a worker that is gone or not up yet, or is busy with another coordinator that is going.
CURABLE = (WorkerUnreachable, WorkerLost, Unavailable, StaleEpoch)
_MAX_OPEN_CHARACTERS = KEPT_CHARACTERS // 2  # of open requests' grammars: the last stage keeps them until they are used
_MAX_LOSSES = 3  # that a request lives through: it might be what brings the workers down


class Engine:
    """One placement's inner loop. `start` it, `submit` requests, `close` it."""

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        clock: Clock = time.monotonic,
        *,
        keeps_requests: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.is_suspended = False  # the pipeline was lost, and open requests wait for another
        self._pipeline = pipeline
        self._clock = clock
        self._keeps_requests = keeps_requests
        self._last_epoch = pipeline.placement.epoch
        self._streams: dict[RequestId, TokenStream] = {}
        self._grammars: Counter[str] = Counter()  # of these
        self._failure: LaminaError | None = None
        self._ended: asyncio.Future[LaminaError] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to absorb answers."""
        self._task = asyncio.create_task(self._absorb_forever())

    def claim_placement(self) -> tuple[PlacementId, Epoch]:
        """For the next attempt to bring the model up: the same placement in an epoch that none before has claimed.

        A worker that an attempt lost while it loaded may hold that epoch, and takes only a later one.
        """
        self._last_epoch = Epoch(self._last_epoch + 1)
        return self._pipeline.placement.id, self._last_epoch

    @property
    def failure(self) -> LaminaError | None:
        """What ended the pipeline, None while it runs."""
        return self._failure

    async def wait_for_failure(self) -> LaminaError:
        """What ended the pipeline, once it has ended."""
        return await asyncio.shield(self._ended)

    async def prepare_grammar(self, grammar: str) -> None:
        """Before a request with a grammar is submitted: have it compiled, so that no step waits for it.

        Raises InvalidRequest if it cannot be used, Unavailable if it takes too long, CapacityExceeded while open
        requests have too many, and what ended the pipeline.
        """
        if self._failure is not None:
            raise self._failure
        self._check_room_for(grammar)
        await self._pipeline.prepare_grammar(grammar)

    def submit(self, request: SequenceRequest) -> "TokenStream":
        """Queue a request. Iterate the stream to its end, or close it.

        Raises InvalidRequest or CapacityExceeded when it cannot be taken, and what ended the pipeline.
        """
        if self._failure is not None:
            raise self._failure
        self._check_room_for(request.grammar)
        id_ = self.scheduler.add(request, self._clock())
        stream = TokenStream(self.scheduler.record(id_), self._end_stream, request.grammar)
        self._streams[id_] = stream
        self._grammars[request.grammar] += 1
        if self._issue_step():
            asyncio.get_running_loop().call_soon(self._issue_or_fail)  # what follows, once this step is being written
        return stream

    def _check_room_for(self, grammar: str) -> None:
        if not grammar or grammar in self._grammars:
            return
        num_characters = sum(map(len, self._grammars))
        if num_characters + len(grammar) > _MAX_OPEN_CHARACTERS:
            raise CapacityExceeded(
                f"the grammars of open requests have {num_characters} characters, this one {len(grammar)},"
                f" of {_MAX_OPEN_CHARACTERS} in all; try again when fewer are open"
            )

    def _end_stream(self, id_: RequestId, finished: bool) -> None:
        grammar = self._streams.pop(id_).grammar
        self._grammars[grammar] -= 1
        if not self._grammars[grammar]:
            del self._grammars[grammar]
        if not finished:
            self.scheduler.cancel(id_)
            self._issue()

    def resume(self, pipeline: Pipeline, config: SchedulerConfig) -> None:
        """Go on over another pipeline of a later epoch, if suspended. Requests that no longer fit end with an error."""
        if not self.is_suspended:
            raise RuntimeError("the engine is not suspended")
        lost = self._failure
        self._pipeline, self._failure, self.is_suspended = pipeline, None, False
        self._ended = asyncio.get_running_loop().create_future()
        for id_, stream in self._streams.items():
            stream.num_losses += 1
            if stream.num_losses > _MAX_LOSSES:
                stream.put(WorkerLost(f"given up after {stream.num_losses} losses of the pipeline, the last: {lost}"))
                self.scheduler.cancel(id_)
        for event in self.scheduler.restart(pipeline.placement.epoch, config):
            self._hand_out(event)
        self.start()
        self._issue()

    def abandon(self, error: LaminaError) -> None:
        """Wait for no other pipeline: fail what is suspended."""
        if self.is_suspended:
            self.is_suspended = False
            for stream in self._streams.values():
                stream.put(error)

    async def close(self, *, unload: bool = True) -> None:
        """Stop, fail what still waits for tokens, end the step streams, and free the stages if asked.

        While suspended, requests wait on and the stages that are left stay loaded, for whoever calls `resume`.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._failure is None:
            self._keeps_requests = False
            self._fail(Unavailable("the server is shutting down"))
        await self._pipeline.close(unload=unload and not self.is_suspended)

    def _issue(self) -> None:
        """Send everything that may be sent now."""
        while self._issue_step():
            pass

    def _issue_step(self) -> bool:
        """Send what may be forgotten, and the next step. False if none may be sent now."""
        if self._failure is not None:
            return False
        for removal in self.scheduler.take_removals():
            self._pipeline.remove_sequence(removal)
        issue = self.scheduler.schedule(self._clock())
        if issue is None:
            return False
        for add in issue.adds:
            self._pipeline.add_sequence(add)
        self._pipeline.issue(issue.plan)
        return True

    async def _absorb_forever(self) -> None:
        try:
            while True:
                done = await self._pipeline.next_done()
                for event in self.scheduler.absorb(done, self._clock()):
                    self._hand_out(event)
                self._issue()
        except LaminaError as error:
            self._fail(error)
        except Exception as error:
            self._stop(error)
            raise

    def _issue_or_fail(self) -> None:
        """`_issue` as a callback of the loop, where nobody else would hear of a failure and everybody would wait."""
        try:
            self._issue()
        except Exception as error:
            self._stop(error)
            raise

    def _stop(self, error: Exception) -> None:
        """The fault is ours: no other pipeline would cure it."""
        if self._failure is None:
            self._keeps_requests = False
            self._fail(WorkerLost(f"the engine stopped: {type(error).__name__}: {error}"))

    def _hand_out(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is not None:
            stream.put(event)

    def _fail(self, error: LaminaError) -> None:
        self._failure = error
        self._ended.set_result(error)
        self.is_suspended = self._keeps_requests and isinstance(error, CURABLE)
        if self.is_suspended:
            return
        for stream in self._streams.values():
            stream.put(error)


class TokenStream(Mailbox[TokenEvent | LaminaError]):
    """The tokens of one request as they come, or an error. Closing it early cancels the request, frees its blocks."""

    def __init__(self, record: RequestRecord, on_end: Callable[[RequestId, bool], None], grammar: str) -> None:
        super().__init__()
        self.record = record
        self.grammar = grammar
        self.num_losses = 0  # of the pipeline, while this was open
        self._on_end: Callable[[RequestId, bool], None] | None = on_end

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenEvent:
        if self._on_end is None:
            raise StopAsyncIteration
        event = await self.get()
        if isinstance(event, LaminaError):
            self._end(finished=False)
            raise event
        if event.finish is not None:
            self._end(finished=True)
        return event

    def close(self) -> None:
        """Want no more; the request is cancelled unless it has ended."""
        self._end(finished=False)

    def _end(self, *, finished: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self.record.request_id, finished)
