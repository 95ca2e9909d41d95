"""Contiguous layers over ordered devices, by free memory: the split whose fullest device is least full."""

from collections.abc import Sequence

from lamina.coordinator.planner.memory import Demand, plan_stages, stage_memory
from lamina.spec.device import DeviceProfile
from lamina.spec.errors import CapacityExceeded, InvalidSplit
from lamina.spec.model import LayerRange

_SEARCH_STEPS = 30


def partition_by_memory(demand: Demand, devices: Sequence[DeviceProfile]) -> tuple[LayerRange, ...]:
    """One range per device, tiling the model. Raises CapacityExceeded with numbers if no split fits.

    Minimises the largest share of its free memory that any device is filled to, by bisection on that share with a
    greedy fill: for contiguous ranges in a fixed order greedy is exact, since a stage's bytes only grow with layers.
    """
    num_layers = demand.spec.num_layers
    if not devices:
        raise InvalidSplit("no device to place layers on")
    if len(devices) > num_layers:
        raise InvalidSplit(f"{len(devices)} devices for {num_layers} layers: name at most {num_layers} devices")
    best = _fill(demand, devices, 1.0)
    if best is None:
        raise CapacityExceeded(_does_not_fit(demand, devices))
    low, high = 0.0, 1.0
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        found = _fill(demand, devices, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _fill(demand: Demand, devices: Sequence[DeviceProfile], share: float) -> tuple[LayerRange, ...] | None:
    """Ranges that fill no device beyond `share` of its room, each as long as that allows; None if there are none."""
    num_layers = demand.spec.num_layers
    ranges: list[LayerRange] = []
    start = 0
    for index, device in enumerate(devices):
        last_allowed = num_layers - (len(devices) - index - 1)  # every later device needs a layer
        stop = last_allowed if index == len(devices) - 1 else _longest(demand, device, start, last_allowed, share)
        if stop <= start or not _fits(demand, device, LayerRange(start, stop), share):
            return None
        ranges.append(LayerRange(start, stop))
        start = stop
    return tuple(ranges)


def _longest(demand: Demand, device: DeviceProfile, start: int, last_allowed: int, share: float) -> int:
    """The largest stop for which [start, stop) fits, by bisection; `start` if not even one layer does."""
    low, high = start, last_allowed
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(demand, device, LayerRange(start, middle), share):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(demand: Demand, device: DeviceProfile, layers: LayerRange, share: float) -> bool:
    (stage,) = plan_stages(demand, [device], [layers])
    return stage.memory.total_bytes <= share * stage.room_bytes


def _does_not_fit(demand: Demand, devices: Sequence[DeviceProfile]) -> str:
    mib = 2**20
    needed = stage_memory(demand, devices[0], demand.spec.all_layers)
    free = ", ".join(f"{device.id} {device.free_bytes / mib:.1f}" for device in devices)
    return (
        f"{demand.spec.name} does not fit: {needed.total_bytes / mib:.1f} MiB needed (weights"
        f" {needed.weight_bytes / mib:.1f}, cache {needed.kv_bytes / mib:.1f}, arena {needed.arena_bytes / mib:.1f}"
        f" per stage), free MiB: {free}; add a worker, or use a shorter --context or a smaller --kv-dtype"
    )
