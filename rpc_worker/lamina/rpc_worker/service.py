"""The gRPC servicer: translate, delegate, nothing else."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from lamina.rpc_worker.describe import device_profile, stage_message
from lamina.rpc_worker.device_thread import DeviceThread
from lamina.rpc_worker.direct_listener import DirectListener, Offer
from lamina.rpc_worker.health import HealthWatch
from lamina.rpc_worker.settings import WorkerSettings
from lamina.rpc_worker.stage_registry import LoadRequest, StageRegistry
from lamina.rpc_worker.stage_runtime import Responses, StageKey, StageRuntime
from lamina.spec.address import parse_address
from lamina.spec.errors import InvalidPlan, InvalidRequest, InvalidSplit, LaminaError, Unavailable
from lamina.spec.ids import DeviceId, Epoch, PlacementId, WorkerName
from lamina.spec.model import LayerRange
from lamina.v1 import step_pb2 as pb
from lamina.v1 import worker_pb2 as wpb
from lamina.v1 import worker_pb2_grpc
from lamina.wire.convert import command_from_message
from lamina.wire.profiles import (
    device_to_message,
    settings_from_message,
    version_from_message,
    version_to_message,
)
from lamina.wire.status import abort
from lamina.wire.version import check_peer, own_version

_log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """One worker's RPCs."""

    def __init__(
        self,
        settings: WorkerSettings,
        devices: tuple[DeviceThread, ...],
        registry: StageRegistry,
        edges: DirectListener | None,
    ) -> None:
        self._settings = settings
        self._edges = edges
        self._devices = devices
        self._registry = registry
        self._started = time.monotonic()
        self._health = HealthWatch([device.backend for device in devices])

    async def Describe(self, request: wpb.DescribeRequest, context: Context) -> wpb.DescribeResponse:  # noqa: N802
        """Answers any version, so that a mismatch can be named by the other side."""
        found, healths = await asyncio.gather(
            asyncio.gather(*(device.facts() for device in self._devices)), self._health.read()
        )
        worker = WorkerName(self._settings.name)
        profiles = [
            device_profile(
                DeviceId(worker, index), device.backend, facts, self._registry.reclaimable_bytes(index), health
            )
            for index, (device, facts, health) in enumerate(zip(self._devices, found, healths, strict=True))
        ]
        return wpb.DescribeResponse(
            version=version_to_message(own_version()),
            worker=self._settings.name,
            advertise=str(self._settings.advertise or ""),
            devices=[device_to_message(profile) for profile in profiles],
            stages=[stage_message(runtime, self._registry.device_index(runtime)) for runtime in self._registry],
            uptime_s=time.monotonic() - self._started,
        )

    async def LoadStage(  # noqa: N802
        self, request: wpb.LoadStageRequest, context: Context
    ) -> AsyncIterator[wpb.LoadStageResponse]:
        """Progress about ten times a second, then what is left for the cache."""
        try:
            check_peer(version_from_message(request.version), "the coordinator")
            load = _load_request(request)
            latest = wpb.LoadStageResponse()

            def progress(done: int, total: int) -> None:
                latest.done_bytes, latest.total_bytes = done, total

            loading = asyncio.create_task(self._registry.load(load, progress))
            try:
                while not (await asyncio.wait([loading], timeout=0.1))[0]:
                    yield latest
                runtime = await loading
            finally:
                loading.cancel()
            yield _load_finished(runtime, latest)
        except LaminaError as error:
            await abort(context, error)

    async def AllocateCache(  # noqa: N802
        self, request: wpb.AllocateCacheRequest, context: Context
    ) -> wpb.AllocateCacheResponse:
        """Phase two of loading."""
        try:
            runtime = self._registry.get(request.placement, request.epoch, request.stage)
            num_blocks = tuple(request.num_blocks)
            num_groups = len(runtime.spec.cache_groups)
            if len(num_blocks) != num_groups or min(num_blocks, default=0) < 1:
                raise InvalidRequest(f"{num_groups} numbers of blocks >= 1 are wanted, got {list(num_blocks)}")
            if runtime.is_controlled:
                raise Unavailable(f"stage {request.stage} is running steps; its cache cannot be replaced now")
            await runtime.device.call(lambda: runtime.stage.allocate_cache(num_blocks))
        except LaminaError as error:
            await abort(context, error)
        return wpb.AllocateCacheResponse(cache_bytes=runtime.stage.facts.cache_bytes)

    async def LinkStage(self, request: wpb.LinkStageRequest, context: Context) -> wpb.LinkStageResponse:  # noqa: N802
        """Dial the next stage."""
        try:
            runtime = self._registry.get(request.placement, request.epoch, request.stage)
            if request.next_stage != runtime.key.next_index:
                raise InvalidRequest(
                    f"stage {request.stage} is followed by {runtime.key.next_index}, not {request.next_stage}"
                )
            rtt_s = await self._registry.link(runtime, parse_address(request.next_address))
        except LaminaError as error:
            await abort(context, error)
        return wpb.LinkStageResponse(peer=request.next_address, rtt_s=rtt_s)

    async def Unload(self, request: wpb.UnloadRequest, context: Context) -> wpb.UnloadResponse:  # noqa: N802
        """Free a placement's stages; unknown ones are nothing to complain about."""
        return wpb.UnloadResponse(num_stages=await self._registry.unload(request.placement, request.epoch))

    async def PrepareGrammar(  # noqa: N802
        self, request: wpb.PrepareGrammarRequest, context: Context
    ) -> wpb.PrepareGrammarResponse:
        """Compile a grammar before a sequence needs it."""
        try:
            runtime = self._registry.get(request.placement, request.epoch, request.stage)
            await runtime.prepare_grammar(request.grammar)
        except LaminaError as error:
            await abort(context, error)
        return wpb.PrepareGrammarResponse()

    # The stubs know only generators; answers here come from another task, through context.write.
    async def Steps(  # type: ignore[override] # noqa: N802
        self, requests: AsyncIterator[pb.StepsRequest], context: Context
    ) -> None:
        """The coordinator's stream: commands in, answers out; its end is the epoch's end."""
        requests = _received(context)
        try:
            runtime = await self._opened_stage(requests)
            responses = runtime.attach_controller()
        except LaminaError as error:
            await abort(context, error)
        reading = asyncio.create_task(_read_commands(runtime, requests, responses))
        try:
            await context.write(pb.StepsResponse(opened=pb.StepsOpened()))
            while (response := await responses.get()) is not None:
                await context.write(response)
        finally:
            reading.cancel()
            await asyncio.shield(runtime.end())
            await asyncio.gather(reading, return_exceptions=True)

    async def _opened_stage(self, requests: AsyncIterator[pb.StepsRequest]) -> StageRuntime:
        opening = await anext(requests, None)
        if opening is None or not opening.HasField("open") or opening.commands:
            raise InvalidPlan("a Steps stream begins with `open`, alone")
        runtime = self._registry.get(opening.open.placement, opening.open.epoch, opening.open.stage)
        if opening.open.settings_digest != runtime.settings.digest():
            raise InvalidRequest("the coordinator's stage settings differ from those this stage was loaded with")
        return runtime

    async def Frames(  # type: ignore[override] # noqa: N802
        self, requests: AsyncIterator[pb.FramesRequest], context: Context
    ) -> None:
        """The stream of the stage before. What is wrong on it ends it, and nothing else."""
        requests = _received(context)
        try:
            opening = await anext(requests, None)
            if opening is None or opening.WhichOneof("body") != "open":
                raise InvalidPlan("a Frames stream begins with `open`")
            runtime = self._registry.get(opening.open.placement, opening.open.epoch, opening.open.to_stage)
            expected = (runtime.key.index - 1) % runtime.key.num_stages
            if opening.open.from_stage != expected:
                raise InvalidPlan(f"stage {runtime.key.index} follows {expected}, not {opening.open.from_stage}")
            with nullcontext() if self._edges is None else self._edges.offer(runtime) as offer:
                await _serve_edge(runtime, requests, context, offer)
        except LaminaError as error:
            await abort(context, error)


