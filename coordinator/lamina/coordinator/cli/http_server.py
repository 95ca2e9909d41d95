"""uvicorn inside our own loop: our signals, our socket, errors as ours."""

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI

from lamina.coordinator.api.settings import MAX_CONNECTIONS
from lamina.coordinator.cli.http_protocol import ConnectionLimit, LimitedProtocol
from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig

_log = logging.getLogger(__name__)
_BACKLOG = 1024
_OTHER_FILES = 200  # beside connections: sockets to workers and from those that join, the model
_GRACE_S = 5.0  # for connections that are still open once everything was answered


class HttpServer(uvicorn.Server):
    """Serves an app on bound sockets until `should_exit`; leaves signals to whoever owns the process."""

    def __init__(self, app: FastAPI, bound: Sequence[socket.socket], max_connections: int = MAX_CONNECTIONS) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(LimitedProtocol, ConnectionLimit(max_connections)),  # type: ignore[arg-type]
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                ws="none",
            )
        )
        self._bound = [*bound]

    async def run_on_sockets(self) -> None:
        """Until `should_exit` is set and what is open has ended."""
        await self.serve(sockets=self._bound)

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


def allow_open_files(num_connections: int) -> None:
    """Raise the soft limit of open files, often 1024, as far as so many connections need; a line if that cannot be."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _OTHER_FILES
    if wanted <= soft or soft == resource.RLIM_INFINITY:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        _log.warning(
            "this process may open %d files, too few for --max-connections %d: raise `ulimit -n`", most, num_connections
        )


def bind(address: Address) -> tuple[socket.socket, ...]:
    """Listening sockets, one for every address that the host's name has (`localhost` may have two), on one port.

    Raises InvalidConfig if the port is taken or the first address is not this machine's.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidConfig(f"cannot listen on {address}: {error.strerror or error}") from None
    bound: list[socket.socket] = []
    for family, host in dict.fromkeys((family, where[0]) for family, _, _, _, where in found):
        try:
            bound.append(_listening(family, str(host), address_of(bound).port if bound else address.port))
        except OSError as error:
            if bound and error.errno == errno.EADDRNOTAVAIL:
                continue  # a name with an address of a family that is switched off here
            for opened in bound:
                opened.close()
            raise InvalidConfig(f"cannot listen on {address}: {error.strerror}; choose another --port") from None
    return tuple(bound)


def _listening(family: int, host: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def address_of(bound: Sequence[socket.socket]) -> Address:
    """Where bound sockets listen, by the first."""
    host, port = bound[0].getsockname()[:2]
    return Address(host, port)
