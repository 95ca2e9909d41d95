"""The stages a worker holds, by placement and index. Loads, adopts, evicts. Owned by the event loop."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lamina.rpc_worker.device_thread import DeviceThread
from lamina.rpc_worker.link import GrpcLink, Link, LocalLink
from lamina.rpc_worker.models import find_model, open_model
from lamina.rpc_worker.settings import WorkerSettings
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.stage_runtime import StageKey, StageRuntime
from lamina.spec.address import Address
from lamina.spec.errors import InvalidRequest, StaleEpoch, Unavailable
from lamina.spec.ids import PlacementId
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.v1 import step_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a coordinator asks to load."""

    key: StageKey
    device: int
    model_path: str
    model_digest: str
    layers: LayerRange
    settings: StageSettings


class LoadCancelled(Exception):
    """Whoever asked for a stage is gone; raised inside the loading thread to stop it."""


class StageRegistry:
    """All stages of one daemon."""

    def __init__(self, settings: WorkerSettings, devices: tuple[DeviceThread, ...]) -> None:
        self._settings = settings
        self._devices = devices
        self._stages: dict[tuple[PlacementId, int], StageRuntime] = {}
        self._loading = asyncio.Lock()

    def __iter__(self) -> Iterator[StageRuntime]:
        return iter(list(self._stages.values()))

    def device_index(self, runtime: StageRuntime) -> int:
        """Which of the worker's devices a stage is on."""
        return self._devices.index(runtime.device)

    def get(self, placement: str, epoch: int, index: int) -> StageRuntime:
        """The stage, if its epoch is the present one. Raises StaleEpoch or InvalidRequest."""
        runtime = self._stages.get((PlacementId(placement), index))
        if runtime is None:
            raise InvalidRequest(f"worker {self._settings.name} holds no stage {placement}#{index}; load it first")
        runtime.check_key(placement, epoch, index)
        return runtime

    async def load(self, request: LoadRequest, progress: Callable[[int, int], None]) -> StageRuntime:
        """Load or adopt a stage; one load at a time per worker.

        `progress(done, total)` is called on the loop. Stages that nobody controls give way first. Raises
        InvalidCheckpoint, UnsupportedModel, CapacityExceeded, InvalidRequest, StaleEpoch.
        """
        if not 0 <= request.device < len(self._devices):
            have = f"{len(self._devices)} device(s)"
            raise InvalidRequest(f"worker {self._settings.name} has {have}, device {request.device} was asked for")
        async with self._loading:
            adopted = await self._adopt(request)
            if adopted is not None:
                progress(1, 1)
                return adopted
            await self._evict_orphans(request.device)
            return await self._load_new(request, progress)

    async def unload(self, placement: str) -> int:
        """Free all stages of a placement; how many there were."""
        async with self._loading:
            keys = [key for key in self._stages if key[0] == placement]
            for key in keys:
                await self._free(key)
            return len(keys)

    async def link(self, runtime: StageRuntime, next_address: Address) -> Link:
        """Open the edge to the next stage; handed over in memory if it lives here."""
        key = runtime.key
        await runtime.close_link()
        local = self._stages.get((key.placement, key.next_index))
        link: Link
        if local is not None and local.key.epoch == key.epoch and self._is_own(next_address):
            link = LocalLink(local.handle_frames_message, runtime.link_lost)
        else:
            opening = pb.FramesOpen(
                placement=key.placement, epoch=key.epoch, from_stage=key.index, to_stage=key.next_index
            )
            link = await GrpcLink.open(next_address, opening, runtime.link_lost)
        runtime.attach_link(link)
        return link

    async def close(self) -> None:
        """Free everything."""
        for key in list(self._stages):
            await self._free(key)

    def _is_own(self, address: Address) -> bool:
        return address in (self._settings.listen, self._settings.advertise)

    async def _adopt(self, request: LoadRequest) -> StageRuntime | None:
        """A stage with the same weights and settings that no coordinator controls, put under the new key."""
        held = self._stages.get((request.key.placement, request.key.index))
        if held is not None and held.key.epoch >= request.key.epoch:
            raise StaleEpoch(f"{request.key.placement}#{request.key.index} is in epoch {held.key.epoch} already")
        for old_key, runtime in self._stages.items():
            same = (
                runtime.spec.digest == request.model_digest
                and runtime.layers == request.layers
                and runtime.settings == request.settings
                and self.device_index(runtime) == request.device
            )
            if same and not runtime.is_controlled:
                del self._stages[old_key]
                await runtime.close_link()
                runtime.adopt(request.key)
                self._stages[(request.key.placement, request.key.index)] = runtime
                _log.info("stage %s#%d adopts layers %s", request.key.placement, request.key.index, request.layers)
                return runtime
        if held is not None and held.is_controlled:
            raise Unavailable(f"{request.key.placement}#{request.key.index} is controlled by another coordinator")
        return None

    async def _evict_orphans(self, device: int) -> None:
        for key, runtime in list(self._stages.items()):
            if not runtime.is_controlled and self.device_index(runtime) == device:
                _log.info("stage %s#%d is unloaded: nobody controls it and another stage comes", *key)
                await self._free(key)

    async def _load_new(self, request: LoadRequest, progress: Callable[[int, int], None]) -> StageRuntime:
        loop, device = asyncio.get_running_loop(), self._devices[request.device]
        path = find_model(request.model_path, self._settings.model_folders)
        model = await asyncio.to_thread(open_model, path, request.model_digest)
        model.spec.layers_of(request.layers)  # raises InvalidSplit for layers the model does not have
        stage = Stage(device.backend, model.spec, request.layers, request.settings)
        total = stage.total_bytes(model.file.tensors)
        cancelled = False

        def report(done: int) -> None:
            if cancelled:
                raise LoadCancelled
            loop.call_soon_threadsafe(progress, done, total)

        loading = asyncio.ensure_future(device.call(lambda: stage.load(model.file.tensors, report)))
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            cancelled = True
            await asyncio.wait([loading])
            if not loading.exception():  # it was through already
                await device.call(stage.free)
            raise
        key = request.key
        runtime = StageRuntime(key, stage, device, model.spec, request.layers, request.settings, self._settings.name)
        self._stages[(key.placement, key.index)] = runtime
        _log.info("stage %s#%d: layers %s loaded from %s", key.placement, key.index, request.layers, path)
        return runtime

    async def _free(self, key: tuple[PlacementId, int]) -> None:
        runtime = self._stages.pop(key)
        await runtime.detach_controller()
        await runtime.device.call(runtime.stage.free)