async def _serve_edge(
    runtime: StageRuntime, requests: AsyncIterator[pb.FramesRequest], context: Context, offer: Offer | None
) -> None:
    """Until the stream, or the direct connection that takes its place, ends. Raises what was wrong on either."""
    if offer is None:
        await context.write(pb.FramesResponse(opened=pb.FramesOpened()))
        await _read_edge(runtime, requests, context)
        return
    opened = pb.FramesOpened(direct_port=offer.port, direct_key=offer.key)
    await context.write(pb.FramesResponse(opened=opened))
    reading = asyncio.create_task(_read_edge(runtime, requests, context))
    try:
        tasks: list[asyncio.Future[Any]] = [reading, offer.ended]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reading.cancel()
        outcome, *_ = await asyncio.gather(reading, return_exceptions=True)
    if offer.ended.done():
        raise offer.ended.result()
    if isinstance(outcome, Exception):
        raise outcome


async def _read_edge(runtime: StageRuntime, requests: AsyncIterator[pb.FramesRequest], context: Context) -> None:
    async for message in requests:
        if message.WhichOneof("body") == "ping":
            await context.write(pb.FramesResponse(pong=message.ping))
        else:
            runtime.handle_frames_message(message)


async def _received(context: Context) -> AsyncIterator[Any]:
    """The stream's messages, without gRPC's own iterator in between. Raises InvalidPlan for bytes that are none."""
    try:
        while (message := await context.read()) is not grpc.aio.EOF:
            yield message
    except DecodeError as error:
        raise InvalidPlan(f"a message cannot be parsed: {error}") from None


