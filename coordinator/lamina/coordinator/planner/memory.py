"""What a split costs in bytes on the devices that are to carry it. Pure arithmetic over `lamina.spec.memory`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.spec.checkpoint import TensorIndex
from lamina.spec.device import DeviceProfile
from lamina.spec.errors import CapacityExceeded
from lamina.spec.ids import DeviceId
from lamina.spec.memory import (
    StageMemory,
    WeightBytes,
    arena_bytes,
    kv_block_bytes,
    sliding_windows,
    window_blocks,
)
from lamina.spec.model import LayerRange, ModelSpec
from lamina.spec.placement import StageSettings
from lamina.spec.quant import GgmlType

# Left free on each device beyond what is counted: the backend's workspace (which only the worker knows), allocator
# slack, and what other programs take meanwhile.
RESERVE_SHARE = 0.05
_CHUNKS_AHEAD = 4  # chunks of one prompt that run ahead, two for each of two stages, see SchedulerConfig


@dataclass(frozen=True, slots=True)
class Demand:
    """The model and what is to be held for it: enough cache for `num_tokens` over all sequences."""

    spec: ModelSpec
    tensors: TensorIndex
    settings: StageSettings
    num_tokens: int
    gives_back: bool = True  # whether steps are planned such that layers with a window keep little more than that

    @property
    def windows(self) -> tuple[int | None, ...]:
        """By cache group: the window behind which blocks come back, None if all positions are kept."""
        return sliding_windows(self.spec) if self.gives_back else (None,) * len(self.spec.cache_groups)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """KV blocks by cache group.

        Where all positions are kept: for `num_tokens`, and at least for one sequence of full context. Else for the
        windows and a chunk of as many sequences as a step has, and for some chunks that run ahead.
        """
        settings = self.settings
        kept = max(-(-self.num_tokens // settings.block_tokens), settings.max_blocks_per_seq)
        ahead = -(-_CHUNKS_AHEAD * settings.max_rows // settings.block_tokens)
        return tuple(
            kept if w is None else min(kept, settings.max_seqs * window_blocks(w, settings.max_rows) + ahead)
            for w in self.windows
        )


def room_bytes(device: DeviceProfile) -> int:
    """What a device can give: all that is free but the reserve."""
    return int(device.free_bytes * (1 - RESERVE_SHARE))


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a planned split and its bytes."""

    device: DeviceProfile
    layers: LayerRange
    memory: StageMemory

    @property
    def room_bytes(self) -> int:
        """What the device can give."""
        return room_bytes(self.device)


class StageCosts:
    """Bytes of any range of layers on devices that keep weights in these widths."""

    def __init__(self, demand: Demand, weight_bits: Mapping[GgmlType, float]) -> None:
        self._demand = demand
        self._num_blocks = demand.num_blocks
        self._weights = WeightBytes(demand.spec, demand.tensors, weight_bits)

    def of(self, layers: LayerRange) -> StageMemory:
        """Weights as they lie on the device, cache and arena of these layers."""
        spec, settings = self._demand.spec, self._demand.settings
        kv_bytes = sum(
            count * kv_block_bytes(spec, layers, group.index, settings)
            for group, count in zip(spec.cache_groups, self._num_blocks, strict=True)
        )
        return StageMemory(
            weight_bytes=self._weights.of(layers),
            kv_bytes=kv_bytes,
            arena_bytes=arena_bytes(spec, layers, settings),
        )


def stage_memory(demand: Demand, device: DeviceProfile, layers: LayerRange) -> StageMemory:
    """`StageCosts` of one range on one device."""
    return StageCosts(demand, device.weight_bits).of(layers)


def plan_stages(
    demand: Demand, devices: Sequence[DeviceProfile], ranges: Sequence[LayerRange]
) -> tuple[StagePlan, ...]:
    """The stages with their bytes, whether they fit or not."""
    return tuple(
        StagePlan(device, layers, stage_memory(demand, device, layers))
        for device, layers in zip(devices, ranges, strict=True)
    )


def check_fits(stages: Sequence[StagePlan]) -> None:
    """Raise CapacityExceeded, with the numbers of every device that is overfull, unless all stages fit."""
    by_device: dict[DeviceId, list[StagePlan]] = {}
    for stage in stages:
        by_device.setdefault(stage.device.id, []).append(stage)
    problems = [
        _overfull(together)
        for together in by_device.values()
        if sum(stage.memory.total_bytes for stage in together) > together[0].room_bytes
    ]
    if problems:
        raise CapacityExceeded(f"the split does not fit: {'; '.join(problems)}")


def _overfull(stages: Sequence[StagePlan]) -> str:
    """What the stages of one device need, and what it has."""
    mib = 2**20
    layers = " and ".join(str(stage.layers) for stage in stages)
    weights = sum(stage.memory.weight_bytes for stage in stages) / mib
    cache = sum(stage.memory.kv_bytes for stage in stages) / mib
    arena = sum(stage.memory.arena_bytes for stage in stages) / mib
    return (
        f"layers {layers} on {stages[0].device.id} need {weights + cache + arena:.1f} MiB (weights {weights:.1f},"
        f" cache {cache:.1f}, arena {arena:.1f}), {stages[0].room_bytes / mib:.1f} MiB are free there,"
        f" less {RESERVE_SHARE:.0%} in reserve"
    )
