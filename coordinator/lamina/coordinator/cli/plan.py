"""`coordinator plan`: the dry run. Reads the header, asks the workers for free memory, loads nothing."""

import asyncio
import json

from lamina.coordinator.cli.progress import connecting_line, plain_console, split_json, split_table
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.planner.memory import Demand, StagePlan, check_fits, plan_stages
from lamina.coordinator.planner.partition import partition_by_memory
from lamina.coordinator.session import SessionSettings, addresses_of, choose_split, demand_of, dial_all
from lamina.spec.device import DeviceProfile
from lamina.spec.errors import InvalidSplit
from lamina.spec.ids import DeviceId, WorkerName
from lamina.spec.placement import check_tiling

_UNLIMITED_BYTES = 2**62


def assumed_devices(memory_bytes: tuple[int, ...] | None, num_devices: int) -> list[DeviceProfile]:
    """Devices that nobody asked, of these sizes or without limit; weights count as stored in the file."""
    return [
        DeviceProfile(
            id=DeviceId(WorkerName(f"worker{i}"), 0),
            kind="assumed",
            name="",
            total_bytes=memory_bytes[i] if memory_bytes else 0,
            free_bytes=memory_bytes[i] if memory_bytes else _UNLIMITED_BYTES,
            kernel="",
            compute_dtype="",
            kv_dtypes=(),
            graphs=False,
            threads=0,
            weight_bits={},
        )
        for i in range(len(memory_bytes) if memory_bytes else num_devices)
    ]


def plan_offline(
    model: ModelFile, settings: SessionSettings, memory_bytes: tuple[int, ...] | None
) -> tuple[StagePlan, ...]:
    """A split over assumed devices. Raises InvalidSplit or CapacityExceeded with numbers."""
    demand = demand_of(model, settings)
    ranges = settings.split.ranges
    devices = assumed_devices(memory_bytes, len(ranges or (1,)))
    if ranges is None:
        ranges = partition_by_memory(demand, devices)
    if len(ranges) != len(devices):
        raise InvalidSplit(f"--split names {len(ranges)} ranges, --memory {len(devices)} devices")
    check_tiling(model.spec.num_layers, ranges)
    stages = plan_stages(demand, devices, ranges)
    check_fits(stages)
    return stages


async def plan_online(model: ModelFile, settings: SessionSettings) -> tuple[StagePlan, ...]:
    """A split over the workers' free memory now."""
    addresses = addresses_of(settings)
    with connecting_line(plain_console(stderr=True), addresses):
        clients = await dial_all(addresses)
    try:
        return choose_split(model, settings, clients)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


def window_lines(demand: Demand) -> list[str]:
    """What the layers with a sliding window keep, a line for each window that keeps less than the others."""
    num_blocks, block_tokens = demand.num_blocks, demand.settings.block_tokens
    return [
        f"layers with a window of {window} tokens keep {count * block_tokens} positions of KV over all sequences,"
        f" the others {max(num_blocks) * block_tokens}"
        for window, count in zip(demand.windows, num_blocks, strict=True)
        if window is not None and count < max(num_blocks)
    ]


def print_plan(model: ModelFile, settings: SessionSettings, stages: tuple[StagePlan, ...], *, as_json: bool) -> None:
    """To standard output, as a table or as JSON."""
    if as_json:
        spec = model.spec
        document = {"model": spec.name, "architecture": spec.architecture, "digest": spec.digest}
        print(json.dumps({**document, "num_layers": spec.num_layers, "stages": split_json(stages)}, indent=2))
    else:
        console = plain_console()
        console.print(split_table(stages, settings))
        for line in window_lines(demand_of(model, settings)):
            console.print(line, soft_wrap=True)
