"""Contiguous layers over ordered devices, by free memory: the split whose fullest device is least full."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

from lamina.coordinator.planner.memory import RESERVE_SHARE, Demand, StageCosts, room_bytes, stage_memory
from lamina.spec.device import DeviceProfile
from lamina.spec.errors import CapacityExceeded, InvalidSplit
from lamina.spec.model import LayerRange
from lamina.spec.quant import GgmlType


def partition_by_memory(demand: Demand, devices: Sequence[DeviceProfile]) -> tuple[LayerRange, ...]:
    """One range per device, tiling the model. Raises CapacityExceeded with numbers if no split fits.

    Minimises the largest share of its room that any device is filled to. Exact, by dynamic programming over (device,
    first layer): O(devices * layers^2). Filling greedily is not: a device that can hold one small layer may need the
    devices before it to stop early.
    """
    num_layers = demand.spec.num_layers
    if not devices:
        raise InvalidSplit("no device to place layers on")
    if len(devices) > num_layers:
        raise InvalidSplit(f"{len(devices)} devices for {num_layers} layers: name at most {num_layers} devices")
    tables = _byte_tables(demand, devices)
    # best[s] = (fullest share, stops) of the devices from here on, with layers from s to the end.
    best: dict[int, tuple[float, tuple[int, ...]]] = {num_layers: (0.0, ())}
    for index in range(len(devices) - 1, -1, -1):
        room, table = room_bytes(devices[index]), tables[index]
        later = len(devices) - index - 1
        starts = range(index, num_layers - later) if index else range(1)
        best = {start: _best_stop(start, table, room, best) for start in starts}
    share, stops = best[0]
    ranges = tuple(pairwise((0, *stops)))
    if share > 1:
        rooms = map(room_bytes, devices)
        excess = sum(max(0, table[ends] - room) for table, ends, room in zip(tables, ranges, rooms, strict=True))
        raise CapacityExceeded(_does_not_fit(demand, devices, excess))
    return tuple(LayerRange(*ends) for ends in ranges)


def _best_stop(
    start: int, table: Mapping[tuple[int, int], int], room: int, rest: Mapping[int, tuple[float, tuple[int, ...]]]
) -> tuple[float, tuple[int, ...]]:
    """Where a device that begins at `start` should stop, given the best of what follows; the later of equals."""
    found: tuple[float, tuple[int, ...]] = (math.inf, ())
    for stop, (share, stops) in sorted(rest.items(), reverse=True):
        if stop > start:
            filled = max(table[start, stop] / room if room > 0 else math.inf, share)
            if filled < found[0] or not found[1]:
                found = (filled, (stop, *stops))
    return found


def _byte_tables(demand: Demand, devices: Sequence[DeviceProfile]) -> list[dict[tuple[int, int], int]]:
    """For each device the bytes of every range [start, stop); devices that keep weights alike share a table."""
    tables: dict[tuple[tuple[GgmlType, float], ...], dict[tuple[int, int], int]] = {}
    ranges = list(combinations(range(demand.spec.num_layers + 1), 2))
    keys = [tuple(sorted(device.weight_bits.items())) for device in devices]
    for key, device in zip(keys, devices, strict=True):
        if key not in tables:
            costs = StageCosts(demand, device.weight_bits)
            tables[key] = {ends: costs.of(LayerRange(*ends)).total_bytes for ends in ranges}
    return [tables[key] for key in keys]


def _does_not_fit(demand: Demand, devices: Sequence[DeviceProfile], excess_bytes: int) -> str:
    """`excess_bytes` are beyond the devices' room in the split that comes closest."""
    mib = 2**20
    needed = stage_memory(demand, devices[0], demand.spec.all_layers)
    free = ", ".join(f"{device.id} {device.free_bytes / mib:.1f}" for device in devices)
    room = sum(map(room_bytes, devices))
    fits_without_cache = needed.weight_bytes + needed.arena_bytes <= room
    smaller = ", a shorter --context or --kv-dtype q8_0" if fits_without_cache else ""
    return (
        f"the model does not fit: {needed.total_bytes / mib:.1f} MiB needed (weights"
        f" {needed.weight_bytes / mib:.1f}, cache {needed.kv_bytes / mib:.1f}, arena {needed.arena_bytes / mib:.1f}"
        f" per stage), free MiB: {free}, less {RESERVE_SHARE:.0%} in reserve: {excess_bytes / mib:.1f} MiB are missing;"
        f" add a worker, or use more --max-memory{smaller}"
    )
