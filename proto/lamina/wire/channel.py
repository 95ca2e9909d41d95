"""Channel and server options, connecting with a deadline. Plaintext for now; TLS joins here."""

import asyncio
import socket
from contextlib import closing

import grpc

from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig, WorkerUnreachable
from lamina.wire.frames import MAX_PAYLOAD_BYTES

CONNECT_DEADLINE_S = 5.0
MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + 64 * 2**10  # every message is capped; around a payload there is little

Options = list[tuple[str, int | str]]


def channel_options() -> Options:
    """Options of a client channel, each for a reason."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A suspended or unplugged peer is noticed without traffic, in 9 s (P-27). What counts for an unanswered ping is
        # ping_timeout, a minute by default, whatever keepalive_timeout says.
        ("grpc.keepalive_time_ms", 4_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_http_proxy", 0),  # a proxy from the environment must not sit between two workers
        ("grpc.use_local_subchannel_pool", 1),  # a link of its own, not shared with another placement's
    ]


def server_options() -> Options:
    """Options of a server."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),  # a second worker on the same port must fail, not share it
        ("grpc.http2.min_ping_interval_without_data_ms", 2_000),  # less than the clients' keepalive
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_concurrent_streams", 256),
    ]


def bind(server: grpc.aio.Server, address: Address, option: str) -> Address:
    """Let `server` listen; the result names the port that was really taken. `option` is the one that chose `address`.

    Raises InvalidConfig. The port is tried before gRPC is asked, which writes a line of its own where it fails.
    """
    try:
        _try_port(address)
        port: int = server.add_insecure_port(str(address))
    except (OSError, RuntimeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "gRPC cannot take this address"
        raise InvalidConfig(f"cannot listen on {address}: {why}; choose another with {option}") from None
    return Address(address.host, port)


def _try_port(address: Address) -> None:
    """Raise OSError if none of the addresses that the host stands for can be bound."""
    refused: OSError | None = None
    for family, kind, protocol, _, where in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        try:
            with closing(socket.socket(family, kind, protocol)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                return
        except OSError as error:
            refused = error
    if refused is not None:
        raise refused


async def connect(address: Address, *, deadline_s: float = CONNECT_DEADLINE_S) -> grpc.aio.Channel:
    """A connected channel. Raises WorkerUnreachable after the deadline, with what to check."""
    channel = grpc.aio.insecure_channel(str(address), options=channel_options())
    try:
        async with asyncio.timeout(deadline_s):
            await channel.channel_ready()
    except TimeoutError:
        await channel.close()
        raise WorkerUnreachable(
            f"worker {address}: no connection within {deadline_s:g} s; is `rpc-worker --listen` running there,"
            " and does a firewall or a loopback-only listener block it?"
        ) from None
    except BaseException:
        await channel.close()
        raise
    return channel
