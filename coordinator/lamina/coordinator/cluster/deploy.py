"""Bringing a placement up over its workers: load, allocate, link, open. On failure nothing of it stays loaded."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from lamina.coordinator.cluster.client import LoadProgress, StageLoaded, StepsCall, WorkerClient
from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.coordinator.planner.memory import RESERVE_SHARE
from lamina.spec.errors import CapacityExceeded, LaminaError
from lamina.spec.ids import DeviceId, WorkerName
from lamina.spec.model import ModelSpec
from lamina.spec.placement import Placement, StageSettings, StageSpec

Report = Callable[[LoadProgress | StageLoaded], None]
Workers = Mapping[WorkerName, WorkerClient]


async def deploy(
    placement: Placement,
    spec: ModelSpec,
    model_path: str,
    settings: StageSettings,
    workers: Workers,
    report: Report,
    wanted_blocks: int,
) -> Pipeline:
    """Load every stage at once, agree on the cache, link the stages, open the step streams.

    `wanted_blocks` caps the blocks per cache group; fewer are taken where a stage has less room. Raises the first
    stage's failure; the placement is unloaded again everywhere.
    """
    calls: list[StepsCall] = []
    try:
        loaded = await _load_all(placement, spec, model_path, settings, workers, report)
        num_blocks = agree_on_blocks(spec, settings, loaded, wanted_blocks)
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


def agree_on_blocks(
    spec: ModelSpec, settings: StageSettings, loaded: Sequence[StageLoaded], wanted_blocks: int
) -> tuple[int, ...]:
    """Blocks per cache group that every stage can hold. Raises CapacityExceeded if one sequence does not fit.

    Groups get equal numbers: tables are logical and the same for all stages. Stages of one device share what is free
    there, which is what the last of them to load reported.
    """
    by_device: dict[DeviceId, list[StageLoaded]] = {}
    for stage in loaded:
        by_device.setdefault(stage.stage.device, []).append(stage)
    num_blocks = wanted_blocks
    for together in by_device.values():
        room = int(min(stage.free_bytes for stage in together) * (1 - RESERVE_SHARE))
        block_bytes = sum(sum(stage.block_bytes) for stage in together)
        fits = room // max(1, block_bytes)
        if fits < settings.max_blocks_per_seq:
            mib = 2**20
            needed = settings.max_blocks_per_seq * block_bytes
            where = " and ".join(str(stage.stage) for stage in together)
            raise CapacityExceeded(
                f"{where}: a context of {settings.max_context} tokens needs {needed / mib:.1f} MiB of cache,"
                f" {room / mib:.1f} MiB are free after the weights; use a shorter --context or fewer layers there"
            )
        num_blocks = min(num_blocks, fits)
    return (num_blocks,) * len(spec.cache_groups)


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
