"""The edge to a next stage in another process: a gRPC stream. Within one process `StepRunner` hands results over.

A link never raises into its stage: what it cannot deliver it reports once through `on_lost`.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import grpc

from lamina.spec.address import Address
from lamina.spec.errors import LaminaError, WorkerLost
from lamina.spec.step import MAX_RUN_AHEAD
from lamina.v1 import step_pb2 as pb
from lamina.wire.channel import connect
from lamina.wire.status import error_from_rpc

OPEN_DEADLINE_S = 10.0
_METHOD = "/lamina.v1.Worker/Frames"  # not through the stub, which would serialise what is serialised already
_PING_BYTES = 8192
_NUM_PINGS = 5
_MAX_QUEUED = 2 * MAX_RUN_AHEAD

Lost = Callable[[LaminaError], None]


class Link(Protocol):
    """Sends frames and answers forward."""

    rtt_s: float
    num_bytes: int  # sent so far

    @property
    def queue_depth(self) -> int:
        """Messages that wait to be sent."""

    def send(self, message: bytes) -> None:
        """Queue a serialised FramesRequest; never blocks."""

    async def close(self) -> None:
        """End the edge."""


class GrpcLink:
    """A Frames stream to another worker. Built by `open`."""

    def __init__(self, channel: grpc.aio.Channel, call: "_Call", who: str, on_lost: Lost) -> None:
        self._channel = channel
        self._call = call
        self._who = who
        self._on_lost = on_lost
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._closing: asyncio.Task[None] | None = None  # held, or it might be collected before it has run
        self.rtt_s = 0.0
        self.num_bytes = 0

    @classmethod
    async def open(cls, address: Address, opening: pb.FramesOpen, on_lost: Lost) -> "GrpcLink":
        """Dial the next stage and measure the edge. Raises WorkerUnreachable, StaleEpoch or what the peer reports."""
        who = f"stage {opening.to_stage} at {address}"
        channel = await connect(address)
        call: _Call = channel.stream_stream(
            _METHOD, request_serializer=None, response_deserializer=pb.FramesResponse.FromString
        )()
        link = cls(channel, call, who, on_lost)
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                await call.write(pb.FramesRequest(open=opening).SerializeToString())
                await link._expect("opened")
                link.rtt_s = await link._measure_rtt()
        except BaseException as error:
            await channel.close()
            if isinstance(error, grpc.aio.AioRpcError):
                raise error_from_rpc(error, who) from None
            if isinstance(error, TimeoutError):
                raise WorkerLost(f"{who}: the edge was not accepted within {OPEN_DEADLINE_S:g} s") from None
            raise
        link._tasks = [asyncio.create_task(link._write()), asyncio.create_task(link._watch())]
        return link

    @property
    def queue_depth(self) -> int:
        """Messages that wait to be sent."""
        return self._queue.qsize()

    def send(self, message: bytes) -> None:
        """Queue a serialised FramesRequest; a peer that takes none for MAX_RUN_AHEAD steps is given up."""
        if self._queue.qsize() >= _MAX_QUEUED:
            self._lose(WorkerLost(f"{self._who}: has taken nothing of the last {_MAX_QUEUED} messages"))
        else:
            self._queue.put_nowait(message)

    async def close(self) -> None:
        """End the stream and the channel."""
        self._closed = True
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self) -> None:
        try:
            while True:
                message = await self._queue.get()
                await self._call.write(message)
                self.num_bytes += len(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # `_watch` sees the same end, and its reason
        except Exception as error:
            self._lose_by_fault(error)

    async def _watch(self) -> None:
        """Notice the stream's end, also when nothing is being sent."""
        try:
            while await self._call.read() is not grpc.aio.EOF:
                pass
            self._lose(WorkerLost(f"{self._who}: closed the edge"))
        except grpc.aio.AioRpcError as error:
            self._lose(error_from_rpc(error, self._who))
        except Exception as error:
            self._lose_by_fault(error)

    def _lose_by_fault(self, error: Exception) -> None:
        """Nobody awaits the link's tasks: one that ended in silence would leave two stages waiting for ever."""
        self._lose(WorkerLost(f"{self._who}: the edge failed: {type(error).__name__}: {error}"))

    def _lose(self, error: LaminaError) -> None:
        if self._closed:
            return
        self._closed = True
        self._on_lost(error)
        self._closing = asyncio.create_task(self.close())

    async def _expect(self, kind: str) -> pb.FramesResponse:
        response = await self._call.read()
        if not isinstance(response, pb.FramesResponse):  # end of stream; the status says why
            code, details = await self._call.code(), await self._call.details()
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), await self._call.trailing_metadata(), details)
        if response.WhichOneof("body") != kind:
            raise WorkerLost(f"{self._who}: answered {response.WhichOneof('body')} where {kind} was due")
        return response

    async def _measure_rtt(self) -> float:
        """Median round trip of a few pings of 8 KiB, seconds."""
        times = []
        for i in range(_NUM_PINGS):
            start = time.perf_counter()
            ping = pb.Ping(id=i, payload=bytes(_PING_BYTES))
            await self._call.write(pb.FramesRequest(ping=ping).SerializeToString())
            await self._expect("pong")
            times.append(time.perf_counter() - start)
        return statistics.median(times)


_Call = grpc.aio.StreamStreamCall[bytes, pb.FramesResponse]
