"""Requests that never end: raw sockets against the real server, with its limits made short."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from lamina.coordinator.api.gate import Gate
from lamina.coordinator.cli import http_protocol
from lamina.coordinator.cli.http_server import HttpServer, address_of, bind
from lamina.spec.address import Address
from lamina.wire import event_loop

HEAD_S, BODY_S, RATE = 0.4, 0.3, 100.0
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> object:
    monkeypatch.setattr(http_protocol, "HEAD_S", HEAD_S)
    monkeypatch.setattr(http_protocol, "BODY_S", BODY_S)
    monkeypatch.setattr(http_protocol, "MIN_BYTES_PER_S", RATE)
    caplog.set_level("WARNING")
    yield
    assert not caplog.records, "what clients do is no news of the server's"


def app() -> FastAPI:
    made = FastAPI()

    @made.post("/")
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    @made.post("/think")
    async def think(request: Request) -> Response:
        await asyncio.sleep(3 * HEAD_S)
        return Response(await request.body())

    return made


@asynccontextmanager
async def connected(api_key: str = "") -> AsyncIterator[Connection]:
    bound = bind(Address("127.0.0.1", 0))
    server = HttpServer(Gate(app(), api_key, 10**6), bound)
    serving = asyncio.create_task(server.run_on_sockets())
    reader, writer = await asyncio.open_connection("127.0.0.1", address_of(bound).port)
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


def run(scene: Callable[[], Coroutine[object, object, None]]) -> None:
    event_loop.run(scene())


async def answer(reader: asyncio.StreamReader) -> bytes:
    """One whole answer of a connection that stays open."""
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


async def drip(writer: asyncio.StreamWriter, data: bytes, pause_s: float) -> None:
    """One byte at a time, until the other side has had enough."""
    try:
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(pause_s)
    except ConnectionError:
        return


async def check_late(reader: asyncio.StreamReader, part: str, least_s: float, most_s: float) -> None:
    """408 in OpenAI's shape and the end of the connection, between these times from now."""
    start_s = time.monotonic()
    async with asyncio.timeout(10):
        got = await reader.read()
    assert got.startswith(b"HTTP/1.1 408 "), got
    assert b"connection: close" in got.lower()
    assert f"request's {part} did not arrive in time".encode() in got
    assert b'"code": "request_timeout"' in got
    assert least_s <= time.monotonic() - start_s < most_s


@pytest.mark.parametrize("dripping", [False, True])
def test_a_head_that_never_ends(dripping: bool) -> None:
    """Bytes that keep coming do not put the end off."""

    async def scene() -> None:
        async with connected() as (reader, writer):
            writer.write(b"GET / HT")
            dripped = asyncio.create_task(drip(writer, b"TP/1.1\r\nX: " + b"y" * 400, 0.02 if dripping else 60))
            await check_late(reader, "head", HEAD_S - 0.1, HEAD_S + 2)
            dripped.cancel()

    run(scene)


def test_a_connection_without_a_byte_is_closed_without_a_word() -> None:
    """Browsers connect in advance; an answer to nothing would be taken for that to their next request."""

    async def scene() -> None:
        async with connected() as (reader, _):
            async with asyncio.timeout(HEAD_S + 2):
                assert await reader.read() == b""

    run(scene)


def test_a_body_that_falls_silent() -> None:
    async def scene() -> None:
        async with connected() as (reader, writer):
            writer.write(HEAD + b"half")
            await check_late(reader, "body", BODY_S - 0.1, BODY_S + 2)

    run(scene)


def test_a_body_that_drips_forever_is_too_slow_as_a_whole() -> None:
    """Fifty bytes a second, of the hundred that are the least, are done for after twice the time of a silent one."""

    async def scene() -> None:
        async with connected() as (reader, writer):
            writer.write(HEAD.replace(b"10", b"500"))
            dripped = asyncio.create_task(drip(writer, b"x" * 500, 1 / (RATE / 2)))
            await check_late(reader, "body", 1.2 * BODY_S, 2 * BODY_S + 2)
            dripped.cancel()

    run(scene)


def test_a_slow_body_that_keeps_coming_is_taken() -> None:
    """Pauses shorter than the limit, longer than it together."""

    async def scene() -> None:
        async with connected() as (reader, writer):
            writer.write(HEAD.replace(b"10", b"240"))
            for _ in range(4):
                writer.write(b"x" * 60)
                await asyncio.sleep(0.6 * BODY_S)
            assert (await answer(reader)).endswith(b"x" * 240)

    run(scene)


def test_what_a_refused_request_has_still_to_send_is_waited_for_no_longer() -> None:
    """401 is answered from the head; the rest of the body must not hold the connection."""

    async def scene() -> None:
        async with connected("secret") as (reader, writer):
            writer.write(HEAD.replace(b"10", b"500"))
            assert (await answer(reader)).startswith(b"HTTP/1.1 401 ")
            dripped = asyncio.create_task(drip(writer, b"x" * 500, 1 / (RATE / 2)))
            async with asyncio.timeout(2 * BODY_S + 2):
                with suppress(ConnectionResetError):  # the end as one sees it who goes on sending
                    assert await reader.read() == b""
            dripped.cancel()

    run(scene)


def test_the_application_may_take_its_time_and_the_connection_is_kept() -> None:
    """The limits are the client's: an answer that takes longer than both comes, and so does the next, head in two."""

    async def scene() -> None:
        async with connected() as (reader, writer):
            for path in (b"/think", b"/"):
                writer.write(b"POST " + path)
                await asyncio.sleep(0.1)
                writer.write(HEAD.removeprefix(b"POST /"))
                writer.write(b"0123456789")
                assert (await answer(reader)).endswith(b"\r\n\r\n0123456789")
            writer.write(b"POST / ")  # and a head on a connection that was kept has its limit as well
            await check_late(reader, "head", HEAD_S - 0.1, HEAD_S + 2)

    run(scene)


def test_a_second_head_that_came_with_the_first_request_has_its_time_as_well() -> None:
    async def scene() -> None:
        async with connected() as (reader, writer):
            writer.write(HEAD + b"0123456789" + b"GET / HT")
            assert (await answer(reader)).endswith(b"0123456789")
            await check_late(reader, "head", HEAD_S - 0.1, HEAD_S + 2)

    run(scene)


@pytest.mark.parametrize("first", [HEAD + b"0123456789", b"POST /think" + HEAD.removeprefix(b"POST /") + b"0123456789"])
def test_a_second_body_that_came_with_the_first_request_has_its_time_as_well(first: bytes) -> None:
    """Its head is read when the first answer is out, and nothing that the client sends makes its time begin."""

    async def scene() -> None:
        async with connected() as (reader, writer):
            writer.write(first + HEAD + b"half")
            assert (await answer(reader)).endswith(b"0123456789")
            await check_late(reader, "body", BODY_S - 0.1, BODY_S + 2)

    run(scene)


def test_an_application_that_does_not_read_is_not_the_clients_fault() -> None:
    """More than uvicorn buffers, sent at once, read late."""

    async def scene() -> None:
        body = b"x" * 300_000
        async with connected() as (reader, writer):
            writer.write(b"POST /think HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
            writer.write(body)
            assert (await answer(reader)).endswith(body)

    run(scene)
