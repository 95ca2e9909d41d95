"""The HTTP server's end: what is being sent may be finished, and a client that reads nothing hinders nobody."""

import asyncio
import json
import logging
import resource
import socket
from contextlib import suppress

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from lamina.coordinator.api.gate import Gate
from lamina.coordinator.cli import http_protocol, http_server
from lamina.coordinator.cli.http_server import HttpServer, address_of, allow_open_files, bind
from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig


class Endless(Response):
    """Sends until the client is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.create_task(_until_gone(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def test_a_name_listens_on_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` is two addresses where IPv6 is on, and clients may try either."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    found += [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("127.0.0.2", "192.0.2.1")]
    monkeypatch.setattr(http_server.socket, "getaddrinfo", lambda *_, **__: found)
    bound = bind(Address("localhost", 0))
    try:
        assert [one.getsockname()[0] for one in bound] == ["127.0.0.1", "127.0.0.2"]  # the third is not here
        assert {one.getsockname()[1] for one in bound} == {address_of(bound).port}
        for one in bound:
            with socket.socket() as client:
                client.connect(one.getsockname())
        monkeypatch.setattr(http_server.socket, "getaddrinfo", lambda *_, **__: found[:1])
        with pytest.raises(InvalidConfig, match="choose another --port"):
            bind(address_of(bound))
    finally:
        for one in bound:
            one.close()


def test_a_client_that_does_not_read_is_dropped_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "_GRACE_S", 0.2)
    app = FastAPI()

    @app.get("/")
    async def endless(request: Request) -> Response:
        return Endless()

    async def scene() -> None:
        bound = bind(Address("127.0.0.1", 0))
        server = HttpServer(app, bound)
        serving = asyncio.create_task(server.run_on_sockets())
        with socket.create_connection((address_of(bound).host, address_of(bound).port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.3)  # every buffer on the way is full
            server.should_exit = True
            async with asyncio.timeout(5):
                await serving

    with caplog.at_level(logging.WARNING):
        asyncio.run(scene())
    assert not caplog.records


def test_a_client_that_leaves_within_its_body_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    ended = asyncio.Event()

    @app.post("/")
    async def read(request: Request) -> Response:
        try:
            return Response(await request.body())
        finally:
            ended.set()

    async def leave() -> None:
        bound = bind(Address("127.0.0.1", 0))
        server = HttpServer(Gate(app, "", 100), bound)
        serving = asyncio.create_task(server.run_on_sockets())
        _, writer = await asyncio.open_connection("127.0.0.1", address_of(bound).port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
        await writer.drain()
        writer.close()
        await asyncio.wait_for(ended.wait(), 10)
        server.should_exit = True
        await serving

    caplog.set_level(logging.WARNING)
    asyncio.run(leave())
    assert not caplog.records


def test_connections_beyond_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """503 in OpenAI's shape, but health checks get through; what is far beyond is closed at once. One line says so."""
    monkeypatch.setattr(http_protocol, "SPARE_CONNECTIONS", 2)
    caplog.set_level(logging.WARNING)
    app = FastAPI()

    @app.get("/v1/models")
    @app.get("/health/live")
    def ok() -> str:
        return "ok"

    async def scene() -> None:
        bound = bind(Address("127.0.0.1", 0))
        server = HttpServer(app, bound, max_connections=2)
        serving = asyncio.create_task(server.run_on_sockets())

        async def get(path: str, *, keep: bool = False) -> tuple[bytes, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", address_of(bound).port)
            end = "keep-alive" if keep else "close"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: {end}\r\n\r\n".encode())
            async with asyncio.timeout(10):
                return await (reader.readuntil(b'"ok"') if keep else reader.read()), writer

        kept = [(await get("/v1/models", keep=True))[1] for _ in range(2)]
        refused, _ = await get("/v1/models")
        head, _, body = refused.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 2" in head.lower()
        assert json.loads(body)["error"] == {
            "message": "2 connections are open, which is the limit here; try again later",
            "type": "service_unavailable_error",
            "param": None,
            "code": "too_many_connections",
        }
        kept += [(await get("/health/live", keep=True))[1] for _ in range(2)]
        with suppress(ConnectionError):
            assert (await get("/health/live"))[0] == b""
        for writer in kept:
            writer.close()
        async with asyncio.timeout(10):
            while server.server_state.connections:
                await asyncio.sleep(0.01)
        assert (await get("/v1/models"))[0].startswith(b"HTTP/1.1 200 ")
        server.should_exit = True
        await serving

    asyncio.run(scene())
    assert caplog.messages == ["more than 2 connections are open (--max-connections); further ones get 503"]


def test_as_many_files_may_be_open_as_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.update(now=wanted))
    for num_connections, soft in ((500, 1024), (1000, 1200), (10_000, 4096)):
        assert not caplog.messages
        allow_open_files(num_connections)
        assert limits["now"] == (soft, 4096)
    assert caplog.messages == [
        "this process may open 4096 files, too few for --max-connections 10000: raise `ulimit -n`"
    ]
