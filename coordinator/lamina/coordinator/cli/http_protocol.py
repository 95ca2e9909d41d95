"""uvicorn's HTTP/1.1 protocol with limits to the time that a request may take to arrive, and to open connections.

A head has HEAD_S from the connection's begin, or from its first byte on a connection that is kept. A body may be silent
for BODY_S and slow, for longer than that, only above MIN_BYTES_PER_S. Who is later is answered 408 and hung up on.
Time that the application takes, to read or to answer, does not count.

Connections beyond the limit get 503, but for health checks: as many as SPARE_CONNECTIONS at a time, further ones are
closed at once.
"""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lamina.coordinator.api.errors import ApiError, error_body
from lamina.coordinator.api.gate import Full

HEAD_S = 30.0
BODY_S = 60.0
MIN_BYTES_PER_S = 500.0
SPARE_CONNECTIONS = 64
_TELL_EVERY_S = 60.0
_log = logging.getLogger(__name__)
_LINGER_S = 1.0  # bytes that come after the answer would reset the connection, and the client might not see it


class ConnectionLimit:
    """How many connections a server serves; says in its log that more came, once a minute. Owned by the loop."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._told_s: float | None = None

    def tell(self, now: float) -> None:
        """A connection came that is one too many."""
        if self._told_s is None or now - self._told_s > _TELL_EVERY_S:
            self._told_s = now
            _log.warning(
                "more than %d connections are open (--max-connections); further ones get 503", self.max_connections
            )


class LimitedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, limit: ConnectionLimit, **options: Any) -> None:
        super().__init__(**options)
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None
        self._is_body = False  # what the timer waits for
        self._is_late = False  # and was told so: what else it sends is dropped
        self._body_end_s = 0.0  # when the body is too slow as a whole; each byte puts it off

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came; its head is awaited."""
        super().connection_made(transport)
        num_beyond = len(self.connections) - self._limit.max_connections
        if num_beyond > 0:
            self._limit.tell(self.loop.time())
        if num_beyond > SPARE_CONNECTIONS:
            transport.abort()
            return
        if num_beyond > 0:
            self.app = Full(self.app, self._limit.max_connections)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """A part of a head or body."""
        if self._is_late:
            return
        super().data_received(data)
        if self.conn.their_state is h11.SEND_BODY:
            self._await_body(len(data))
        elif self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._timer is None:
            self._await_head()

    def on_response_complete(self) -> None:
        """The answer is out. What has come of the next request meanwhile begins its time; before that uvicorn waits."""
        super().on_response_complete()
        if self._timer is not None:
            return
        if self.conn.their_state is h11.SEND_BODY:  # the head was whole, and was read just now
            self._await_body(0)
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there to wait for."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_S, self._hang_up)

    def _await_body(self, num_bytes: int) -> None:
        now = self.loop.time()
        if not self._is_body:
            self._stop_waiting()
            self._body_end_s = now + BODY_S
        elif self._timer is not None:
            self._timer.cancel()
        self._is_body = True
        self._body_end_s += num_bytes / MIN_BYTES_PER_S
        self._timer = self.loop.call_at(min(now + BODY_S, self._body_end_s), self._hang_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._is_body = None, False

    def _hang_up(self) -> None:
        """The client is late. Where the application has not read what is there, it is not the client's fault."""
        if self.transport.is_closing():
            return
        if self._is_late:
            self.transport.close()
            return
        if self._is_body and self.flow.read_paused:
            self._timer = self.loop.call_later(BODY_S, self._hang_up)
            return
        has_begun = self._is_body or bool(self.conn.trailing_data[0])  # a connection made in advance gets no answer
        may_answer = has_begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if may_answer:
            self._answer_late()
        else:
            self.transport.close()

    def _answer_late(self) -> None:
        part = "body" if self._is_body else "head"
        body = error_body(ApiError(408, f"the request's {part} did not arrive in time", code="request_timeout"))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (h11.Response(status_code=408, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self._is_late = True
        self._timer = self.loop.call_later(_LINGER_S, self._hang_up)
