"""The receiving end of an edge's direct connection: a thread that reads frames and answers straight into the stage.

It blocks in the socket, so that a message waits for no loop; what comes it checks before anything is allocated for it,
and brings to the stage, which any thread may do. The gRPC stream that offered the connection owns it, and tells the
sender why it ended.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from lamina.spec.errors import InvalidPlan, LaminaError, WorkerLost
from lamina.v1 import step_pb2 as pb
from lamina.wire.direct import LENGTHS_BYTES, MAX_PING_BYTES, beginning, read_lengths
from lamina.wire.frames import Frame, read_frame

_log = logging.getLogger(__name__)
_BUFFER_BYTES = 64 * 2**10  # a message of one step of a few tokens comes with one call


class Taker(Protocol):
    """The stage that the edge leads to, for any thread. Each raises LaminaError for what cannot be taken."""

    def expect_frame(self, frame: Frame) -> None:
        """Whether a frame may come whose payload has not been read."""

    def take_frame(self, frame: Frame) -> None:
        """A frame whole."""

    def take_answer(self, message: pb.StepDone) -> None:
        """On stage 0: what the last stage has sampled."""


class DirectReceiver:
    """One connection; `begin` it, `close` it. `on_end` hears on the loop why it ended, unless it was closed.

    A connection that has brought nothing but pings is not in use: the sender may have given it up while it was opened,
    and its end is no news.
    """

    def __init__(self, taker: Taker, on_end: Callable[[LaminaError], None]) -> None:
        self._taker = taker
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()  # the socket is closed by its thread alone, and not shut down after that
        self._is_closed = False
        self._is_used = False

    def begin(self, connection: socket.socket) -> None:
        """Read from it until it ends or is closed."""
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            self._connection = connection
        threading.Thread(target=self._run, args=(connection,), name="edge-reader", daemon=True).start()

    def close(self) -> None:
        """End the connection, if there is one, and the thread; nothing is taken from it any more."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                with suppress(OSError):  # it may be gone already
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _run(self, connection: socket.socket) -> None:
        try:
            self._read(connection, _Inlet(connection))
        except LaminaError as error:
            self._end(error)
        except (OSError, EOFError) as error:
            if self._is_used:
                self._end(WorkerLost(f"the direct connection broke: {error}"))
        except Exception as error:
            _log.exception("reading from a direct connection failed")
            self._end(LaminaError(f"{type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._connection = None
                connection.close()

    def _end(self, error: LaminaError) -> None:
        if not self._is_closed:
            with suppress(RuntimeError):  # the loop is closed: the worker is gone
                self._loop.call_soon_threadsafe(self._on_end, error)

    def _read(self, connection: socket.socket, inlet: "_Inlet") -> None:
        while not self._is_closed:
            num_head, num_payload = read_lengths(inlet.read(LENGTHS_BYTES))
            try:
                message = pb.FramesRequest.FromString(inlet.read(num_head))
            except DecodeError as error:
                raise InvalidPlan(f"a message cannot be parsed: {error}") from None
            kind = message.WhichOneof("body")
            if kind == "ping" and num_payload <= MAX_PING_BYTES:
                head = pb.FramesResponse(pong=message.ping).SerializeToString()
                connection.sendall(beginning(head, num_payload) + inlet.read(num_payload))
                continue
            self._is_used = True
            if kind == "frame" and not message.frame.payload:
                frame = read_frame(message.frame, num_payload)
                self._taker.expect_frame(frame)
                self._taker.take_frame(frame._replace(payload=inlet.read_payload(num_payload)))
            elif kind == "done" and not num_payload:
                self._taker.take_answer(message.done)
            else:
                raise InvalidPlan(f"message {kind!r} is out of order on a direct connection")


class _Inlet:
    """What comes from a connection, in pieces of a wanted size. Raises OSError, and EOFError when it ends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # of what was received and not read

    def read(self, num_bytes: int) -> bytes:
        """So many bytes, copied."""
        if num_bytes > _BUFFER_BYTES:
            return self.read_payload(num_bytes).tobytes()
        if num_bytes > _BUFFER_BYTES - self._start:
            held = self._end - self._start
            self._buffer[:held] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, held
        while self._end - self._start < num_bytes:
            self._end += self._receive(self._buffer[self._end :])
        piece = bytes(self._buffer[self._start : self._start + num_bytes])
        self._advance(num_bytes)
        return piece

    def read_payload(self, num_bytes: int) -> NDArray[np.uint8]:
        """So many bytes, uint8 [bytes], received where they stay but for what has come already."""
        values = np.empty(num_bytes, np.uint8)
        target = values.data
        held = min(num_bytes, self._end - self._start)
        target[:held] = self._buffer[self._start : self._start + held]
        self._advance(held)
        while held < num_bytes:
            held += self._receive(target[held:], socket.MSG_WAITALL)
        return values

    def _advance(self, num_bytes: int) -> None:
        self._start += num_bytes
        if self._start == self._end:
            self._start = self._end = 0

    def _receive(self, target: memoryview, flags: int = 0) -> int:
        received = self._connection.recv_into(target, 0, flags)
        if not received:
            raise EOFError("it was hung up on")
        return received
