"""A TCP relay on loopback that a test can stall or cut: a slow cable, a suspended laptop, a pulled plug."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lamina.spec.address import Address


class Proxy:
    """Forwards to `target` until told otherwise. Built by `running_proxy`."""

    def __init__(self, target: Address) -> None:
        self.address = target
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def stall(self) -> None:
        """Forward nothing more, in either direction; connections stay up."""
        self._open.clear()

    def cut(self) -> None:
        """Drop all connections, and what waits on them."""
        for writer in self._writers:
            writer.transport.abort()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        there_reader, there_writer = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers += [writer, there_writer]
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
async def running_proxy(target: Address) -> AsyncIterator[Proxy]:
    """A proxy on a free port."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.address = Address(host, port)
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