async def _read_commands(runtime: StageRuntime, requests: AsyncIterator[pb.StepsRequest], responses: Responses) -> None:
    """Until the coordinator ends the stream, or sends what is no sound command; the writer ends after what it has."""
    num_groups = len(runtime.spec.cache_groups)
    try:
        async for message in requests:
            if message.HasField("open") or not message.commands:
                raise InvalidPlan("a message without commands is out of order on a Steps stream")
            for command in message.commands:
                runtime.handle_command(command_from_message(command, num_groups))
    except LaminaError as error:
        runtime.fail(error)
    except Exception as error:
        _log.exception("a command to stage %s#%d failed", runtime.key.placement, runtime.key.index)
        runtime.fail(LaminaError(f"{type(error).__name__}: {error}"))
    finally:
        responses.put_nowait(None)


def _load_request(request: wpb.LoadStageRequest) -> LoadRequest:
    if not 0 <= request.stage < request.num_stages:
        raise InvalidRequest(f"stage {request.stage} of {request.num_stages} does not exist")
    if request.num_layers < 1:
        raise InvalidSplit(f"stage {request.stage} is to have {request.num_layers} layers")
    key = StageKey(PlacementId(request.placement), Epoch(request.epoch), request.stage, request.num_stages)
    layers = LayerRange(request.first_layer, request.first_layer + request.num_layers)
    settings = settings_from_message(request.settings)
    return LoadRequest(key, request.device, request.model_path, request.model_digest, layers, settings)


def _load_finished(runtime: StageRuntime, latest: wpb.LoadStageResponse) -> wpb.LoadStageResponse:
    facts = runtime.stage.facts
    return wpb.LoadStageResponse(
        done_bytes=latest.total_bytes,
        total_bytes=latest.total_bytes,
        finished=True,
        weight_bytes=facts.weight_bytes,
        arena_bytes=facts.arena_bytes,
        free_bytes=runtime.device.last_facts.free_bytes,
        block_bytes=facts.block_bytes,
    )
