"""The split by free memory: always a tiling, exactly the best one, refused with numbers (P-21, P-22)."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.coordinator.planner.memory import RESERVE_SHARE, Demand, plan_stages
from lamina.coordinator.planner.partition import partition_by_memory
from lamina.spec.device import DeviceProfile
from lamina.spec.errors import CapacityExceeded, InvalidSplit
from lamina.spec.ids import DeviceId, WorkerName
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings, check_tiling
from support.planner_models import demand_of, device

MIB = 2**20


def splits(num_layers: int, num_devices: int) -> list[tuple[LayerRange, ...]]:
    """Every way to cut."""
    cuts = combinations(range(1, num_layers), num_devices - 1)
    return [tuple(LayerRange(a, b) for a, b in pairwise((0, *cut, num_layers))) for cut in cuts]


def fullest(demand: Demand, devices: list[DeviceProfile], ranges: tuple[LayerRange, ...]) -> float:
    """The largest share of its room that a device is filled to."""
    return max(
        stage.memory.total_bytes / stage.room_bytes if stage.room_bytes else float("inf")
        for stage in plan_stages(demand, devices, ranges)
    )


@settings(max_examples=80, deadline=None)
@given(
    num_layers=st.integers(1, 8),
    frees=st.lists(st.integers(2**17, 2**24), min_size=1, max_size=4),
    widths=st.lists(st.sampled_from([32, 256, 1024]), min_size=8, max_size=8),
    bits=st.sampled_from([4.5, 16.0, 32.0]),
    tied=st.booleans(),
)
def test_no_split_is_better(num_layers: int, frees: list[int], widths: list[int], bits: float, tied: bool) -> None:
    """Against all splits: layers of unequal size, devices of unequal memory, weights that lie in other widths."""
    demand = demand_of(num_layers, widths, tied=tied)
    devices = [device(i, free, bits) for i, free in enumerate(frees)]
    if len(devices) > num_layers:
        with pytest.raises(InvalidSplit, match=f"{len(devices)} devices for {num_layers} layers"):
            partition_by_memory(demand, devices)
        return
    best = min(fullest(demand, devices, ranges) for ranges in splits(num_layers, len(devices)))
    if best > 1:
        with pytest.raises(CapacityExceeded, match=r"[MG]iB needed \(weights .*\), free [MG]iB: w0/0 "):
            partition_by_memory(demand, devices)
        return
    ranges = partition_by_memory(demand, devices)
    check_tiling(num_layers, ranges)
    assert fullest(demand, devices, ranges) <= best + 1e-6


def test_more_memory_gets_more_layers() -> None:
    """P-22: 24 + 12 + 6 GB: about 4 : 2 : 1, whatever the order."""
    demand = demand_of(28, [4096] * 28, hidden=4096, vocab=32000)
    for frees in ((24, 12, 6), (6, 12, 24)):
        ranges = partition_by_memory(demand, [device(i, free * 2**30, 32.0) for i, free in enumerate(frees)])
        counts = [len(part) for part in ranges]
        check_tiling(28, ranges)
        for count, free in zip(counts, frees, strict=True):
            assert abs(count - 28 * free / 42) <= 1.5


def test_one_device_takes_all() -> None:
    demand = demand_of(5, [32] * 5)
    assert partition_by_memory(demand, [device(0, 2**24, 32.0)]) == (LayerRange(0, 5),)


def test_no_device() -> None:
    with pytest.raises(InvalidSplit, match="no device"):
        partition_by_memory(demand_of(5, [32] * 5), [])


def test_the_reserve_is_kept() -> None:
    """A device whose free bytes just hold the stage is refused: RESERVE_SHARE stays free for others."""
    demand = demand_of(2, [32] * 2)
    (stage,) = plan_stages(demand, [device(0, 2**24, 32.0)], [LayerRange(0, 2)])
    needed = stage.memory.total_bytes
    with pytest.raises(CapacityExceeded, match=r"free MiB: w0/0 [\d.]+, less 5% in reserve: [\d.]+ MiB"):
        partition_by_memory(demand, [device(0, needed, 32.0)])
    enough = int(needed / (1 - RESERVE_SHARE)) + 1
    assert len(partition_by_memory(demand, [device(0, enough, 32.0)])) == 1


def test_what_is_missing_is_said() -> None:
    """Each of two devices lacks 1 MiB for its half."""
    demand = demand_of(4, [3000] * 4)
    halves = plan_stages(demand, [device(0, 0, 32.0)] * 2, [LayerRange(0, 2), LayerRange(2, 4)])
    rooms = [int((stage.memory.total_bytes - MIB) / (1 - RESERVE_SHARE)) for stage in halves]
    with pytest.raises(CapacityExceeded, match=r"less 5% in reserve: 2\.0 MiB are missing; add a worker"):
        partition_by_memory(demand, [device(i, room, 32.0) for i, room in enumerate(rooms)])


def test_context_counts() -> None:
    """P-21: the cache of the asked-for tokens is part of the need; more of it does not fit where less did."""
    short = demand_of(4, [32] * 4, num_tokens=1024)
    long = demand_of(4, [32] * 4, num_tokens=200_000)
    devices = [device(0, 4 * MIB, 32.0)]
    assert partition_by_memory(short, devices)
    with pytest.raises(
        CapacityExceeded, match=r"49\.0 MiB needed \(weights 0\.1, cache 48\.8, arena.*a shorter --context"
    ):
        partition_by_memory(long, devices)


def test_a_shorter_context_is_no_advice_where_the_weights_alone_are_too_much() -> None:
    with pytest.raises(CapacityExceeded, match=r"add a worker, or use more --max-memory$"):
        partition_by_memory(demand_of(4, [32] * 4, num_tokens=1024), [device(0, 2**16, 32.0)])


def test_at_least_one_sequence_of_full_context() -> None:
    demand = demand_of(2, [32] * 2, num_tokens=1, settings=StageSettings(max_context=1000))
    assert demand.num_blocks == (63,)


def test_profiles_are_what_the_devices_say() -> None:
    assert device(3, 5, 8.0).id == DeviceId(WorkerName("w3"), 0)
