"""Joining a coordinator: register, then heartbeats for as long as the worker lives; the only dialling from here."""

import asyncio
import logging

import grpc

from lamina.spec.address import Address
from lamina.v1 import cluster_pb2 as cpb
from lamina.v1 import cluster_pb2_grpc
from lamina.wire.channel import channel_options
from lamina.wire.profiles import version_from_message, version_to_message
from lamina.wire.status import error_from_rpc, is_deliberate
from lamina.wire.version import check_peer, own_version

RETRY_S = 2.0
CALL_DEADLINE_S = 5.0
_log = logging.getLogger(__name__)


async def stay_joined(coordinator: Address, worker: str, reachable_at: Address) -> None:
    """Register and keep the registration alive until cancelled; then leave.

    What the coordinator refuses the worker for is raised: VersionMismatch, InvalidConfig. Every other failure, of the
    network or of whatever answers in the coordinator's place, is tried again for ever, with one log line per outage.
    """
    channel = grpc.aio.insecure_channel(str(coordinator), options=channel_options())
    stub = cluster_pb2_grpc.ClusterStub(channel)
    silent = has_joined = False
    try:
        while True:
            try:
                heartbeat_s = await _register(stub, coordinator, worker, reachable_at)
                _log.info("joined coordinator %s", coordinator)
                silent, has_joined = False, True
                await _beat(stub, worker, heartbeat_s)
            except grpc.aio.AioRpcError as error:
                if is_deliberate(error):
                    raise error_from_rpc(error, f"coordinator {coordinator}") from None
                if not silent:
                    reason = error.details() or error.code().name
                    _log.warning("coordinator %s does not answer (%s), trying again", coordinator, reason)
                silent = True
                await asyncio.sleep(RETRY_S)
    finally:
        if has_joined:  # one that was refused would take leave for whoever has its name
            await _leave(stub, worker)
        await channel.close()


async def _register(
    stub: "cluster_pb2_grpc.ClusterAsyncStub", coordinator: Address, worker: str, reachable_at: Address
) -> float:
    request = cpb.RegisterRequest(version=version_to_message(own_version()), worker=worker, address=str(reachable_at))
    response: cpb.RegisterResponse = await stub.Register(request, timeout=CALL_DEADLINE_S)
    check_peer(version_from_message(response.version), f"coordinator {coordinator}")
    return response.heartbeat_s


async def _beat(stub: "cluster_pb2_grpc.ClusterAsyncStub", worker: str, heartbeat_s: float) -> None:
    """Until the coordinator says that it does not know us (it restarted)."""
    known = True
    while known:
        await asyncio.sleep(heartbeat_s)
        answer: cpb.HeartbeatResponse = await stub.Heartbeat(
            cpb.HeartbeatRequest(worker=worker), timeout=CALL_DEADLINE_S
        )
        known = answer.known


async def _leave(stub: "cluster_pb2_grpc.ClusterAsyncStub", worker: str) -> None:
    try:
        await stub.Leave(cpb.LeaveRequest(worker=worker), timeout=1.0)
    except grpc.aio.AioRpcError:
        _log.debug("the coordinator was not told that this worker leaves: it is gone itself")
