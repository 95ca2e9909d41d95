"""The compute thread as the event loop sees it: order, results, and what is known of the device while it is busy."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise

import pytest

from lamina.kernels.backend import DeviceFacts
from lamina.kernels.mock import MockBackend
from lamina.rpc_worker.device_thread import DeviceThread

DEADLINE_S = 5.0


class CountingBackend(MockBackend):
    """Its free memory falls by one byte with each reading; it remembers which threads read."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[str] = []

    def device_facts(self) -> DeviceFacts:
        self.readers.append(threading.current_thread().name)
        return DeviceFacts("mock", "mock", 1000, 1000 - len(self.readers))


@asynccontextmanager
async def running(backend: MockBackend) -> AsyncIterator[DeviceThread]:
    device = DeviceThread(backend, "compute")
    await device.start()
    try:
        yield device
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await device.stop()


@contextmanager
def busy(device: DeviceThread) -> Iterator[None]:
    """The thread does something else all the while."""
    end = threading.Event()
    device.post(lambda: end.wait(DEADLINE_S), lambda _: None)
    try:
        yield
    finally:
        end.set()


def test_facts_are_read_on_the_compute_thread_only() -> None:
    """At the start, when asked, and after whatever changed memory."""

    async def scene() -> None:
        backend = CountingBackend()
        async with running(backend) as device:
            assert device.last_facts.free_bytes == 999
            assert (await device.facts()).free_bytes == 998
            assert await device.call(lambda: "loaded") == "loaded"
            assert device.last_facts.free_bytes == 997
        assert set(backend.readers) == {"compute"}

    asyncio.run(scene())


def test_facts_of_a_busy_device_are_the_last_ones() -> None:
    """Whoever asks during a long load is answered, and asking often does not fill the thread's queue."""

    async def scene() -> None:
        backend = CountingBackend()
        async with running(backend) as device:
            with busy(device):
                async with asyncio.timeout(DEADLINE_S / 2):
                    for _ in range(3):
                        assert (await device.facts()).free_bytes == 999
            await device.call(lambda: None)
            assert len(backend.readers) == 3

    asyncio.run(scene())


def test_a_device_that_cannot_be_asked_is_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(CountingBackend):
        def device_facts(self) -> DeviceFacts:
            if self.readers:
                raise OSError("the driver is gone")
            return super().device_facts()

    async def scene() -> None:
        async with running(Broken()) as device:
            assert (await device.facts()).free_bytes == 999
        assert "the device's memory could not be read: the driver is gone" in caplog.text
        assert "Traceback" not in caplog.text

    asyncio.run(scene())


class Watched:
    """Launches something that is done after a few looks; tells when it was looked at."""

    def __init__(self, num_looks: int, nap_s: float) -> None:
        self.looks: list[float] = []
        self._num_looks = num_looks
        self._nap_s = nap_s

    def advance(self) -> float | None:
        self.looks.append(time.perf_counter())
        return None if len(self.looks) > self._num_looks else self.looks[-1] + self._nap_s


def test_launched_work_is_looked_at_when_it_is_due_until_it_is_done() -> None:
    async def scene() -> None:
        async with running(CountingBackend()) as device:
            worker = Watched(num_looks=5, nap_s=0.002)
            device.wake(worker)
            async with asyncio.timeout(DEADLINE_S):
                while len(worker.looks) < 6:
                    await asyncio.sleep(0.001)
            assert all(later - sooner >= 0.002 for sooner, later in pairwise(worker.looks))
            await asyncio.sleep(0.02)
            assert len(worker.looks) == 6, "nobody looks after that"

    asyncio.run(scene())


def test_whatever_comes_wakes_a_thread_that_waits_for_its_device() -> None:
    """A plan that arrives while a step runs must not wait for the step's end."""

    async def scene() -> None:
        async with running(CountingBackend()) as device:
            worker = Watched(num_looks=1, nap_s=3600)
            device.wake(worker)
            async with asyncio.timeout(DEADLINE_S):
                assert await device.call(lambda: "at once") == "at once"
                device.wake(worker)
                while len(worker.looks) < 2:
                    await asyncio.sleep(0.001)

    asyncio.run(scene())


def test_a_worker_that_waits_for_its_turn_is_woken_once() -> None:
    """What the loop brings while the thread is busy is found in one go, and after whatever was submitted before it."""

    async def scene() -> None:
        async with running(CountingBackend()) as device:
            worker, order = Watched(num_looks=0, nap_s=0), []
            with busy(device):
                for _ in range(3):
                    device.wake(worker)
                device.post(lambda: order.append(len(worker.looks)), lambda _: None)
                for _ in range(3):
                    device.wake(worker)
            await device.call(lambda: None)
            assert order == [1]
            assert len(worker.looks) == 2
            device.wake(worker)
            await device.call(lambda: None)
            assert len(worker.looks) == 3

    asyncio.run(scene())


def test_who_is_woken_after_a_submission_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another thread wakes it in the middle of that submission, which puts it in front."""

    async def scene() -> None:
        async with running(CountingBackend()) as device:
            worker, looks_before = Watched(num_looks=0, nap_s=0), []
            waiting = device._queue

            class Interleaved:
                get = waiting.get

                def put(self, item: object) -> None:
                    if callable(item):
                        device.wake(worker)
                    waiting.put(item)  # type: ignore[arg-type]

            with busy(device):
                monkeypatch.setattr(device, "_queue", Interleaved())
                device.post(lambda: looks_before.append(len(worker.looks)), lambda _: None)
                monkeypatch.undo()
                device.wake(worker)
            await device.call(lambda: None)
            assert looks_before == [1]
            assert len(worker.looks) == 2

    asyncio.run(scene())
