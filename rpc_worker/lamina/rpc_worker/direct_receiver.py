"""The receiving end of an edge's direct connection: it reads frames and answers straight into the stage.

A thread of its own blocks in the socket, so that a message waits for no loop; what comes it checks before anything is
allocated for it, and brings to the stage, which any thread may do. Between the steps of a sequence it lends the
connection to the compute thread, which spins for the next message instead of being woken, if that does so at all: one
of the two reads at a time, and only the thread of its own waits, refuses, and ends the connection. It also looks after
what it has lent, should the compute thread be busy with something long.

The gRPC stream that offered the connection owns it, and tells the sender why it ended.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lamina.rpc_worker.device_thread import Feed
from lamina.spec.errors import InvalidPlan, LaminaError, WorkerLost
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.wire.direct import (
    BEGINNING_BYTES,
    FRAME,
    PING,
    PONG,
    TOKENS,
    encode_ping,
    read_beginning,
    read_frame_head,
    read_tokens,
)
from lamina.wire.frames import Frame

_log = logging.getLogger(__name__)
_NOTHING: NDArray[np.uint8] = np.empty(0, np.uint8)
_UNREAD_S = 1.0  # far less than what the sender's silence lasts (`wire.direct`)
_BUFFER_BYTES = 64 * 2**10  # a message of one step of a few tokens comes with one call


class Taker(Protocol):
    """The stage that the edge leads to, for any thread. Each but `lend` raises LaminaError for what cannot be taken."""

    def expect_frame(self, frame: Frame) -> None:
        """Whether a frame may come whose payload has not been read."""

    def take_frame(self, frame: Frame) -> None:
        """A frame whole."""

    def take_tokens(self, epoch: Epoch, step: StepId, tokens: Sequence[tuple[SeqId, int, int]]) -> None:
        """On stage 0: what a step has sampled, (sequence, position, token) each."""

    def lend(self, feed: Feed) -> bool:
        """Have the compute thread read from now on, until it hands the feed back; False if it never does that."""


class DirectReceiver:
    """One connection; `begin` it, `close` it. `on_end` hears on the loop why it ended, unless it was closed.

    A connection that has brought nothing but pings is not in use: the sender may have given it up while it was opened,
    and its end is no news.
    """

    def __init__(self, taker: Taker, on_end: Callable[[LaminaError], None]) -> None:
        self._taker = taker
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._inlet: Inlet | None = None
        self._lock = threading.Lock()  # the socket is closed by its thread alone, and not shut down after that
        self._is_closed = False

    def begin(self, connection: socket.socket) -> None:
        """Read from it until it ends or is closed."""
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            self._inlet = Inlet(connection, self._taker)
        threading.Thread(target=self._run, args=(self._inlet,), name="edge-reader", daemon=True).start()

    def close(self) -> None:
        """End the connection, if there is one, and the thread; nothing is taken from it any more."""
        with self._lock:
            self._is_closed = True
            if self._inlet is not None:
                with suppress(OSError):  # it may be gone already
                    self._inlet.connection.shutdown(socket.SHUT_RDWR)
                self._inlet.hand_back()  # should the compute thread have ended with it

    def _run(self, inlet: "Inlet") -> None:
        try:
            while not self._is_closed:
                inlet.receive()
                if inlet.is_used and self._taker.lend(inlet):
                    inlet.wait_for_return()
        except LaminaError as error:
            self._end(error)
        except (OSError, EOFError) as error:
            if inlet.is_used:
                reason = (isinstance(error, OSError) and error.strerror) or str(error)
                self._end(WorkerLost(f"the direct connection broke: {reason.lower()}"))
        except Exception as error:
            _log.exception("reading from a direct connection failed")
            self._end(LaminaError(f"{type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._inlet = None
                inlet.connection.close()

    def _end(self, error: LaminaError) -> None:
        if not self._is_closed:
            with suppress(RuntimeError):  # the loop is closed: the worker is gone
                self._loop.call_soon_threadsafe(self._on_end, error)


class Inlet:
    """What comes from a connection, in whatever pieces, as messages for the stage. A `Feed` that its thread may lend.

    Raises OSError, EOFError when it ends, LaminaError for what cannot be taken, and whatever the stage raises by fault.
    """

    def __init__(self, connection: socket.socket, taker: Taker) -> None:
        self.connection = connection
        self.is_used = False  # by anything but pings
        self._taker = taker
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # of what was received and not read
        self._frame: Frame | None = None  # whose payload is being received
        self._payload = _NOTHING
        self._num_held = 0  # of the payload
        self._failure: Exception | None = None  # to be raised by the thread of its own
        self._reading = threading.Lock()  # while it is lent, since its own thread looks after it
        self._returned = threading.Semaphore(0)

    # -- lent to the compute thread

    def fileno(self) -> int:
        """Of the connection."""
        return self.connection.fileno()

    def read(self) -> bool:
        """Take what is there. False, once there is something to be raised."""
        try:
            self._receive_what_is_there()
        except Exception as error:
            self._failure = error
            return False
        return True

    def _receive_what_is_there(self) -> bool:
        """Whether there was anything."""
        with self._reading:
            try:
                self.receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return True

    def hand_back(self) -> None:
        """To the thread that waits for it."""
        self._returned.release()

    def wait_for_return(self) -> None:
        """Until the compute thread hands the feed back. Raises what came to it there.

        A step may take long, with kernels to be compiled; a sender whose messages nobody takes would give up meanwhile.
        """
        while not self._returned.acquire(timeout=_UNREAD_S):
            while self._receive_what_is_there():
                pass
        if self._failure is not None:
            raise self._failure

    # -- by whichever thread has it

    def receive(self, flags: int = 0) -> None:
        """Receive once, waiting for something unless the flags say otherwise, and take the messages that are whole."""
        if self._frame is not None:
            rest = self._payload.data[self._num_held :]
            self._num_held += self._receive_into(rest, flags or socket.MSG_WAITALL)
            self._take_frame_if_whole(self._frame)
            return
        if self._end == len(self._buffer):
            self._make_room(0)
        self._end += self._receive_into(self._buffer[self._end :], flags)
        while self._frame is None and self._take_message():
            pass

    def _receive_into(self, target: memoryview, flags: int) -> int:
        received = self.connection.recv_into(target, 0, flags)
        if not received:
            raise EOFError("it was hung up on")
        return received

    def _take_message(self) -> bool:
        """Whether there was one, if a frame but for its payload."""
        start, num_held = self._start, self._end - self._start
        if num_held < BEGINNING_BYTES:
            return False
        kind, head_bytes, payload_bytes = read_beginning(self._buffer, start)
        num_bytes = BEGINNING_BYTES + head_bytes + (0 if kind == FRAME else payload_bytes)
        if num_held < num_bytes:
            self._make_room(num_bytes)
            return False
        self._advance(num_bytes)
        begin, end = start + BEGINNING_BYTES, start + num_bytes
        if kind == FRAME:
            self.is_used = True
            self._begin_frame(read_frame_head(self._buffer, begin, payload_bytes))
        elif kind == TOKENS:
            self.is_used = True
            self._taker.take_tokens(*read_tokens(self._buffer[begin:end]))
        elif kind == PING and not self.is_used:  # later, an answer that nobody reads would stop the compute thread
            self.connection.sendall(encode_ping(self._buffer[begin:end], PONG))
        else:
            raise InvalidPlan(f"a {'ping' if kind == PING else 'pong'} is out of order on a direct connection")
        return True

    def _begin_frame(self, frame: Frame) -> None:
        """Make room for a payload where it stays, and put there what of it has come along with the head."""
        held = min(frame.num_bytes, self._end - self._start)
        if held < frame.num_bytes:  # before anything is allocated for what may never come
            self._taker.expect_frame(frame)
        self._frame, self._payload, self._num_held = frame, np.empty(frame.num_bytes, np.uint8), held
        if held:
            self._payload.data[:held] = self._buffer[self._start : self._start + held]
            self._advance(held)
        self._take_frame_if_whole(frame)

    def _take_frame_if_whole(self, frame: Frame) -> None:
        if self._num_held == frame.num_bytes:
            payload, self._frame, self._payload = self._payload, None, _NOTHING
            self._taker.take_frame(Frame(*frame[:-1], payload))

    def _advance(self, num_bytes: int) -> None:
        self._start += num_bytes
        if self._start == self._end:
            self._start = self._end = 0

    def _make_room(self, num_bytes: int) -> None:
        """For a message of so many bytes, the first of what is held: at the start, in a larger buffer if need be."""
        held = self._buffer[self._start : self._end].tobytes()
        if num_bytes > len(self._buffer):
            self._buffer = memoryview(bytearray(num_bytes))
        self._buffer[: len(held)] = held
        self._start, self._end = 0, len(held)
