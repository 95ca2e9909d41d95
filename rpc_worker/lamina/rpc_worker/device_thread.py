"""The one thread that touches a device. Work goes in through a queue, results come back on the asyncio loop."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from lamina.kernels.backend import Backend

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class DeviceThread:
    """Runs functions on one backend, one at a time, in the order they were submitted."""

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend = backend
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, fn: Callable[[], Result], on_done: Callable[[Result | Exception], None]) -> None:
        """Run `fn` on the thread; `on_done` gets its result or exception on the loop, in order."""

        def job() -> None:
            try:
                outcome: Result | Exception = fn()
            except Exception as error:  # handed to on_done, whose owner decides
                outcome = error
            self._call_loop(lambda: on_done(outcome))

        self._queue.put(job)

    async def call(self, fn: Callable[[], Result]) -> Result:
        """Run `fn` on the thread and wait for it without blocking the loop."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def settle(outcome: Result | Exception) -> None:
            if future.cancelled():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.post(fn, settle)
        return await future

    async def start(self) -> None:
        """Make the device current on the thread. Raises what the backend raises."""
        await self.call(self.backend.bind_to_thread)

    async def stop(self) -> None:
        """Finish what is queued, close the backend, end the thread. Raises what closing raises."""
        self._queue.put(None)
        await asyncio.shield(self._ended)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
        failure: Exception | None = None
        try:
            self.backend.close()
        except Exception as error:  # raised where the thread is stopped
            failure = error
        self._call_loop(lambda: self._end(failure))

    def _end(self, failure: Exception | None) -> None:
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)

    def _call_loop(self, fn: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(fn)
        except RuntimeError:  # the loop is closed: the daemon is going down and nobody waits for this
            _log.debug("result dropped: the event loop is closed")
