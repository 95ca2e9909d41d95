"""Waiting without sleeping: what ends it, that nothing is missed, and that the interpreter is free meanwhile."""

import ctypes
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lamina.kernels.backend import EventProbe
from lamina.kernels.spin import MAX_WATCHED, Spinner, Woken

PENDING, DONE = 600, 0
LONG_S = 10.0


@pytest.fixture
def spinner() -> Spinner:
    found = Spinner.create()
    if found is None:
        pytest.skip("the native library is not built")
    return found


class Event:
    """Done, or failed, when told so; asked by native code."""

    def __init__(self) -> None:
        self.status = PENDING
        self.asked: list[int] = []
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._query)

    def probe(self, argument: int = 5) -> EventProbe:
        return EventProbe(ctypes.cast(self._function, ctypes.c_void_p).value or 0, argument, PENDING)

    def _query(self, argument: int) -> int:
        self.asked.append(argument)
        return self.status


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_time_is_up(spinner: Spinner) -> None:
    start_s = time.perf_counter()
    assert spinner.wait(spinner.bell, (), (), 0.02) is Woken.TIME
    assert 0.02 <= time.perf_counter() - start_s < 5
    assert spinner.wait(spinner.bell, (), (), -1) is Woken.TIME


def test_a_ring_before_the_wait_is_not_missed(spinner: Spinner) -> None:
    seen = spinner.bell
    spinner.ring()
    assert spinner.wait(seen, (), (), LONG_S) is Woken.BELL
    assert spinner.wait(spinner.bell, (), (), 0) is Woken.TIME


def test_other_threads_run_meanwhile_and_ring(spinner: Spinner) -> None:
    threading.Timer(0.02, spinner.ring).start()
    assert spinner.wait(spinner.bell, (), (), LONG_S) is Woken.BELL


def test_rings_of_many_threads_are_all_different(spinner: Spinner) -> None:
    seen = {spinner.bell}

    def ring() -> None:
        for _ in range(200):
            spinner.ring()

    threads = [threading.Thread(target=ring) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spinner.ring()
    assert spinner.bell == 801
    assert spinner.bell not in seen


@pytest.mark.parametrize("status", [DONE, 719], ids=["done", "failed"])
def test_any_event_ends_it(spinner: Spinner, status: int) -> None:
    events = [Event() for _ in range(MAX_WATCHED)]
    probes = [event.probe(index) for index, event in enumerate(events)]
    assert spinner.wait(spinner.bell, probes, (), 0.001) is Woken.TIME
    assert all(set(event.asked) == {index} for index, event in enumerate(events) if index)
    events[-1].status = status
    assert spinner.wait(spinner.bell, probes, (), LONG_S) is Woken.EVENT


def test_what_was_watched_before_is_not(spinner: Spinner, pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    event = Event()
    event.status = DONE
    far.send(b"x")
    assert spinner.wait(spinner.bell, [event.probe()], [near.fileno()], LONG_S) is Woken.EVENT
    assert spinner.wait(spinner.bell, (), [near.fileno()], LONG_S) is Woken.SOCKET
    assert spinner.wait(spinner.bell, (), (), 0.001) is Woken.TIME


def test_a_socket_that_ends_is_told(spinner: Spinner, pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    assert spinner.wait(spinner.bell, (), [near.fileno()], 0.001) is Woken.TIME
    threading.Timer(0.02, far.close).start()
    assert spinner.wait(spinner.bell, (), [near.fileno()], LONG_S) is Woken.SOCKET
