"""The one thread that touches a device. Work goes in through a queue, results come back on the asyncio loop.

Steps take a shorter way: a `Worker` that is woken takes its next step itself, without asking the loop, and the thread
looks after what it has launched until that is done. Beside an asynchronous device it does not sleep between the steps
of a sequence: it spins, natively, for whatever may come next, and reads the `Feed`s that others lend it meanwhile.
"""

import asyncio
import ctypes
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from lamina.kernels.backend import Backend, DeviceFacts, Event, EventProbe
from lamina.kernels.cpu.threads import usable_cores
from lamina.kernels.spin import MAX_WATCHED, Spinner, Woken

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
_FACTS_PATIENCE_S = 0.1  # most steps are shorter, loads are longer
_PR_SET_TIMERSLACK = 29
_NAP_S = 20e-6  # between two looks at work that the device has not finished
_SPIN_S = 5e-3  # after the last thing that there was to do; longer steps are worth a nap
_OTHER_CORES = 3  # that the loop, the threads of gRPC and other programs need beside those that spin


class Worker(Protocol):
    """Something whose work the thread does a little at a time."""

    def advance(self) -> float | None:
        """Do what can be done now, never raising.

        When to look again at what the device works on, on the clock of time.perf_counter; None if at nothing.
        """

    def awaited(self) -> Event | None:
        """What the device is to finish next; None if nothing, or if that has no event."""

    def note_unfinished(self) -> None:
        """It was watched, and not finished until just now."""


class Feed(Protocol):
    """A connection whose thread lends it to the device's, which then reads it between two steps."""

    def fileno(self) -> int:
        """Of its socket."""

    def read(self) -> bool:
        """Take what has come, without waiting and never raising; False if its own thread has to go on."""

    def hand_back(self) -> None:
        """Its own thread reads on."""


class _Lent(NamedTuple):
    feed: Feed


