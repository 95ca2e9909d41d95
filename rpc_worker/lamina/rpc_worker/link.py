"""The edge to a next stage in another process. Within one process `StepRunner` hands results over.

A gRPC stream opens the edge, is its liveness, and says why it ends. Frames and answers take a direct connection beside
it, written to by the compute thread itself (`direct_sender`); where that does not come about they take the stream. A
link never raises into its stage: what it cannot deliver it reports once through `on_lost`, on the loop.

Owned by the event loop, but for `take_hidden` and `take_done`, which are the compute thread's.
"""

import asyncio
import logging
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from lamina.rpc_worker.direct_sender import DirectSender, NoDirect, dial
from lamina.rpc_worker.step_runner import Neighbour
from lamina.spec.address import Address
from lamina.spec.errors import LaminaError, WorkerLost
from lamina.spec.step import MAX_RUN_AHEAD, StepDone, StepPlan
from lamina.v1 import step_pb2 as pb
from lamina.wire.channel import connect
from lamina.wire.convert import encode_streamed_tokens
from lamina.wire.direct import encode_tokens, frame_beginning
from lamina.wire.frames import encode_frame, wire_values
from lamina.wire.status import error_from_rpc

_log = logging.getLogger(__name__)
OPEN_DEADLINE_S = 10.0
_METHOD = "/lamina.v1.Worker/Frames"  # not through the stub, which would serialise what is serialised already
_PING_BYTES = 8192
_NUM_PINGS = 5
_MAX_QUEUED = 2 * MAX_RUN_AHEAD
_REASON_S = 0.5  # a peer that ends its direct connection says why on the stream

Lost = Callable[[LaminaError], None]
_Call = grpc.aio.StreamStreamCall[bytes, pb.FramesResponse]


class Link(Neighbour, Protocol):
    """Takes what leaves a stage to a stage of another process."""

    rtt_s: float

    @property
    def kind(self) -> str:
        """The way that frames take: direct or grpc."""

    @property
    def num_bytes(self) -> int:
        """Sent so far."""

    @property
    def queue_depth(self) -> int:
        """Messages that wait to be sent."""

    async def close(self) -> None:
        """End the edge."""


