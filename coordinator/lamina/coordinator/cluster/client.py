"""One worker, by gRPC: dial, describe, load, allocate, link, unload, open the Steps stream. All errors are typed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from lamina.spec.address import Address, parse_address
from lamina.spec.device import WorkerProfile
from lamina.spec.errors import VersionMismatch, WorkerLost, WorkerUnreachable
from lamina.spec.model import ModelSpec
from lamina.spec.placement import Placement, StageSettings, StageSpec
from lamina.v1 import step_pb2 as pb
from lamina.v1 import worker_pb2 as wpb
from lamina.v1 import worker_pb2_grpc
from lamina.wire.channel import CONNECT_DEADLINE_S, connect
from lamina.wire.profiles import settings_to_message, version_to_message, worker_from_message
from lamina.wire.status import error_from_rpc
from lamina.wire.version import check_peer, own_version

CALL_DEADLINE_S = 20.0
_STEPS = "/lamina.v1.Worker/Steps"
ALLOCATE_DEADLINE_S = 120.0  # zeroing a large cache takes a while

Response = TypeVar("Response")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of a stage read so far."""

    stage: StageSpec
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class StageLoaded:
    """Phase one is through: what the stage takes, and what is left for its cache (bytes of a block by group)."""

    stage: StageSpec
    weight_bytes: int
    arena_bytes: int
    free_bytes: int
    block_bytes: tuple[int, ...]


