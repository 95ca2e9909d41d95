"""The stages a worker holds, by placement and index. Loads, adopts, evicts. Owned by the event loop."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lamina.rpc_worker.device_thread import DeviceThread
from lamina.rpc_worker.grammar import GrammarCompiler
from lamina.rpc_worker.link import RemoteLink
from lamina.rpc_worker.models import OpenedModel, find_model, open_model
from lamina.rpc_worker.settings import WorkerSettings
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.stage_runtime import StageKey, StageRuntime
from lamina.rpc_worker.tracing import TraceFile, Tracer, find_ranges
from lamina.spec.address import Address
from lamina.spec.errors import InvalidRequest, InvalidSplit, StaleEpoch, Unavailable
from lamina.spec.ids import PlacementId
from lamina.spec.model import LayerRange, ModelSpec
from lamina.spec.placement import StageSettings
from lamina.v1 import step_pb2 as pb
from lamina.wire.frames import check_frames_fit

_log = logging.getLogger(__name__)
_RESERVED_S = 30.0  # a coordinator that has said nothing of a placement for so long, and controls no stage, is gone


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a coordinator asks to load."""

    key: StageKey
    device: int
    model_path: str
    model_digest: str
    layers: LayerRange
    settings: StageSettings


class LoadCancelled(Unavailable):
    """Whoever asked for a stage is gone, or the worker stops; raised inside the loading thread to stop it."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A stage in memory. Until `reserved_until_s` it is its own placement's, even while nobody controls it yet.

    Whatever names the placement renews that, for all its stages here.
    """

    runtime: StageRuntime
    reserved_until_s: float


