"""Drives the scheduler over a pipeline: requests in, token streams out. The only part of the engine that does IO.

Owned by the coordinator's event loop, which alone touches the scheduler. It wakes up for two things: a request (or its
cancellation), and a step's answer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.coordinator.engine.sequence import RequestId, SequenceRequest, TokenEvent
from lamina.spec.errors import LaminaError, WorkerLost

Clock = Callable[[], float]


class Engine:
    """One placement's inner loop. `start` it, `submit` requests, `close` it."""

    def __init__(self, scheduler: Scheduler, pipeline: Pipeline, clock: Clock = time.monotonic) -> None:
        self.scheduler = scheduler
        self._pipeline = pipeline
        self._clock = clock
        self._streams: dict[RequestId, asyncio.Queue[TokenEvent | LaminaError]] = {}
        self._failure: LaminaError | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to absorb answers."""
        self._task = asyncio.create_task(self._absorb_forever())

    async def submit(self, request: SequenceRequest) -> AsyncIterator[TokenEvent]:
        """The request's tokens as they come; closing the iterator early cancels it and frees its blocks.

        Raises InvalidRequest or CapacityExceeded when it cannot be taken, WorkerLost and others when the pipeline ends.
        """
        if self._failure is not None:
            raise self._failure
        id_ = self.scheduler.add(request, self._clock())
        events: asyncio.Queue[TokenEvent | LaminaError] = asyncio.Queue()
        self._streams[id_] = events
        self._issue()
        try:
            finished = False
            while not finished:
                event = await events.get()
                if isinstance(event, LaminaError):
                    raise event
                finished = event.finish is not None
                yield event
        finally:
            del self._streams[id_]
            if not finished and self._failure is None:
                self.scheduler.cancel(id_)
                self._issue()

    async def close(self, *, unload: bool = True) -> None:
        """Stop, end the step streams, and free the stages if asked."""
        if self._task is not None:
            self._task.cancel()
        await self._pipeline.close(unload=unload)

    def _issue(self) -> None:
        """Send everything that may be sent now."""
        for removal in self.scheduler.take_removals():
            self._pipeline.remove_sequence(removal)
        while (issue := self.scheduler.schedule(self._clock())) is not None:
            for add in issue.adds:
                self._pipeline.add_sequence(add)
            self._pipeline.issue(issue.plan)

    async def _absorb_forever(self) -> None:
        try:
            while True:
                done = await self._pipeline.next_done()
                for event in self.scheduler.absorb(done, self._clock()):
                    stream = self._streams.get(event.request_id)
                    if stream is not None:
                        stream.put_nowait(event)
                self._issue()
        except LaminaError as error:
            self._fail(error)
        except Exception as error:
            self._fail(WorkerLost(f"the engine stopped: {type(error).__name__}: {error}"))
            raise

    def _fail(self, error: LaminaError) -> None:
        self._failure = error
        for stream in self._streams.values():
            stream.put_nowait(error)
