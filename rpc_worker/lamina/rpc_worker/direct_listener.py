"""Where neighbours dial the direct connections of their edges: a TCP listener beside the gRPC server.

Owned by the event loop. A connection is nobody's until it has said a key that one of the Frames streams gave away; how
many may be undecided, and for how long, is bounded, and those that are not wanted disturb nobody but themselves.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lamina.rpc_worker.direct_receiver import DirectReceiver, Taker
from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig, LaminaError
from lamina.wire.direct import KEY_BYTES, MAGIC, PREFACE_BYTES, key_of, tune

_log = logging.getLogger(__name__)
_MAX_UNDECIDED = 64
_PREFACE_DEADLINE_S = 2.0
_BACKLOG = 128
_ACCEPT_RETRY_S = 0.1  # a process without a free file descriptor may have one later


class Offer:
    """The place of one direct connection: where, with which key, and how it ended."""

    def __init__(self, port: int, key: bytes, taker: Taker) -> None:
        self.port = port
        self.key = key
        self.ended: asyncio.Future[LaminaError] = asyncio.get_running_loop().create_future()
        self.receiver = DirectReceiver(taker, self._settle)

    def _settle(self, error: LaminaError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class DirectListener:
    """Built by `open`; None of its connections outlives the stream that offered it."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self.port: int = sockets[0].getsockname()[1]
        self._sockets = sockets
        self._offers: dict[bytes, Offer] = {}  # by key
        self._undecided: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._has_warned = False
        self._accepting = [asyncio.create_task(self._accept(listening)) for listening in sockets]

    @classmethod
    def open(cls, address: Address) -> "DirectListener":
        """Listen; port 0 takes any. Raises InvalidConfig."""
        try:
            return cls(_listen(address))
        except OSError as error:
            why = error.strerror or str(error)
            raise InvalidConfig(
                f"cannot listen on {address} for direct connections: {why}; choose another port with --edge-port, or"
                " none"
            ) from None

    @contextmanager
    def offer(self, taker: Taker) -> Iterator[Offer]:
        """A place for one connection, which ends with the block."""
        offer = Offer(self.port, secrets.token_bytes(KEY_BYTES), taker)
        self._offers[offer.key] = offer
        try:
            yield offer
        finally:
            self._offers.pop(offer.key, None)
            offer.receiver.close()

    async def close(self) -> None:
        """Listen no more. What was offered ends with its stream."""
        tasks = [*self._accepting, *self._undecided]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                self._warn(f"cannot be accepted: {error.strerror or error}")
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._undecided) >= _MAX_UNDECIDED:
                oldest = next(iter(self._undecided))
                del self._undecided[oldest]  # at once: others may come before it is gone
                oldest.cancel()
            task = asyncio.create_task(self._greet(connection))
            self._undecided[task] = None
            task.add_done_callback(lambda task: self._undecided.pop(task, None))
            await asyncio.sleep(0)  # it begins: cancelled before, it would leave its connection open

    async def _greet(self, connection: socket.socket) -> None:
        """Hear a connection's key, and give it to the stream that it belongs to."""
        loop, offer = asyncio.get_running_loop(), None
        try:
            async with asyncio.timeout(_PREFACE_DEADLINE_S):
                said = await _receive(connection, PREFACE_BYTES)
                key = key_of(said)
                offer = None if key is None else self._offers.pop(key, None)
                if offer is None:
                    self._warn("does not know the key of an edge" if key else "is not a worker's, or another release's")
                    return
                tune(connection)
                await loop.sock_sendall(connection, MAGIC)
            connection.setblocking(True)
            offer.receiver.begin(connection)
            connection = None  # type: ignore[assignment]
        except TimeoutError:
            self._warn(f"says nothing for {_PREFACE_DEADLINE_S:g} s")
        except OSError:
            pass  # gone again
        finally:
            if connection is not None:
                connection.close()

    def _warn(self, what: str) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        _log.log(level, "port %d is for neighbouring workers: a connection there %s", self.port, what)


async def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < num_bytes:
        piece = await loop.sock_recv(connection, num_bytes - len(received))
        if not piece:
            raise ConnectionError("hung up on")
        received += piece
    return received


def _listen(address: Address) -> list[socket.socket]:
    """A listening socket for every address that the host stands for, as many as there can be. Raises OSError."""
    sockets: list[socket.socket] = []
    port, refused = address.port, OSError("the name stands for no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM):
        listening = None
        try:
            listening = socket.socket(family, kind, protocol)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                with suppress(OSError):  # [::] is every address, as for the gRPC server
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.bind((where[0], port, *where[2:]))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
        except OSError as error:
            refused = error
            if listening is not None:
                listening.close()
            continue
        port = listening.getsockname()[1]
        sockets.append(listening)
    if not sockets:
        raise refused
    return sockets