class StageRegistry:
    """All stages of one daemon."""

    def __init__(
        self,
        settings: WorkerSettings,
        devices: tuple[DeviceThread, ...],
        trace: TraceFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._devices = devices
        self._trace = trace
        self._clock = clock
        self._stages: dict[tuple[PlacementId, int], _Held] = {}
        self._loading = asyncio.Lock()
        self._closing = False

    def __iter__(self) -> Iterator[StageRuntime]:
        return iter([held.runtime for held in self._stages.values()])

    def reclaimable_bytes(self, device: int) -> int:
        """Bytes on a device of stages that the next load may evict: their coordinator is gone."""
        gone = [held.runtime.stage.facts for held in self._stages.values() if self._is_abandoned(held, device)]
        return sum(facts.weight_bytes + facts.arena_bytes + facts.cache_bytes for facts in gone)

    def device_index(self, runtime: StageRuntime) -> int:
        """Which of the worker's devices a stage is on."""
        return self._devices.index(runtime.device)

    def get(self, placement: str, epoch: int, index: int) -> StageRuntime:
        """The stage, if its epoch is the present one. Raises StaleEpoch or InvalidRequest."""
        held = self._stages.get((PlacementId(placement), index))
        if held is None:
            raise InvalidRequest(f"worker {self._settings.name} holds no stage {placement}#{index}; load it first")
        held.runtime.check_key(placement, epoch, index)
        self._reserve(held.runtime.key.placement)
        return held.runtime

    async def load(self, request: LoadRequest, progress: Callable[[int, int], None]) -> StageRuntime:
        """Load or adopt a stage; one load at a time per worker.

        `progress(done, total)` is called on the loop. Stages that nobody controls give way first. Raises
        InvalidCheckpoint, InvalidSplit, InvalidConfig, UnsupportedModel, CapacityExceeded, InvalidRequest, StaleEpoch,
        Unavailable.
        """
        if not 0 <= request.device < len(self._devices):
            have = f"{len(self._devices)} device(s)"
            raise InvalidRequest(f"worker {self._settings.name} has {have}, device {request.device} was asked for")
        self._reserve(request.key.placement)
        async with self._loading:
            self._check_open(request.key)
            adopted = await self._adopt(request)
            if adopted is not None:
                progress(1, 1)
                return adopted
            path = find_model(request.model_path, self._settings.model_folders)
            model = await asyncio.to_thread(open_model, path, request.model_digest)
            _check_ends(request, model.spec)
            if request.key.num_stages > 1:
                check_frames_fit(request.settings, model.spec.hidden)
            await self._evict(request)
            return await self._load_new(request, model, progress)

    async def unload(self, placement: str, epoch: int) -> int:
        """Free a placement's stages of this epoch, and of earlier ones that nobody controls; how many there were."""
        async with self._loading:
            ended = [
                runtime.key
                for runtime in self
                if runtime.key.placement == placement
                and (runtime.key.epoch == epoch or (runtime.key.epoch < epoch and not runtime.is_controlled))
            ]
            for key in ended:
                await self._free((key.placement, key.index), "it was unloaded")
            return len(ended)

    async def link(self, runtime: StageRuntime, next_address: Address) -> float:
        """Open the edge to the next stage, handed over in memory if it lives here; its round trip in seconds."""
        key = runtime.key
        local = self._stages.get((key.placement, key.next_index))
        if local is not None and local.runtime.key.epoch == key.epoch:
            await runtime.attach_neighbour(local.runtime)
            return 0.0
        opening = pb.FramesOpen(placement=key.placement, epoch=key.epoch, from_stage=key.index, to_stage=key.next_index)
        dials, wire_dtype = self._settings.edge_port is not None, runtime.settings.wire_dtype
        link = await RemoteLink.open(next_address, opening, runtime.link_lost, wire_dtype, dials=dials)
        await runtime.attach_link(link)
        return link.rtt_s

    def end_all(self) -> None:
        """The worker stops: no further load, and every controller is told."""
        self._closing = True
        for runtime in self:
            if runtime.is_controlled:
                runtime.fail(Unavailable("the worker is shutting down"))

    async def close(self) -> None:
        """Free everything, once a load in progress has noticed."""
        self._closing = True
        async with self._loading:
            for key in list(self._stages):
                await self._free(key, "the worker is shutting down")

    def _check_open(self, key: StageKey) -> None:
        """Raise unless `key` may be loaded: StaleEpoch for an old epoch, Unavailable for a stage in use."""
        if self._closing:
            raise Unavailable(f"worker {self._settings.name} is shutting down")
        held = self._stages.get((key.placement, key.index))
        if held is None:
            return
        if held.runtime.key.epoch >= key.epoch:
            raise StaleEpoch(f"{key.placement}#{key.index} is in epoch {held.runtime.key.epoch} already")
        if held.runtime.is_controlled:
            raise Unavailable(f"{key.placement}#{key.index} is controlled by another coordinator")

    def _is_free_for(self, request: LoadRequest, held: _Held) -> bool:
        """Whether a stage may be taken over or evicted for `request`: nobody controls it, and nobody is about to."""
        key = held.runtime.key
        if held.runtime.is_controlled:
            return False
        if key.placement == request.key.placement:
            return key.epoch < request.key.epoch
        return self._may_go(held)

    def _may_go(self, held: _Held) -> bool:
        return held.runtime.has_ended or self._clock() >= held.reserved_until_s

    def _is_abandoned(self, held: _Held, device: int) -> bool:
        runtime = held.runtime
        return self.device_index(runtime) == device and not runtime.is_controlled and self._may_go(held)

    async def _adopt(self, request: LoadRequest) -> StageRuntime | None:
        """A stage with the same weights and settings that no coordinator controls, put under the new key."""
        for old_key, held in list(self._stages.items()):
            old = held.runtime
            same = (
                old.spec.digest == request.model_digest
                and old.layers == request.layers
                and old.settings == request.settings
                and self.device_index(old) == request.device
                and (old.key.is_first, old.key.is_last) == (request.key.is_first, request.key.is_last)
            )
            if same and self._is_free_for(request, held):
                await old.end()
                await old.device.call(old.stage.drop_cache)
                del self._stages[old_key]
                await self._hold(old.successor(request.key))
                _log.info("stage %s#%d adopts layers %s", request.key.placement, request.key.index, request.layers)
                return self._stages[request.key.placement, request.key.index].runtime
        return None

    async def _evict(self, request: LoadRequest) -> None:
        for key, held in list(self._stages.items()):
            if self.device_index(held.runtime) == request.device and self._is_free_for(request, held):
                await self._free(key, "nobody controls it and another stage comes")

    async def _hold(self, runtime: StageRuntime) -> None:
        """Put a stage under its key; what is there of an earlier epoch is freed."""
        key = (runtime.key.placement, runtime.key.index)
        if key in self._stages:
            await self._free(key, "its placement has a new epoch")
        self._stages[key] = _Held(runtime, 0)
        self._reserve(runtime.key.placement)

    def _reserve(self, placement: PlacementId) -> None:
        """Keep the placement's stages for it from now on; others that load meanwhile neither adopt nor evict them."""
        until_s = self._clock() + _RESERVED_S
        for key, held in list(self._stages.items()):
            if key[0] == placement:
                self._stages[key] = _Held(held.runtime, until_s)

    async def _load_new(
        self, request: LoadRequest, model: OpenedModel, progress: Callable[[int, int], None]
    ) -> StageRuntime:
        loop, device, path = asyncio.get_running_loop(), self._devices[request.device], model.file.path
        grammars = (
            GrammarCompiler(model.file.metadata, str(path), model.spec.vocab_size) if request.key.is_last else None
        )
        compute = self._settings.compute_dtype
        tracer = None if self._trace is None else Tracer(self._trace, device.backend, request.device, find_ranges())
        stage = Stage(device.backend, model.spec, request.layers, request.settings, grammars, compute, tracer)
        total = stage.total_bytes(model.file.tensors)
        cancelled = False

        def report(done: int) -> None:
            if cancelled or self._closing:
                raise LoadCancelled(f"loading layers {request.layers} was stopped")
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
        runtime = StageRuntime(
            key, stage, device, model.spec, request.layers, request.settings, self._settings.name, grammars
        )
        await self._hold(runtime)
        _log.info("stage %s#%d: layers %s loaded from %s", key.placement, key.index, request.layers, path)
        return runtime

    async def _free(self, key: tuple[PlacementId, int], why: str) -> None:
        held = self._stages.pop(key, None)
        if held is None:
            return
        runtime = held.runtime
        _log.info("stage %s#%d is freed: %s", *key, why)
        if runtime.is_controlled:  # as at the end of a `coordinator run` whose Unload overtakes the end of its stream
            runtime.fail(Unavailable(why), logging.DEBUG)
        await runtime.end()
        await runtime.device.call(runtime.stage.free)


def _check_ends(request: LoadRequest, spec: ModelSpec) -> None:
    """Raise InvalidSplit unless exactly the first stage begins the model and exactly the last one ends it."""
    spec.layers_of(request.layers)
    key, layers = request.key, request.layers
    if (key.is_first, key.is_last) != (layers.start == 0, layers.stop == spec.num_layers):
        raise InvalidSplit(
            f"stage {key.index} of {key.num_stages} cannot have layers {layers}: {spec.name} has {spec.all_layers}"
        )