class RemoteLink:
    """An edge to another worker. Built by `open`."""

    def __init__(
        self, channel: grpc.aio.Channel, call: _Call, who: str, on_lost: Lost, wire_dtype: str = "f32"
    ) -> None:
        self._channel = channel
        self._call = call
        self._who = who
        self._on_lost = on_lost
        self._wire_dtype = wire_dtype
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()  # for the stream
        self._num_streamed_bytes = 0
        self._connection: socket.socket | None = None
        self._direct: DirectSender | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._closing: asyncio.Task[None] | None = None  # held, or it might be collected before it has run
        self.rtt_s = 0.0

    @classmethod
    async def open(
        cls, address: Address, opening: pb.FramesOpen, on_lost: Lost, wire_dtype: str, *, dials: bool
    ) -> "RemoteLink":
        """Dial the next stage and measure the edge; a direct connection only if it `dials`.

        Raises WorkerUnreachable, StaleEpoch or what the peer reports.
        """
        who = f"stage {opening.to_stage} at {address}"
        channel = await connect(address)
        call: _Call = channel.stream_stream(
            _METHOD, request_serializer=None, response_deserializer=pb.FramesResponse.FromString
        )()
        link = cls(channel, call, who, on_lost, wire_dtype)
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                await call.write(pb.FramesRequest(open=opening).SerializeToString())
                offered = (await link._expect("opened")).opened
                if not (dials and offered.direct_port and await link._dial(address.host, offered)):
                    link.rtt_s = await link._measure_rtt()
        except BaseException as error:
            await link.close()
            if isinstance(error, grpc.aio.AioRpcError):
                raise error_from_rpc(error, who) from None
            if isinstance(error, TimeoutError):
                raise WorkerLost(f"{who}: the edge was not accepted within {OPEN_DEADLINE_S:g} s") from None
            raise
        link._tasks = [asyncio.create_task(link._write()), asyncio.create_task(link._watch())]
        return link

    @property
    def kind(self) -> str:
        """The way that frames take."""
        return "grpc" if self._direct is None else "direct"

    @property
    def num_bytes(self) -> int:
        """Sent so far."""
        return self._num_streamed_bytes if self._direct is None else self._direct.num_bytes

    @property
    def queue_depth(self) -> int:
        """Messages that wait to be sent."""
        return self._queue.qsize() if self._direct is None else self._direct.queue_depth

    # -- on the compute thread

    def take_hidden(self, plan: StepPlan, hidden: NDArray[np.float32]) -> None:
        """Send a frame of `hidden`, float32 [rows, H], which is not needed after the call."""
        if self._direct is None:
            self._tell_loop(partial(self._queue_message, encode_frame(plan, hidden, self._wire_dtype)))
        else:
            payload = wire_values(hidden, self._wire_dtype).data.cast("B")
            self._direct.send(frame_beginning(plan, hidden, self._wire_dtype, len(payload)), payload)

    def take_done(self, done: StepDone) -> None:
        """Send the tokens of an answer, all that stage 0 needs of it."""
        if self._direct is None:
            self._tell_loop(partial(self._queue_message, encode_streamed_tokens(done)))
        else:
            self._direct.send(encode_tokens(done))

    def _tell_loop(self, fn: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(fn)
        except RuntimeError:
            _log.debug("not sent: the event loop is closed")

    # -- on the loop

    async def close(self) -> None:
        """End the edge: its connection, the stream, the channel."""
        self._closed = True
        self._close_direct()
        self._call.cancel()
        tasks, self._tasks = self._tasks, []  # their tracebacks hold this link, and the channel's connection with it
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()

    def _queue_message(self, message: bytes) -> None:
        """A peer that takes none for MAX_RUN_AHEAD steps is given up."""
        if self._queue.qsize() >= _MAX_QUEUED:
            self._lose(WorkerLost(f"{self._who}: has taken nothing of the last {_MAX_QUEUED} messages"))
        else:
            self._queue.put_nowait(message)

    async def _write(self) -> None:
        try:
            while True:
                message = await self._queue.get()
                await self._call.write(message)
                self._num_streamed_bytes += len(message)
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

    # -- the direct connection

    async def _dial(self, host: str, offered: pb.FramesOpened) -> bool:
        """Whether there is a direct connection now; if not, one line says why, and what to do."""
        address = Address(host, offered.direct_port)
        try:
            connection, self.rtt_s = await dial(address, offered.direct_key)
        except NoDirect as error:
            _log.warning(
                "%s: frames go through gRPC, which takes longer: no direct connection to %s (%s); let this machine"
                " reach that port, which --edge-port of the worker there fixes",
                self._who,
                address,
                error,
            )
            return False
        self._connection = connection
        self._direct = DirectSender(connection, _MAX_QUEUED, self._on_broken)
        self._loop.add_reader(connection, self._on_readable, connection)
        return True

    def _on_readable(self, connection: socket.socket) -> None:
        """Nothing comes back on the connection but its end."""
        try:
            reason = "more than its answers came back" if connection.recv(1, socket.MSG_DONTWAIT) else "hung up on"
        except BlockingIOError:
            return
        except OSError as error:
            reason = error.strerror or str(error)
        self._break_direct(reason)

    def _on_broken(self, reason: str) -> None:
        """From any thread."""
        self._tell_loop(partial(self._break_direct, reason))

    def _break_direct(self, reason: str) -> None:
        """The edge is lost; the stream may know better why."""
        self._close_direct()
        error = WorkerLost(f"{self._who}: the direct connection broke: {reason.lower()}")
        if not self._closed:
            self._loop.call_later(_REASON_S, self._lose, error)

    def _close_direct(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and self._direct is not None:
            self._loop.remove_reader(connection)
            self._direct.close()

    # -- opening

    async def _expect(self, kind: str) -> pb.FramesResponse:
        response = await self._call.read()
        if not isinstance(response, pb.FramesResponse):  # end of stream; the status says why
            code, details = await self._call.code(), await self._call.details()
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), await self._call.trailing_metadata(), details)
        if response.WhichOneof("body") != kind:
            raise WorkerLost(f"{self._who}: answered {response.WhichOneof('body')} where {kind} was due")
        return response

    async def _measure_rtt(self) -> float:
        """Median round trip of a few pings of 8 KiB on the stream, seconds."""
        times = []
        for i in range(_NUM_PINGS):
            start = time.perf_counter()
            ping = pb.Ping(id=i, payload=bytes(_PING_BYTES))
            await self._call.write(pb.FramesRequest(ping=ping).SerializeToString())
            await self._expect("pong")
            times.append(time.perf_counter() - start)
        return statistics.median(times)
