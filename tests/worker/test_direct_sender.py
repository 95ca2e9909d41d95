"""The sending end of a direct connection: the compute thread never waits, messages stay in order and whole."""

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from lamina.rpc_worker.direct_sender import DirectSender, NoDirect, dial
from lamina.spec.address import Address
from lamina.wire.direct import KEY_BYTES, MAGIC

KEY = bytes(range(KEY_BYTES))
MAX_WAITING = 4
LARGE = 8 * 2**20  # more than any socket buffer takes


@contextmanager
def connected() -> Iterator[tuple[DirectSender, socket.socket, list[str]]]:
    """A sender, the socket at the other end, and why it broke."""
    reasons: list[str] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    sender = DirectSender(near, MAX_WAITING, reasons.append)
    with far:
        yield sender, far, reasons
        sender.close()
    until(lambda: near.fileno() == -1, "the writer closes the socket")


def until(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.001)


def read(end: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        piece = end.recv(num_bytes - len(received))
        assert piece, "the connection has ended"
        received += piece
    return bytes(received)


def payload(num_bytes: int, seed: int) -> memoryview:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).data


def test_what_the_socket_takes_at_once_needs_no_other_thread() -> None:
    with connected() as (sender, far, reasons):
        sender.send(b"head", payload(1000, 1))
        assert (sender.queue_depth, sender.num_bytes) == (0, 1004)
        assert read(far, 1004) == b"head" + bytes(payload(1000, 1))
        sender.send(b"no payload")
        assert read(far, 10) == b"no payload"
        assert reasons == []


def test_what_it_does_not_take_follows_in_order() -> None:
    """Large and small in turns: a small one must not overtake the rest of a large one."""
    with connected() as (sender, far, reasons):
        sizes = [LARGE, 10, LARGE, 0]
        start_s = time.monotonic()
        for index, size in enumerate(sizes):
            sender.send(b"%d" % index, payload(size, index))
        assert time.monotonic() - start_s < 1, "nobody reads yet"
        assert sender.queue_depth == len(sizes)
        for index, size in enumerate(sizes):
            assert read(far, 1 + size) == b"%d" % index + bytes(payload(size, index))
        until(lambda: sender.queue_depth == 0, "all is sent")
        assert sender.num_bytes == sum(sizes) + len(sizes)
        assert reasons == []


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    """Told once; what comes afterwards is dropped."""
    with connected() as (sender, _, reasons):
        for index in range(MAX_WAITING + 5):
            sender.send(b"head", payload(LARGE, index))
            assert sender.queue_depth <= MAX_WAITING
        assert reasons == [f"it has taken nothing of the last {MAX_WAITING} messages"]


@pytest.mark.parametrize("num_bytes", [10, LARGE], ids=["while nothing waits", "while the writer sends"])
def test_a_peer_that_hangs_up_is_told_once(num_bytes: int) -> None:
    with connected() as (sender, far, reasons):
        sender.send(b"head", payload(num_bytes, 0))
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # by a reset
        far.close()
        end = time.monotonic() + 10
        while not reasons and time.monotonic() < end:
            if sender.queue_depth < 2:
                sender.send(b"more")
            time.sleep(0.001)
        sender.send(b"more")
        assert len(reasons) == 1
        assert reasons[0] in ("connection reset by peer", "broken pipe")


def test_a_peer_that_stays_silent_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what TCP gave it up with, not by how long dialling may take."""

    def time_out(*_: object) -> int:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    with connected() as (sender, _, reasons):
        monkeypatch.setattr(sender, "_give", time_out)
        sender.send(b"head")
        assert reasons == ["connection timed out"]


def test_close_ends_a_writer_that_is_sending() -> None:
    """As an epoch that ends while the peer is stuck; it is nobody's loss."""
    with connected() as (sender, _, reasons):
        sender.send(b"head", payload(LARGE, 0))
        time.sleep(0.05)
        sender.close()
        sender.close()
        sender.send(b"more")
        until(lambda: not [t for t in threading.enumerate() if t.name == "edge-writer"], "the thread ends")
        assert reasons == []


# -- dialling


def dialled(answer: bytes, monkeypatch: pytest.MonkeyPatch, key: bytes = KEY) -> str:
    """Dial something that answers so to a preface: why there is no connection."""
    monkeypatch.setattr("lamina.rpc_worker.direct_sender.DIAL_DEADLINE_S", 0.3)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def serve() -> None:
            try:
                end, _ = listening.accept()
            except OSError:
                return  # nobody dialled
            with end:
                end.recv(100)
                end.sendall(answer)
                if not answer:
                    end.recv(100)  # until the other side gives up

        threading.Thread(target=serve, daemon=True).start()
        return refusal(Address(*listening.getsockname()), key)


def refusal(address: Address, key: bytes) -> str:
    start_s = time.monotonic()
    with pytest.raises(NoDirect) as caught:
        asyncio.run(dial(address, key))
    assert time.monotonic() - start_s < 2
    return str(caught.value)


def test_what_is_no_worker_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dialled(b"HTTP/1.1 400 Bad Request\r\n\r\n", monkeypatch) == "what answers there is no worker"
    assert dialled(b"HTTP", monkeypatch) == "it was hung up on"
    assert dialled(MAGIC, monkeypatch) in ("it was hung up on", "connection reset by peer", "broken pipe")
    assert dialled(b"", monkeypatch) == "no answer within 0.3 s"
    assert dialled(b"", monkeypatch, key=b"") == "the peer gave no key for it"
    assert "cannot begin with" in dialled(MAGIC + b"HTTP/1.1 400 Bad Request", monkeypatch)


def test_a_closed_port_is_done_without() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        address = Address(*listening.getsockname())
    assert refusal(address, KEY) == "connection refused"


def test_dialling_may_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever links is cancelled: the connection that comes about nevertheless is closed."""
    made: list[socket.socket] = []

    def slow(*_: object) -> tuple[socket.socket, float]:
        time.sleep(0.1)
        near, far = socket.socketpair()
        made.extend((near, far))
        return near, 0.0

    monkeypatch.setattr("lamina.rpc_worker.direct_sender._dial", slow)

    async def scene() -> None:
        dialling = asyncio.create_task(dial(Address("h", 1), KEY))
        await asyncio.sleep(0.01)
        dialling.cancel()
        await asyncio.wait([dialling])
        assert dialling.cancelled()
        while not made or made[0].fileno() != -1:
            await asyncio.sleep(0.01)
        made[1].close()

    asyncio.run(asyncio.wait_for(scene(), 10))
