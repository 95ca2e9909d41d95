"""Who may connect for a worker's edges: keys, deadlines, floods, addresses."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from lamina.rpc_worker import direct_listener
from lamina.rpc_worker.direct_listener import DirectListener
from lamina.rpc_worker.direct_sender import dial
from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig
from lamina.wire.direct import KEY_BYTES, MAGIC, preface
from support.edges import Taker, hangs_up, listening
from support.loopback import run_scene


async def is_refused(listener: DirectListener, said: bytes) -> bool:
    def knock() -> bool:
        with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as connection:
            connection.sendall(said)
            return hangs_up(connection)

    return await asyncio.to_thread(knock)


def test_a_key_is_good_once_and_only_for_its_edge(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with listening() as listener:
            with listener.offer(Taker()) as offer, listener.offer(Taker()) as other:
                assert len({offer.key, other.key}) == 2
                assert await is_refused(listener, preface(bytes(KEY_BYTES)))
                assert await is_refused(listener, MAGIC + b"\x63" + offer.key)  # another version
                assert await is_refused(listener, b"GET / HTTP/1.1\r\nHost: somewhere.example.org\r\n\r\n")
                connection, _ = await dial(Address("127.0.0.1", offer.port), offer.key)
                assert await is_refused(listener, preface(offer.key))
                connection.close()
            assert await is_refused(listener, preface(other.key))

    run_scene(scene)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "a connection there does not know the key of an edge" in warnings[0]


def test_those_who_say_nothing_are_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte a second as well: the whole preface has one deadline."""
    monkeypatch.setattr(direct_listener, "_PREFACE_DEADLINE_S", 0.1)

    async def scene() -> None:
        async with listening() as listener:
            for said in (b"", preface(b"")):
                assert await is_refused(listener, said)

    run_scene(scene)


@pytest.mark.parametrize("pause_s", [0.001, None], ids=["one by one", "all at once"])
def test_a_flood_of_strangers_is_bounded_and_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch, pause_s: float | None
) -> None:
    monkeypatch.setattr(direct_listener, "_MAX_UNDECIDED", 4)

    async def scene() -> None:
        async with listening() as listener:
            strangers = []
            for _ in range(40):
                strangers.append(socket.create_connection(("127.0.0.1", listener.port)))
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
                    assert len(listener._undecided) <= 4
            for stranger in strangers[:36]:
                assert await asyncio.to_thread(hangs_up, stranger)
            assert len(listener._undecided) == 4
            with listener.offer(Taker()) as offer:
                connection, _ = await dial(Address("127.0.0.1", offer.port), offer.key)
                connection.close()
            for stranger in strangers:
                stranger.close()

    run_scene(scene)


def test_a_port_in_use_is_named() -> None:
    async def scene() -> None:
        async with listening() as listener:
            with pytest.raises(
                InvalidConfig, match=rf"127.0.0.1:{listener.port} for direct connections: .*--edge-port"
            ):
                DirectListener.open(Address("127.0.0.1", listener.port))

    run_scene(scene)


def test_it_listens_wherever_the_host_is() -> None:
    """`localhost` may be two addresses: both have the same port. [::] is every address, where there is IPv6."""

    async def reachable(host: str, at: str) -> bool:
        try:
            listener = DirectListener.open(Address(host, 0))
        except InvalidConfig:
            return False
        try:
            with listener.offer(Taker()) as offer:
                connection, _ = await dial(Address(at, offer.port), offer.key)
                connection.close()
            return True
        finally:
            await listener.close()

    async def scene() -> None:
        found: Callable[[str, str], Any] = reachable
        assert await found("localhost", "127.0.0.1")
        assert await found("0.0.0.0", "127.0.0.1")
        if socket.has_ipv6 and await found("::1", "::1"):
            assert await found("::", "127.0.0.1")
            assert await found("localhost", "localhost")

    run_scene(scene)
