"""The compute thread beside an asynchronous device: what it spins for, for how long, and what it reads meanwhile."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest

from lamina.kernels.backend import Event
from lamina.kernels.mock import MockBackend
from lamina.rpc_worker import device_thread
from lamina.rpc_worker.device_thread import DeviceThread
from support.loopback import eventually, run_scene
from support.spinning import NativeEvent, SpinningBackend, spinning_thread

LONG_S = 30.0


class Watched:
    """Launches something; finished once it is looked at after its event is done."""

    def __init__(self, event: Event | None) -> None:
        self.event = event
        self.told: list[str] = []

    def advance(self) -> float | None:
        self.told.append("look")
        is_done = isinstance(self.event, NativeEvent) and self.event.is_done
        return None if is_done else time.perf_counter() + LONG_S

    def awaited(self) -> Event | None:
        return self.event

    def note_unfinished(self) -> None:
        self.told.append("unfinished")


class Words:
    """A feed that remembers what it reads, on which thread, and how often it was handed back."""

    def __init__(self, connection: socket.socket) -> None:
        self.found: list[bytes] = []
        self.readers: set[str] = set()
        self.returns = 0
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> bool:
        self.readers.add(threading.current_thread().name)
        try:
            self.found.append(self._connection.recv(100, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        return bool(self.found[-1])

    def hand_back(self) -> None:
        self.returns += 1


@asynccontextmanager
async def lent(spin_s: float) -> AsyncIterator[tuple[DeviceThread, Words, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        async with spinning_thread(spin_s) as device:
            words = Words(near)
            assert device.lend(words)
            yield device, words, far


def test_a_step_is_looked_at_when_its_event_is_done() -> None:
    """Not before, though it is due in half a minute; and it counts as unfinished until then."""

    async def scene() -> None:
        async with spinning_thread(LONG_S) as device:
            worker = Watched(NativeEvent())
            device.wake(worker)
            await eventually(lambda: bool(worker.told))
            await asyncio.sleep(0.05)
            assert worker.told == ["look"]
            worker.event.is_done = True  # type: ignore[union-attr]
            await eventually(lambda: len(worker.told) == 3)
            assert worker.told == ["look", "unfinished", "look"]

    run_scene(scene)


def test_whatever_is_brought_ends_the_spinning() -> None:
    async def scene() -> None:
        async with spinning_thread(LONG_S) as device:
            worker, other = Watched(NativeEvent()), Watched(NativeEvent())
            device.wake(worker)
            for _ in range(50):
                assert await device.call(threading.current_thread) is not threading.current_thread()
            device.wake(other)
            await eventually(lambda: bool(other.told))
            device.wake(worker)
            await eventually(lambda: worker.told == ["look", "look"])

    run_scene(scene)


def test_it_sleeps_when_there_was_nothing_to_do_for_a_while() -> None:
    """Also beside a step that takes longer: a core is not kept for minutes."""

    async def scene() -> None:
        async with spinning_thread(0.05) as device:
            for worker in (None, Watched(NativeEvent())):
                if worker is not None:
                    device.wake(worker)
                await asyncio.sleep(0.1)
                before = time.process_time()
                await asyncio.sleep(0.2)
                assert time.process_time() - before < 0.1
                await device.call(lambda: None)

    run_scene(scene)


def test_an_event_that_only_the_interpreter_can_ask_is_waited_for_in_naps() -> None:
    async def scene() -> None:
        async with spinning_thread(LONG_S) as device:
            worker = Watched(Event())
            with patch.object(device, "_spin", side_effect=AssertionError):
                device.wake(worker)
                await eventually(lambda: bool(worker.told))
                assert await device.call(lambda: "still there") == "still there"
            device.wake(worker)
            worker.event = None
            await eventually(lambda: len(worker.told) >= 2)

    run_scene(scene)


def test_a_lent_feed_is_read_between_steps() -> None:
    async def scene() -> None:
        async with lent(LONG_S) as (device, words, far):
            worker = Watched(NativeEvent())
            device.wake(worker)
            for word in (b"one", b"two"):
                far.send(word)
                await eventually(lambda word=word: words.found[-1:] == [word])  # type: ignore[misc]
            assert words.readers == {"compute"}
            assert words.returns == 0
        assert words.returns == 1, "when the thread ends"

    run_scene(scene)


@pytest.mark.parametrize("why", ["it has ended", "nothing to do", "a long job"])
def test_a_lent_feed_is_handed_back(why: str) -> None:
    """Once, and then not read any more."""

    async def scene() -> None:
        async with lent(0.05 if why == "nothing to do" else LONG_S) as (device, words, far):
            far.send(b"one")
            if why != "nothing to do":
                await eventually(lambda: words.found == [b"one"])
            end = threading.Event()
            if why == "it has ended":
                far.close()
            elif why == "a long job":
                device.post(lambda: end.wait(LONG_S), lambda _: None)
            await eventually(lambda: words.returns == 1)
            num_read = len(words.found)
            if why != "it has ended":
                far.send(b"two")
            await asyncio.sleep(0.02)
            assert len(words.found) == num_read
            end.set()
            await device.call(lambda: None)
        assert words.returns == 1

    run_scene(scene)


def test_nothing_is_lent_where_nobody_spins() -> None:
    """A device that works on the thread itself, few cores (a container's quota counts), and a thread that has ended."""

    async def refuses(make: Callable[[], MockBackend], num_cores: int, num_devices: int = 1) -> None:
        near, far = socket.socketpair()
        with near, far, patch.object(device_thread, "usable_cores", lambda: num_cores):
            device = DeviceThread(make(), "compute", num_devices)
            await device.start()
            if make is MockBackend or num_cores < num_devices + 3:
                assert not device.lend(Words(near))
            else:
                assert device.lend(Words(near))
            await device.stop()
            assert not device.lend(Words(near))

    async def scene() -> None:
        await refuses(MockBackend, 64)
        await refuses(SpinningBackend, 3)
        await refuses(SpinningBackend, 4)
        await refuses(SpinningBackend, 4, num_devices=2)
        await refuses(SpinningBackend, 7, num_devices=4)

    run_scene(scene)
