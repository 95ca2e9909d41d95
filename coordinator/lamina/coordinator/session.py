"""A model brought up over workers: dial, plan the split, load, start the engine. The composition root of the CLI."""

import asyncio
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lamina.coordinator.cluster.client import LoadProgress, StageLoaded, WorkerClient
from lamina.coordinator.cluster.deploy import deploy
from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.coordinator.engine.engine import Engine
from lamina.coordinator.engine.policy import ADMISSIONS, POLICIES, SchedulerConfig
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.planner.memory import Demand, StagePlan, check_fits, plan_stages
from lamina.coordinator.planner.partition import partition_by_memory
from lamina.coordinator.planner.split_file import read_split_file
from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig, InvalidSplit, WorkerUnreachable
from lamina.spec.ids import DeviceId, Epoch, PlacementId, WorkerName
from lamina.spec.model import LayerRange
from lamina.spec.placement import Placement, StageSettings, StageSpec, check_tiling
from lamina.wire.frames import check_frames_fit


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """How the layers are to be split: by free memory, by `ranges` in worker order, or by a file."""

    ranges: tuple[LayerRange, ...] | None = None
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.ranges is not None and self.file is not None:
            raise InvalidConfig("--split and --split-file exclude each other")


@dataclass(frozen=True, slots=True)
class SchedulingChoice:
    """What the operator may choose of the scheduler's policies; see SchedulerConfig."""

    admission: str = "optimistic"
    policy: str = "fcfs"
    prefix_caching: bool = True
    prefill_chunk_tokens: int = 512
    max_waiting: int = 256

    def __post_init__(self) -> None:
        for option, value, known in (("admission", self.admission, ADMISSIONS), ("policy", self.policy, POLICIES)):
            if value not in known:
                raise InvalidConfig(f"--{option} {value!r} is none of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What a session is asked for."""

    workers: tuple[Address, ...]
    split: SplitChoice
    stage: StageSettings
    num_tokens: int  # cache capacity over all sequences
    gives_back: bool = True  # whether steps are planned such that layers with a window keep little more than that
    scheduling: SchedulingChoice = SchedulingChoice()


@dataclass(frozen=True, slots=True)
class Session:
    """A running placement."""

    model: ModelFile
    stages: tuple[StagePlan, ...]
    engine: Engine
    pipeline: Pipeline
    workers: tuple[WorkerClient, ...]


# Rows below which a device loses its rate, and those in whose time it does what a step costs beside its rows: a GPU
# decodes every weight for its large products, 5 ms where 512 rows take 16 (docs/performance.md).
_MIN_PREFILL_ROWS = defaultdict(lambda: 24, cuda=512)
_STEP_COST_ROWS = defaultdict(lambda: 8, cuda=250)
# Steps of one sequence under way. A GPU has two, and the answer to the third takes as long to come back as a small
# model's step; each costs a row once the sequence has ended, which is dear on a CPU only.
_RUN_AHEAD = defaultdict(lambda: 2, cuda=3)

Report = Callable[[LoadProgress | StageLoaded], None]


async def dial_all(addresses: Sequence[Address]) -> list[WorkerClient]:
    """Connected workers in order; if any fails all are dropped again.

    Raises InvalidConfig for equal names, VersionMismatch, WorkerUnreachable with all that do not answer.
    """
    results = await asyncio.gather(*(WorkerClient.dial(a) for a in addresses), return_exceptions=True)
    workers = [result for result in results if isinstance(result, WorkerClient)]
    failures = [result for result in results if isinstance(result, BaseException)]
    silent = [a for a, result in zip(addresses, results, strict=True) if isinstance(result, WorkerUnreachable)]
    if len(silent) == len(failures) > 1:
        failures = [WorkerUnreachable(f"{failures[0]} (nobody answers at {', '.join(map(str, silent))})")]
    failures.sort(key=lambda failure: isinstance(failure, WorkerUnreachable))  # what waiting does not cure comes first
    names = [worker.profile.name for worker in workers]
    if not failures and len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        where = " and ".join(str(a) for a, name in zip(addresses, names, strict=True) if name == twice)
        failures.append(InvalidConfig(f"the workers at {where} are called {twice!r}: give each its own --name"))
    if failures:
        await asyncio.gather(*(worker.close() for worker in workers))
        raise failures[0]
    return workers


def demand_of(model: ModelFile, settings: SessionSettings) -> Demand:
    """What is to be held for the model."""
    return Demand(model.spec, model.tensors, settings.stage, settings.num_tokens, settings.gives_back)


def choose_split(model: ModelFile, settings: SessionSettings, workers: Sequence[WorkerClient]) -> tuple[StagePlan, ...]:
    """The stages in order; nothing is adjusted silently.

    Raises InvalidSplit, InvalidConfig or CapacityExceeded, with numbers.
    """
    demand = demand_of(model, settings)
    devices = [device for worker in workers for device in worker.profile.devices]
    ranges = settings.split.ranges
    if settings.split.file is not None:
        entries = read_split_file(settings.split.file)
        by_address = {worker.address: worker for worker in workers}
        devices = []
        for entry in entries:
            profiles = by_address[entry.address].profile.devices
            if entry.device >= len(profiles):
                where = f"{settings.split.file}:{entry.line}"
                raise InvalidConfig(
                    f"{where}: worker {entry.address} has {len(profiles)} device(s), not {entry.device}"
                )
            devices.append(profiles[entry.device])
        ranges = tuple(entry.layers for entry in entries)
    if ranges is None:
        ranges = partition_by_memory(demand, devices)
    elif len(ranges) > len(devices):
        raise InvalidSplit(f"--split names {len(ranges)} ranges, the workers have {len(devices)} devices")
    check_tiling(model.spec.num_layers, ranges)
    if len(ranges) > 1:
        check_frames_fit(settings.stage, model.spec.hidden)
    stages = plan_stages(demand, devices[: len(ranges)], ranges)
    check_fits(stages)
    return stages


def addresses_of(settings: SessionSettings) -> tuple[Address, ...]:
    """The workers to dial: those of the split file if there is one, also when LAMINA_WORKERS is set, or those given."""
    if settings.split.file is None:
        return settings.workers
    return tuple(dict.fromkeys(entry.address for entry in read_split_file(settings.split.file)))


@asynccontextmanager
async def open_session(
    model: ModelFile,
    settings: SessionSettings,
    on_planned: Callable[[tuple[StagePlan, ...]], None],
    report: Report,
    *,
    keeps_requests: bool = False,
    suspended: Engine | None = None,
) -> AsyncIterator[Session]:
    """Bring the model up; on leaving, however that happens, its stages are unloaded and connections closed.

    With `keeps_requests` a lost pipeline leaves the engine suspended and the other stages loaded: given as `suspended`
    to the next session, it goes on in the placement's next epoch.
    """
    async with _dialled(settings) as clients:
        key = suspended.claim_placement() if suspended is not None else None
        stages, pipeline = await _bring_up(model, settings, clients, on_planned, report, key)
        config = _scheduler_config(settings, stages, pipeline, demand_of(model, settings).windows)
        if suspended is not None and suspended.is_suspended:
            engine = suspended
            engine.resume(pipeline, config)
        else:
            engine = Engine(Scheduler(config, pipeline.placement.epoch), pipeline, keeps_requests=keeps_requests)
            engine.start()
        try:
            yield Session(model, stages, engine, pipeline, tuple(clients))
        finally:
            await asyncio.shield(engine.close(unload=True))


@asynccontextmanager
async def open_pipeline(
    model: ModelFile,
    settings: SessionSettings,
    on_planned: Callable[[tuple[StagePlan, ...]], None],
    report: Report,
) -> AsyncIterator[Pipeline]:
    """The same without an engine, for whoever plans the steps itself."""
    async with _dialled(settings) as clients:
        _, pipeline = await _bring_up(model, settings, clients, on_planned, report)
        try:
            yield pipeline
        finally:
            await asyncio.shield(pipeline.close(unload=True))


@asynccontextmanager
async def _dialled(settings: SessionSettings) -> AsyncIterator[list[WorkerClient]]:
    clients = await dial_all(addresses_of(settings))
    try:
        yield clients
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def _bring_up(
    model: ModelFile,
    settings: SessionSettings,
    clients: Sequence[WorkerClient],
    on_planned: Callable[[tuple[StagePlan, ...]], None],
    report: Report,
    key: tuple[PlacementId, Epoch] | None = None,
) -> tuple[tuple[StagePlan, ...], Pipeline]:
    """Plan and load; in a later epoch of a placement workers adopt what they still hold of it. None: a new one."""
    stages = choose_split(model, settings, clients)
    on_planned(stages)
    id_, epoch = key or (PlacementId(uuid.uuid4().hex[:12]), Epoch(1))
    placement = Placement(
        id_,
        epoch,
        model.spec.num_layers,
        tuple(StageSpec(i, stage.device.id, stage.layers) for i, stage in enumerate(stages)),
    )
    by_name: dict[WorkerName, WorkerClient] = {client.profile.name: client for client in clients}
    pipeline = await deploy(placement, str(model.path), by_name, report, demand_of(model, settings))
    return stages, pipeline


def pipeline_width(stages: Sequence[StagePlan]) -> float:
    """How many equal stages would overlap as much in prefill: all layers over those of the busiest device.

    1 if all are of one device. Layers and devices are taken to be alike, and the head is left out: it computes one row.
    """
    num_layers: Counter[DeviceId] = Counter()
    for stage in stages:
        num_layers[stage.device.id] += len(stage.layers)
    return num_layers.total() / max(num_layers.values())


def _scheduler_config(
    settings: SessionSettings, stages: Sequence[StagePlan], pipeline: Pipeline, windows: tuple[int | None, ...]
) -> SchedulerConfig:
    return SchedulerConfig(
        num_stages=pipeline.num_stages,
        max_rows=settings.stage.max_rows,
        max_seqs=settings.stage.max_seqs,
        max_logit_rows=settings.stage.max_logit_rows,
        max_context=settings.stage.max_context,
        num_blocks=pipeline.num_blocks,
        windows=windows,
        pipeline_width=pipeline_width(stages),
        min_prefill_rows=max(_MIN_PREFILL_ROWS[stage.device.kind] for stage in stages),
        step_cost_rows=max(_STEP_COST_ROWS[stage.device.kind] for stage in stages),
        run_ahead=min(_RUN_AHEAD[stage.device.kind] for stage in stages),
        **asdict(settings.scheduling),
    )
