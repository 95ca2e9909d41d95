"""Bringing a placement up over its workers: load, allocate, link, open. On failure nothing of it stays loaded."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from lamina.coordinator.cluster.client import LoadProgress, StageLoaded, StepsCall, WorkerClient
from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.coordinator.planner.memory import RESERVE_SHARE, Demand
from lamina.spec.errors import CapacityExceeded, LaminaError
from lamina.spec.ids import DeviceId, WorkerName
from lamina.spec.model import ModelSpec
from lamina.spec.placement import Placement, StageSettings, StageSpec

Report = Callable[[LoadProgress | StageLoaded], None]
Workers = Mapping[WorkerName, WorkerClient]


async def deploy(
    placement: Placement,
    model_path: str,
    workers: Workers,
    report: Report,
    demand: Demand,
) -> Pipeline:
    """Load every stage at once, agree on the cache, link the stages, open the step streams.

    `demand` is for the blocks by cache group; fewer are taken where a stage has less room. Raises the first stage's
    failure; the placement is unloaded again everywhere.
    """
    spec, settings = demand.spec, demand.settings
    calls: list[StepsCall] = []
    try:
        loaded = await _load_all(placement, spec, model_path, settings, workers, report)
        num_blocks = agree_on_blocks(demand, loaded)
        for stage in placement.stages:
            await workers[stage.device.worker].allocate_cache(placement, stage, num_blocks)
        link_rtts_s = await _link_all(placement, workers) if len(placement.stages) > 1 else []
        for stage in placement.stages:
            calls.append(await workers[stage.device.worker].open_steps(placement, stage, settings))
    except BaseException:
        for call in calls:
            call.cancel()
        unloads = [workers[name].unload(placement) for name in {s.device.worker for s in placement.stages}]
        await asyncio.gather(*unloads, return_exceptions=True)
        raise
    return Pipeline(placement, settings, num_blocks, workers, calls, link_rtts_s)


def agree_on_blocks(demand: Demand, loaded: Sequence[StageLoaded]) -> tuple[int, ...]:
    """Blocks by cache group that every stage can hold. Raises CapacityExceeded if one sequence does not fit.

    Tables are logical and the same for all stages. Groups that keep all positions get equal numbers; those with a
    window get what is wanted for them, but no more than the others. Stages of one device share what is free there,
    which is what the last of them to load reported.
    """
    settings, wanted = demand.settings, demand.num_blocks
    num_blocks = max(wanted)
    by_device: dict[DeviceId, list[StageLoaded]] = {}
    for stage in loaded:
        by_device.setdefault(stage.stage.device, []).append(stage)
    for together in by_device.values():
        room = int(min(stage.free_bytes for stage in together) * (1 - RESERVE_SHARE))
        by_group = [sum(sizes) for sizes in zip(*(stage.block_bytes for stage in together), strict=True)]
        fits = _most_blocks(room, by_group, wanted)
        if fits < settings.max_blocks_per_seq:
            mib = 2**20
            counts = (min(count, settings.max_blocks_per_seq) for count in wanted)
            needed = sum(count * size for count, size in zip(counts, by_group, strict=True))
            where = " and ".join(str(stage.stage) for stage in together)
            raise CapacityExceeded(
                f"{where}: a context of {settings.max_context} tokens needs {needed / mib:.1f} MiB of cache,"
                f" {room / mib:.1f} MiB are free after the weights; use a shorter --context or fewer layers there"
            )
        num_blocks = min(num_blocks, fits)
    return tuple(min(num_blocks, count) for count in wanted)


def _most_blocks(room: int, block_bytes: Sequence[int], wanted: Sequence[int]) -> int:
    """The largest number such that the cache fits if each group has so many blocks, but none more than `wanted`."""
    fits, most = 0, max(wanted)
    while fits < most:
        middle = (fits + most + 1) // 2
        if sum(min(middle, count) * size for count, size in zip(wanted, block_bytes, strict=True)) <= room:
            fits = middle
        else:
            most = middle - 1
    return fits


async def _load_all(
    placement: Placement,
    spec: ModelSpec,
    model_path: str,
    settings: StageSettings,
    workers: Workers,
    report: Report,
) -> list[StageLoaded]:
    async def load(stage: StageSpec) -> StageLoaded:
        worker = workers[stage.device.worker]
        async for progress in worker.load_stage(placement, stage, spec, model_path, settings):
            report(progress)
            if isinstance(progress, StageLoaded):
                return progress
        raise LaminaError(f"{worker.who}: loading {stage} ended without an answer")

    tasks = [asyncio.create_task(load(stage)) for stage in placement.stages]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _link_all(placement: Placement, workers: Workers) -> list[float]:
    """Round trips of the edges, seconds, in stage order."""
    links = []
    for stage in placement.stages:
        following = placement.stages[(stage.index + 1) % len(placement.stages)]
        address = workers[following.device.worker].reachable_address
        worker = workers[stage.device.worker]
        links.append(worker.link_stage(placement, stage, following.index, address))
    return list(await asyncio.gather(*links))