class DeviceThread:
    """Runs functions on one backend, one at a time, in the order they were submitted.

    `last_facts`, there after `start`, are the device's as of the end of the last `call` or of the last reading.
    """

    last_facts: DeviceFacts
    served_by: str = ""  # an implementation that is not the best there could be, and why, for people

    def __init__(self, backend: Backend, name: str, num_devices: int = 1) -> None:
        """`num_devices` of this process may have such a thread each."""
        self.backend = backend
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Callable[[], None] | Worker | _Lent | None] = queue.SimpleQueue()
        self._woken: set[Worker] = set()  # in the queue, with nothing submitted behind them
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._reading: asyncio.Future[None] | None = None  # of the facts, while one is under way
        self._watched: dict[Worker, float] = {}  # those with launched work, and when to look; the thread's own
        self._spinner = _spinner_beside(backend, num_devices)
        self._spin_until = 0.0  # on the clock of time.perf_counter
        self._feeds: dict[int, Feed] = {}  # by descriptor; the thread's own
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, fn: Callable[[], Result], on_done: Callable[[Result | Exception], None]) -> None:
        """Run `fn` on the thread; `on_done` gets its result or exception on the loop, in order."""

        def job() -> None:
            try:
                outcome: Result | Exception = fn()
            except Exception as error:  # handed to on_done, whose owner decides
                outcome = error
            self.tell_loop(lambda: on_done(outcome))

        self._put(job)
        self._woken.clear()  # after that: who is woken in between would be taken for queued behind the job

    def wake(self, worker: Worker) -> None:
        """Have the thread advance `worker`, after what was submitted before. From any thread.

        Whoever is still in the queue is not put there again: it will find all that came meanwhile.
        """
        if worker not in self._woken:
            self._woken.add(worker)
            self._put(worker)

    def lend(self, feed: Feed) -> bool:
        """Have the thread read a feed whenever it would spin, until it hands it back. From any thread.

        False if it never does that.
        """
        if self._spinner is None:
            return False
        self._put(_Lent(feed))
        return True

    def tell_loop(self, fn: Callable[[], None]) -> None:
        """Call `fn` on the loop, in order. From any thread; dropped once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(fn)
        except RuntimeError:  # the daemon is going down and nobody waits for this
            _log.debug("result dropped: the event loop is closed")

    async def call(self, fn: Callable[[], Result]) -> Result:
        """Run `fn` on the thread and wait for it without blocking the loop."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def run() -> tuple[Result, DeviceFacts]:
            return fn(), self.backend.device_facts()

        def settle(outcome: tuple[Result, DeviceFacts] | Exception) -> None:
            if not isinstance(outcome, Exception):
                self.last_facts = outcome[1]
            if future.cancelled():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome[0])

        self.post(run, settle)
        return await future

    async def facts(self) -> DeviceFacts:
        """The device now; where its thread is busy for longer than a moment, as it was when last read."""
        if self._reading is None:
            self._reading = self._loop.create_future()
            self.post(self.backend.device_facts, self._take_facts)
        await asyncio.wait([self._reading], timeout=_FACTS_PATIENCE_S)
        return self.last_facts

    def _take_facts(self, outcome: DeviceFacts | Exception) -> None:
        if isinstance(outcome, Exception):
            cause = None if isinstance(outcome, OSError) else outcome  # no file descriptor left, say: no fault of ours
            _log.error("the device's memory could not be read: %s", outcome, exc_info=cause)
        else:
            self.last_facts = outcome
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.set_result(None)

    async def start(self) -> None:
        """Make the device current on the thread. Raises what the backend raises."""
        await self.call(self.backend.bind_to_thread)

    async def stop(self) -> None:
        """Finish what is queued, close the backend, end the thread. Raises what closing raises."""
        self._put(None)
        await asyncio.shield(self._ended)

    def _put(self, item: Callable[[], None] | Worker | _Lent | None) -> None:
        self._queue.put(item)
        spinner = self._spinner  # the thread drops it when it ends
        if spinner is not None:
            spinner.ring()

    def _run(self) -> None:
        _wake_promptly()
        while True:
            try:
                item = self._take()
            except queue.Empty:
                now = time.perf_counter()
                for worker in [worker for worker, due in self._watched.items() if due <= now]:
                    self._advance(worker)
                continue
            if item is None:
                break
            self._do(item)
            self._spin_until = time.perf_counter() + _SPIN_S
        self._spinner = None  # nothing is lent from now on; what was is handed back
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, _Lent):
                item.feed.hand_back()
        self._hand_back()
        failure: Exception | None = None
        try:
            self.backend.close()
        except Exception as error:  # raised where the thread is stopped
            failure = error
        self.tell_loop(lambda: self._end(failure))

    def _do(self, item: Callable[[], None] | Worker | _Lent) -> None:
        if isinstance(item, _Lent):
            self._feeds[item.feed.fileno()] = item.feed
        elif callable(item):
            self._hand_back()  # it may take long
            item()
        else:
            self._woken.discard(item)  # first: whatever comes from now on may be overlooked
            self._advance(item)

    def _take(self) -> Callable[[], None] | Worker | _Lent | None:
        """The next thing in the queue. Raises queue.Empty when it is time to look at the device."""
        while self._spinner is not None:
            seen = self._spinner.bell
            if not self._queue.empty():
                return self._queue.get()
            left_s, probes = self._spin_until - time.perf_counter(), self._probes()
            if left_s <= 0 or probes is None:
                break
            self._spin(self._spinner, seen, probes, left_s)
        self._hand_back()
        return self._queue.get(timeout=self._patience())

    def _spin(self, spinner: Spinner, seen: int, probes: list[EventProbe], left_s: float) -> None:
        woken = spinner.wait(seen, probes, tuple(self._feeds), left_s)
        if woken is Woken.EVENT:
            for worker in tuple(self._watched):
                worker.note_unfinished()
                self._advance(worker)
        elif woken is Woken.SOCKET:
            for number, feed in tuple(self._feeds.items()):
                if not feed.read():
                    del self._feeds[number]
                    feed.hand_back()
        if woken is not Woken.TIME:
            self._spin_until = time.perf_counter() + _SPIN_S

    def _probes(self) -> list[EventProbe] | None:
        """Of all that the device is to finish; None if that cannot be watched natively."""
        if len(self._watched) > MAX_WATCHED or len(self._feeds) > MAX_WATCHED:
            return None
        probes = []
        for worker in self._watched:
            event = worker.awaited()
            probe = None if event is None else self.backend.event_probe(event)
            if probe is None:
                return None
            probes.append(probe)
        return probes

    def _hand_back(self) -> None:
        while self._feeds:
            self._feeds.popitem()[1].hand_back()

    def _patience(self) -> float | None:
        """Until the next look at the device is due; short naps from then on."""
        if not self._watched:
            return None
        return max(_NAP_S, min(self._watched.values()) - time.perf_counter())

    def _advance(self, worker: Worker) -> None:
        due = worker.advance()
        if due is not None:
            self._watched[worker] = due
        else:
            self._watched.pop(worker, None)

    def _end(self, failure: Exception | None) -> None:
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)


def _spinner_beside(backend: Backend, num_devices: int) -> Spinner | None:
    """For a thread that waits for a device which works by itself, on a machine with a core to spare for each."""
    has_room = backend.capabilities.asynchronous and usable_cores() >= num_devices + _OTHER_CORES
    return Spinner.create() if has_room else None


def _wake_promptly() -> None:
    """Let the calling thread's naps end when they should: Linux rounds them up to 50 µs by default."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))  # ns; a refusal costs promptness only
