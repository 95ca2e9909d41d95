"""Workers that come by themselves (`rpc-worker --join`): who is there, where, and since when nobody heard of them.

`Membership` is a plain state machine with time as a parameter; `serve_membership` puts it behind gRPC.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc

from lamina.spec.address import Address, parse_address
from lamina.spec.errors import InvalidConfig, LaminaError
from lamina.spec.ids import WorkerName
from lamina.v1 import cluster_pb2 as cpb
from lamina.v1 import cluster_pb2_grpc
from lamina.wire.channel import bind, server_options
from lamina.wire.profiles import version_from_message, version_to_message
from lamina.wire.status import abort
from lamina.wire.version import check_peer, own_version

HEARTBEAT_S = 1.0
LOST_AFTER_S = 4.0  # a dead worker is noticed in less than 5 s
MAX_MEMBERS = 1024
_WILDCARDS = ("0.0.0.0", "::")

_log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that registered."""

    name: WorkerName
    address: Address
    joined_s: float
    seen_s: float


class Membership:
    """Who is there. Owned by the event loop."""

    def __init__(self) -> None:
        self._members: dict[WorkerName, Member] = {}

    def register(self, name: WorkerName, address: Address, now: float) -> None:
        """A worker came, or came back. Raises InvalidConfig if a living worker elsewhere has that name."""
        known = self._members.get(name)
        if known is not None and known.address != address and now - known.seen_s < LOST_AFTER_S:
            raise InvalidConfig(f"a worker called {name!r} is there already, at {known.address}; choose another --name")
        if known is None and len(self._members) >= MAX_MEMBERS:
            raise InvalidConfig(f"{MAX_MEMBERS} workers have joined, no more are taken")
        self._members[name] = Member(name, address, known.joined_s if known else now, now)

    def heartbeat(self, name: WorkerName, now: float) -> bool:
        """A worker is still there; False if it must register again."""
        known = self._members.get(name)
        if known is None:
            return False
        self._members[name] = Member(known.name, known.address, known.joined_s, now)
        return True

    def leave(self, name: WorkerName) -> None:
        """A worker went."""
        self._members.pop(name, None)

    def present(self, now: float) -> tuple[Member, ...]:
        """Those heard of lately, in the order they came; the others are forgotten."""
        self._members = {n: m for n, m in self._members.items() if now - m.seen_s < LOST_AFTER_S}
        return tuple(sorted(self._members.values(), key=lambda member: (member.joined_s, member.name)))


class _ClusterService(cluster_pb2_grpc.ClusterServicer):
    def __init__(self, membership: Membership, on_change: Callable[[], None]) -> None:
        self._membership = membership
        self._on_change = on_change

    async def Register(self, request: cpb.RegisterRequest, context: Context) -> cpb.RegisterResponse:  # noqa: N802
        try:
            check_peer(version_from_message(request.version), f"worker {request.worker}")
            address = _address_of(parse_address(request.address), _peer_host(context.peer()))
            self._membership.register(WorkerName(request.worker), address, time.monotonic())
        except LaminaError as error:
            _log.warning("worker %s may not join: %s", request.worker, error)
            await abort(context, error)
        _log.info("worker %s joined from %s", request.worker, address)
        self._on_change()
        return cpb.RegisterResponse(version=version_to_message(own_version()), heartbeat_s=HEARTBEAT_S)

    async def Heartbeat(self, request: cpb.HeartbeatRequest, context: Context) -> cpb.HeartbeatResponse:  # noqa: N802
        known = self._membership.heartbeat(WorkerName(request.worker), time.monotonic())
        return cpb.HeartbeatResponse(known=known)

    async def Leave(self, request: cpb.LeaveRequest, context: Context) -> cpb.LeaveResponse:  # noqa: N802
        _log.info("worker %s left", request.worker)
        self._membership.leave(WorkerName(request.worker))
        self._on_change()
        return cpb.LeaveResponse()


class JoinServer:
    """The place that workers join at. Built by `start`."""

    def __init__(
        self, server: grpc.aio.Server, membership: Membership, changed: asyncio.Event, address: Address
    ) -> None:
        self._server = server
        self._changed = changed
        self.membership = membership
        self.address = address

    @classmethod
    async def start(cls, listen: Address) -> "JoinServer":
        """Listen. Raises InvalidConfig if that is not possible."""
        membership, changed = Membership(), asyncio.Event()
        server = grpc.aio.server(options=server_options())
        cluster_pb2_grpc.add_ClusterServicer_to_server(_ClusterService(membership, changed.set), server)
        address = bind(server, listen, "--join-listen")
        await server.start()
        return cls(server, membership, changed, address)

    async def wait_for(self, num_workers: int, report: Callable[[int], None]) -> tuple[Member, ...]:
        """The members, once at least `num_workers` are present; `report` is told how many are, until then."""
        while len(present := self.membership.present(time.monotonic())) < num_workers:
            report(len(present))
            self._changed.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return present

    async def close(self) -> None:
        """Stop listening."""
        await self._server.stop(0.5)


def _address_of(said: Address, peer_host: str) -> Address:
    """Where to dial a worker that calls from `peer_host`. Raises InvalidConfig if what it says is its own loopback."""
    if said.host in _WILDCARDS:
        return Address(peer_host, said.port)
    if said.is_loopback and not Address(peer_host, said.port).is_loopback:
        raise InvalidConfig(
            f"a worker at {peer_host} cannot be reached at {said}, its own loopback; "
            "start it with --listen HOST:PORT or --advertise"
        )
    return said


def _peer_host(peer: str) -> str:
    """The host of a gRPC peer string like ipv4:10.0.0.2:51234 or ipv6:%5B::1%5D:51234."""
    return parse_address(unquote(peer).split(":", 1)[1]).host
