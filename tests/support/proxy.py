"""A TCP relay on loopback that a test can stall or cut: a slow cable, a suspended laptop, a pulled plug."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from lamina.spec.address import Address

_HOST = "127.0.0.2"  # another than the workers': the ports of direct connections are theirs here as well


class Proxy:
    """Forwards to a host until told otherwise. Built by `running_proxy`."""

    def __init__(self, host: str) -> None:
        self.address = Address(_HOST, 0)
        self.num_connections: dict[int, int] = {}  # so far, by port of the host
        self._host = host
        self._open = asyncio.Event()
        self._open.set()
        self._writers: dict[int, list[asyncio.StreamWriter]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def stall(self) -> None:
        """Forward nothing more, in either direction; connections stay up."""
        self._open.clear()

    def cut(self, port: int | None = None) -> None:
        """Drop all connections, or those to one port of the host, and what waits on them."""
        for to, writers in self._writers.items():
            for writer in writers if port in (None, to) else ():
                writer.transport.abort()

    async def accept(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.num_connections[port] = self.num_connections.get(port, 0) + 1
        there_reader, there_writer = await asyncio.open_connection(self._host, port)
        self._writers.setdefault(port, []).extend((writer, there_writer))
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(65536):
                await self._open.wait()
                sink.write(piece)
                await sink.drain()
        except OSError:
            pass  # the connection was cut
        finally:
            sink.close()

    async def close(self) -> None:
        """End everything."""
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def running_proxy(target: Address, edge_port: int = 0) -> AsyncIterator[Proxy]:
    """A proxy of a worker on a free port; with its `edge_port`, of its direct connections as well."""
    proxy = Proxy(target.host)
    server = await asyncio.start_server(partial(proxy.accept, target.port), _HOST, 0)
    servers = [server]
    proxy.address = Address(_HOST, server.sockets[0].getsockname()[1])
    if edge_port:
        servers.append(await asyncio.start_server(partial(proxy.accept, edge_port), _HOST, edge_port))
    try:
        yield proxy
    finally:
        for server in servers:
            server.close()
        await proxy.close()
