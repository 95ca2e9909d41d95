"""The sending end of an edge's direct connection: dialled once, then written to by the compute thread itself.

| thread | does |
|---|---|
| compute thread | `send`: gives the socket what it takes at once, and never waits |
| writer, one per connection | sends what was left, and closes the socket in the end |
| event loop | `close`; watches for the connection's end (`link`) |

The condition guards what waits, so that messages leave in order.
"""

import asyncio
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lamina.spec.address import Address
from lamina.spec.errors import LaminaError
from lamina.wire.direct import BEGINNING_BYTES, KEY_BYTES, MAGIC, encode_ping, preface, read_beginning, tune

DIAL_DEADLINE_S = 1.0
_PING_BYTES = 8192
_NUM_PINGS = 5
_NOTHING = memoryview(b"")


def _nobody_asks(reason: str) -> None:
    pass


class NoDirect(Exception):
    """There is no direct connection, for a reason that a person can do something about."""


async def dial(address: Address, key: bytes) -> tuple[socket.socket, float]:
    """A direct connection and its round trip in seconds: the median of a few pings. Raises NoDirect after a second."""
    if len(key) != KEY_BYTES:
        raise NoDirect("the peer gave no key for it")
    dialling = asyncio.ensure_future(asyncio.to_thread(_dial, address, key, time.monotonic() + DIAL_DEADLINE_S))
    try:
        done, _ = await asyncio.wait([dialling], timeout=DIAL_DEADLINE_S + 0.1)  # names may take longer to look up
    except asyncio.CancelledError:
        dialling.add_done_callback(_forget)
        raise
    if not done:
        dialling.add_done_callback(_forget)
        raise NoDirect(f"no answer within {DIAL_DEADLINE_S:g} s")
    return dialling.result()


def _forget(dialling: "asyncio.Future[tuple[socket.socket, float]]") -> None:
    if not dialling.cancelled() and dialling.exception() is None:
        dialling.result()[0].close()


def _dial(address: Address, key: bytes, deadline_s: float) -> tuple[socket.socket, float]:
    connection: socket.socket | None = None
    try:
        connection = socket.create_connection((address.host, address.port), timeout=DIAL_DEADLINE_S)
        connection.settimeout(max(0.01, deadline_s - time.monotonic()))
        tune(connection)
        connection.sendall(preface(key))
        if _receive(connection, len(MAGIC)) != MAGIC:
            raise NoDirect("what answers there is no worker")
        rtt_s = statistics.median(ping(connection, _PING_BYTES) for _ in range(_NUM_PINGS))
        connection.settimeout(None)
    except (OSError, EOFError, LaminaError, NoDirect) as error:
        if connection is not None:
            connection.close()
        raise NoDirect(_reason(error)) from None
    return connection, rtt_s


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"no answer within {DIAL_DEADLINE_S:g} s" if isinstance(error, TimeoutError) else str(error)


def ping(connection: socket.socket, num_bytes: int) -> float:
    """Seconds that a ping of so many bytes takes on a connection that nobody else uses. Raises OSError, EOFError."""
    start_s = time.perf_counter()
    connection.sendall(encode_ping(bytes(num_bytes)))
    _receive(connection, read_beginning(_receive(connection, BEGINNING_BYTES)).payload_bytes)
    return time.perf_counter() - start_s


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        piece = connection.recv(num_bytes - len(received))
        if not piece:
            raise EOFError("it was hung up on")
        received += piece
    return bytes(received)


class DirectSender:
    """Sends messages in order. What the connection breaks of is told once, from whichever thread notices."""

    def __init__(self, connection: socket.socket, max_waiting: int, on_broken: Callable[[str], None]) -> None:
        """`on_broken` gets the reason. The connection is this object's from now on."""
        self.num_bytes = 0  # sent so far
        self._connection = connection
        self._max_waiting = max_waiting
        self._on_broken = on_broken
        self._waiting: deque[list[memoryview]] = deque()
        self._changed = threading.Condition()
        self._is_broken = self._is_closed = False
        threading.Thread(target=self._write, name="edge-writer", daemon=True).start()

    @property
    def queue_depth(self) -> int:
        """Messages that the connection has not taken whole."""
        return len(self._waiting)

    def send(self, message: bytes, payload: memoryview = _NOTHING) -> None:
        """Send a message and the payload (bytes) that belongs to it, of which it copies what does not leave at once.

        Never waits, never raises.
        """
        parts = [memoryview(message), payload]
        reason = ""
        with self._changed:
            if self._is_broken:
                return
            try:
                left = parts if self._waiting else self._give(parts, socket.MSG_DONTWAIT)
            except OSError as error:
                self._is_broken, reason = True, _reason(error)
            else:
                if left and len(self._waiting) >= self._max_waiting:
                    self._is_broken, reason = True, f"it has taken nothing of the last {self._max_waiting} messages"
                elif left:
                    self._waiting.append([memoryview(part.tobytes()) for part in left])
                    self._changed.notify()
        if reason:
            self._on_broken(reason)

    def close(self) -> None:
        """End the connection, whatever waits; the writer's thread ends with it."""
        with self._changed:
            if self._is_closed:
                return
            self._is_broken = self._is_closed = True
            self._on_broken = _nobody_asks  # a circle: the link, and its channel, would wait for garbage collection
            with suppress(OSError):  # it may be gone already
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes a writer that is sending
            self._changed.notify()

    def _give(self, parts: list[memoryview], flags: int = 0) -> list[memoryview]:
        """Have the socket take what it does; what is left. Raises OSError."""
        try:
            sent = self._connection.sendmsg(parts, (), flags)
        except BlockingIOError:
            return parts
        self.num_bytes += sent
        while parts and sent >= len(parts[0]):
            sent -= len(parts[0])
            parts = parts[1:]
        return [parts[0][sent:], *parts[1:]] if parts else parts

    def _write(self) -> None:
        while (parts := self._next()) is not None:
            try:
                left = self._give(parts)
            except OSError as error:
                self._break(_reason(error))
                continue
            with self._changed:
                self._waiting.popleft()
                if left:
                    self._waiting.appendleft(left)
        self._connection.close()

    def _next(self) -> list[memoryview] | None:
        """What to send next, once there is something; None once the connection is closed."""
        with self._changed:
            while not self._is_closed and (self._is_broken or not self._waiting):
                self._changed.wait()
            return None if self._is_closed else self._waiting[0]

    def _break(self, reason: str) -> None:
        with self._changed:
            if self._is_broken:
                return
            self._is_broken = True
        self._on_broken(reason)