class WorkerClient:
    """A dialled worker. Built by `dial`."""

    def __init__(self, address: Address, channel: grpc.aio.Channel, profile: WorkerProfile) -> None:
        self.address = address
        self.profile = profile
        self._channel = channel
        self._stub = worker_pb2_grpc.WorkerStub(channel)

    @classmethod
    async def dial(cls, address: Address, *, deadline_s: float = CONNECT_DEADLINE_S) -> "WorkerClient":
        """Connect, describe, check the version. Raises WorkerUnreachable, VersionMismatch."""
        channel = await connect(address, deadline_s=deadline_s)
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            request = wpb.DescribeRequest(version=version_to_message(own_version()))
            response = await stub.Describe(request, timeout=CALL_DEADLINE_S)
            profile = worker_from_message(response)
            check_peer(profile.version, f"worker {profile.name} at {address}")
        except grpc.aio.AioRpcError as error:
            await channel.close()
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise VersionMismatch(f"worker {address}: what answers there is no lamina worker") from None
            raise error_from_rpc(error, f"worker {address}") from None
        except BaseException:
            await channel.close()
            raise
        return cls(address, channel, profile)

    @property
    def who(self) -> str:
        """Name and address, for messages."""
        return f"worker {self.profile.name} at {self.address}"

    @property
    def reachable_address(self) -> Address:
        """Where other workers dial it: as it advertises itself, else as we dialled it."""
        return parse_address(self.profile.advertise) if self.profile.advertise else self.address

    async def describe(self) -> WorkerProfile:
        """Ask anew."""
        request = wpb.DescribeRequest(version=version_to_message(own_version()))
        response: wpb.DescribeResponse = await self._call(self._stub.Describe(request, timeout=CALL_DEADLINE_S))
        self.profile = worker_from_message(response)
        return self.profile

    async def load_stage(
        self, placement: Placement, stage: StageSpec, spec: ModelSpec, model_path: str, settings: StageSettings
    ) -> AsyncIterator[LoadProgress | StageLoaded]:
        """Phase one; the last item is a StageLoaded."""
        request = wpb.LoadStageRequest(
            version=version_to_message(own_version()),
            placement=placement.id,
            epoch=placement.epoch,
            stage=stage.index,
            num_stages=len(placement.stages),
            device=stage.device.index,
            model_path=model_path,
            model_digest=spec.digest,
            first_layer=stage.layers.start,
            num_layers=len(stage.layers),
            settings=settings_to_message(settings),
        )
        try:
            async for response in self._stub.LoadStage(request):
                if response.finished:
                    yield StageLoaded(
                        stage,
                        response.weight_bytes,
                        response.arena_bytes,
                        response.free_bytes,
                        tuple(response.block_bytes),
                    )
                else:
                    yield LoadProgress(stage, response.done_bytes, response.total_bytes)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.who) from None

    async def allocate_cache(self, placement: Placement, stage: StageSpec, num_blocks: tuple[int, ...]) -> int:
        """Phase two; bytes of the stage's cache."""
        request = wpb.AllocateCacheRequest(
            placement=placement.id, epoch=placement.epoch, stage=stage.index, num_blocks=num_blocks
        )
        response: wpb.AllocateCacheResponse = await self._call(
            self._stub.AllocateCache(request, timeout=ALLOCATE_DEADLINE_S)
        )
        return response.cache_bytes

    async def link_stage(self, placement: Placement, stage: StageSpec, next_stage: int, address: Address) -> float:
        """Have the stage dial the next one; round trip of that edge in seconds."""
        request = wpb.LinkStageRequest(
            placement=placement.id,
            epoch=placement.epoch,
            stage=stage.index,
            next_stage=next_stage,
            next_address=str(address),
        )
        response: wpb.LinkStageResponse = await self._call(self._stub.LinkStage(request, timeout=CALL_DEADLINE_S))
        return response.rtt_s

    async def unload(self, placement: Placement) -> int:
        """Free a placement's stages there, of its epoch and abandoned earlier ones; how many there were.

        Raises WorkerLost at once if the connection is lost: waiting for one that hangs would hold up all the others.
        """
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            raise WorkerLost(f"{self.who}: not connected")
        request = wpb.UnloadRequest(placement=placement.id, epoch=placement.epoch)
        response: wpb.UnloadResponse = await self._call(self._stub.Unload(request, timeout=CALL_DEADLINE_S))
        return response.num_stages

    async def prepare_grammar(self, placement: Placement, stage: StageSpec, grammar: str) -> None:
        """Have the last stage compile a grammar. Raises InvalidRequest or Unavailable with the reason, if it cannot."""
        request = wpb.PrepareGrammarRequest(
            placement=placement.id, epoch=placement.epoch, stage=stage.index, grammar=grammar
        )
        await self._call(self._stub.PrepareGrammar(request, timeout=CALL_DEADLINE_S))

    async def open_steps(self, placement: Placement, stage: StageSpec, settings: StageSettings) -> "StepsCall":
        """The Steps stream of a stage, accepted by the worker."""
        # Requests are bytes already: a plan is serialised once for all stages, waiting commands are joined.
        call: StepsCall = self._channel.stream_stream(
            _STEPS, request_serializer=None, response_deserializer=pb.StepsResponse.FromString
        )()
        opening = pb.StepsOpen(
            placement=placement.id, epoch=placement.epoch, stage=stage.index, settings_digest=settings.digest()
        )
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                await call.write(pb.StepsRequest(open=opening).SerializeToString())
                first = await call.read()
                if not isinstance(first, pb.StepsResponse):  # end of stream; the status says why
                    trailing, details = await call.trailing_metadata(), await call.details()
                    raise grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), trailing, details)
        except BaseException as error:
            call.cancel()
            if isinstance(error, grpc.aio.AioRpcError):
                raise error_from_rpc(error, self.who) from None
            if isinstance(error, TimeoutError):
                raise WorkerUnreachable(f"{self.who}: {stage} did not answer within {CALL_DEADLINE_S:g} s") from None
            raise
        return call

    async def close(self) -> None:
        """Drop the connection."""
        await self._channel.close()

    async def _call(self, call: Awaitable[Response]) -> Response:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.who) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task was cancelled: whoever lost the pipeline has dropped the connection under it.
            raise WorkerLost(f"{self.who}: the connection was given up") from None


StepsCall = grpc.aio.StreamStreamCall[bytes, pb.StepsResponse]
