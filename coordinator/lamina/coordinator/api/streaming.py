"""Sending a generation over ASGI: as one document or as server-sent events, until it ends or the client goes away.

Starlette's StreamingResponse is not used: this sends bytes that are ready, watches for the client's going in the same
task group, and pings when nothing was sent for a while.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lamina.coordinator.api.errors import error_body, to_api_error
from lamina.coordinator.api.generation import Delta, Failed, Finished, GenerationEvent
from lamina.coordinator.api.openai_answers import PING, EventWriter, WholeAnswer, failure_event

Events = AsyncGenerator[GenerationEvent]
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON = (b"content-type", b"application/json")


class GenerationResponse(Response):
    """Base of both ways to send. `events` has been started and is closed here, whatever happens."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(send))
        gone = asyncio.create_task(_until_disconnect(receive))
        try:
            await self._wait(work, gone, send)
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            await self._settle(work)

    async def _settle(self, work: "asyncio.Task[None]") -> None:
        try:
            await work
        except asyncio.CancelledError:
            pass
        finally:
            await self._events.aclose()

    async def _wait(self, work: "asyncio.Task[None]", gone: "asyncio.Task[None]", send: Send) -> None:
        """Until either is done."""
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)

    def _work(self, send: Send) -> Coroutine[Any, Any, None]:
        """Send everything."""
        raise NotImplementedError


class WholeResponse(GenerationResponse):
    """One JSON document at the end."""

    def __init__(self, events: Events, answer: WholeAnswer) -> None:
        super().__init__(events)
        self._answer = answer

    async def _work(self, send: Send) -> None:
        status, headers, body = 200, [_JSON], b""
        async for event in self._events:
            if isinstance(event, Failed):
                error = to_api_error(event.error)
                status, body = error.status, error_body(error)
                headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
            elif isinstance(event, Delta | Finished):
                self._answer.add(event)
        body = body or self._answer.body()
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class StreamResponse(GenerationResponse):
    """Server-sent events, a comment when `ping_s` seconds passed without one."""

    def __init__(self, events: Events, writer: EventWriter, ping_s: float) -> None:
        super().__init__(events)
        self._writer = writer
        self._ping_s = ping_s
        self._num_sent = 0  # messages, the start of the response included

    async def _work(self, send: Send) -> None:
        writer = self._writer
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        self._num_sent += 1
        if opening := writer.first():
            await self._send(send, opening)
        async for event in self._events:
            if isinstance(event, Delta):
                await self._send(send, writer.delta(event))
            elif isinstance(event, Finished):
                await self._send(send, writer.end(event))
            elif isinstance(event, Failed):
                await send({"type": "http.response.body", "body": failure_event(to_api_error(event.error))})
                return
        await send({"type": "http.response.body", "body": writer.last()})

    async def _send(self, send: Send, body: bytes) -> None:
        self._num_sent += 1
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _wait(self, work: "asyncio.Task[None]", gone: "asyncio.Task[None]", send: Send) -> None:
        while True:
            num_sent = self._num_sent
            done, _ = await asyncio.wait((work, gone), timeout=self._ping_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if num_sent == self._num_sent > 0:
                await self._send(send, PING)


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do the work, or cancel it and raise ClientDisconnect once the client is gone; its body has been received."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        await working
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
