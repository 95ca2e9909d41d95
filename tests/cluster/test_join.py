"""Workers that join by themselves: what ends them, what they try again, and which addresses are refused."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from lamina.coordinator.cluster.membership import JoinServer, _address_of
from lamina.rpc_worker import join
from lamina.rpc_worker.join import stay_joined
from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig
from lamina.v1 import cluster_pb2 as cpb
from lamina.v1 import cluster_pb2_grpc
from lamina.wire.profiles import version_to_message
from lamina.wire.version import own_version
from support.loopback import DEADLINE_S, eventually, run_scene

WORKER = Address("127.0.0.1", 50051)


class FlakyCoordinator(cluster_pb2_grpc.ClusterServicer):
    """Fails in ways that are nobody's intention, one after the other, then takes the worker."""

    def __init__(self, codes: list[grpc.StatusCode]) -> None:
        self.codes = codes
        self.num_registered = 0

    async def Register(self, request: cpb.RegisterRequest, context: Any) -> cpb.RegisterResponse:  # noqa: N802
        if self.codes:
            await context.abort(self.codes.pop(0), "not now")
        self.num_registered += 1
        return cpb.RegisterResponse(version=version_to_message(own_version()), heartbeat_s=60)

    async def Leave(self, request: cpb.LeaveRequest, context: Any) -> cpb.LeaveResponse:  # noqa: N802
        return cpb.LeaveResponse()


def test_what_nobody_meant_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A starting or overloaded coordinator, a proxy in its place: the worker outlives them all."""
    monkeypatch.setattr(join, "RETRY_S", 0.01)
    codes = [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED]

    async def scene() -> None:
        server, servicer = grpc.aio.server(), FlakyCoordinator(codes)
        cluster_pb2_grpc.add_ClusterServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        joining = asyncio.create_task(stay_joined(Address("127.0.0.1", port), "a", WORKER))
        await eventually(lambda: servicer.num_registered == 1 or joining.done())
        assert not joining.done()
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        await server.stop(None)

    run_scene(scene)


def test_what_the_coordinator_means_ends_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    """A name that is taken will be taken the next time too; both sides say so."""

    async def scene() -> None:
        server = await JoinServer.start(Address("127.0.0.1", 0))
        first = asyncio.create_task(stay_joined(server.address, "a", WORKER))
        async with asyncio.timeout(DEADLINE_S):
            counts: list[int] = []
            await server.wait_for(1, counts.append)
            assert set(counts) == {0}
            with pytest.raises(InvalidConfig, match="a worker called 'a' is there already"):
                await stay_joined(server.address, "a", Address("127.0.0.1", 50052))
            assert [member.address for member in server.membership.present(time.monotonic())] == [WORKER]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert not server.membership.present(time.monotonic())  # that one did take leave
        await server.close()

    run_scene(scene)
    assert any(m.startswith("worker a may not join: a worker called 'a' is there") for m in caplog.messages)


@pytest.mark.parametrize(
    ("said", "peer_host", "dialled"),
    [
        ("0.0.0.0", "192.0.2.9", "192.0.2.9"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "::1", "127.0.0.1"),
        ("192.0.2.8", "192.0.2.9", "192.0.2.8"),
        ("worker-a", "192.0.2.9", "worker-a"),
    ],
)
def test_where_a_worker_is_dialled(said: str, peer_host: str, dialled: str) -> None:
    assert _address_of(Address(said, 50051), peer_host) == Address(dialled, 50051)


@pytest.mark.parametrize("said", ["127.0.0.1", "::1", "localhost"])
def test_the_loopback_of_another_machine_is_refused(said: str) -> None:
    """Dialling it would reach this machine, and maybe another worker."""
    with pytest.raises(InvalidConfig, match=r"a worker at 192\.0\.2\.9 cannot be reached at .*--listen HOST:PORT"):
        _address_of(Address(said, 50051), "192.0.2.9")
