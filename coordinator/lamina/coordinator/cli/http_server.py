"""uvicorn inside our own loop: our signals, our socket, errors as ours."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig

_BACKLOG = 1024
_GRACE_S = 5.0  # for connections that are still open once everything was answered


class HttpServer(uvicorn.Server):
    """Serves an app on a bound socket until `should_exit`; leaves signals to whoever owns the process."""

    def __init__(self, app: FastAPI, bound: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                ws="none",
            )
        )
        self._bound = bound

    async def run_on_socket(self) -> None:
        """Until `should_exit` is set and what is open has ended."""
        await self.serve(sockets=[self._bound])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does, but a client that does not read what it is sent loses its connection, not its request.

        uvicorn would cancel the request, which ends in a traceback.
        """
        ending = asyncio.create_task(super().shutdown(sockets))
        _, late = await asyncio.wait([ending], timeout=_GRACE_S)
        if late:
            for connection in list(self.server_state.connections):
                if (transport := connection.transport) is not None:
                    transport.abort()
        await ending

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would take SIGTERM and SIGINT."""
        yield


def bind(address: Address) -> socket.socket:
    """A listening socket. Raises InvalidConfig if the port is taken or the address is not this machine's."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidConfig(f"cannot listen on {address}: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise InvalidConfig(f"cannot listen on {address}: {error.strerror}; choose another --port") from None
    return bound


def address_of(bound: socket.socket) -> Address:
    """Where a bound socket listens."""
    host, port = bound.getsockname()[:2]
    return Address(host, port)
