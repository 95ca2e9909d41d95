"""Workers and a coordinator's side of them in one event loop: real gRPC servers on loopback, real step plans.

`running_worker` serves a daemon, `Cluster` dials several and brings placements up, `Talk` is one sequence driven by
hand. No scheduler and no engine: a test says which step is issued when.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.coordinator.cluster.client import LoadProgress, StageLoaded, WorkerClient
from lamina.coordinator.cluster.deploy import deploy
from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.coordinator.planner.memory import Demand
from lamina.rpc_worker.daemon import Daemon
from lamina.rpc_worker.settings import WorkerSettings
from lamina.spec.address import Address
from lamina.spec.checkpoint import TensorIndex
from lamina.spec.device import LoadedStage
from lamina.spec.digest import model_digest
from lamina.spec.errors import LaminaError
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.ids import BlockId, DeviceId, Epoch, PlacementId, SeqId, StepId, WorkerName
from lamina.spec.model import LayerRange, ModelSpec
from lamina.spec.placement import Placement, StageSettings, StageSpec
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import BLOCK_TOKENS, AddSequence, FromSample, RemoveSequence, SeqSlice, StepDone, StepPlan, Tokens

SETTINGS = StageSettings(max_rows=64, max_seqs=4, max_logit_rows=4, max_context=128, kv_dtype="f32")
NUM_BLOCKS = 4 * SETTINGS.max_blocks_per_seq
DEADLINE_S = 20.0


@dataclass(frozen=True)
class TinyModel:
    """A model file with its description."""

    path: Path
    spec: ModelSpec

    @classmethod
    def open(cls, path: Path) -> "TinyModel":
        file = read_gguf(path)
        return cls(path, model_spec(file, model_digest(file)))


@asynccontextmanager
async def running_worker(
    name: str,
    devices: tuple[str, ...] = ("reference",),
    max_memory_bytes: int | None = None,
    model_folders: tuple[Path, ...] = (),
    edge_port: int | None = 0,
) -> AsyncIterator[Daemon]:
    """A worker on a free loopback port. Stopping it a second time does nothing."""
    settings = WorkerSettings(
        name,
        devices,
        Address("127.0.0.1", 0),
        num_threads=1,
        max_memory_bytes=max_memory_bytes,
        model_folders=model_folders,
        edge_port=edge_port,
    )
    daemon = await Daemon.start(settings)
    try:
        yield daemon
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await daemon.stop()


@dataclass
class Cluster:
    """A coordinator's connections to some workers."""

    model: TinyModel
    workers: dict[WorkerName, WorkerClient]
    settings: StageSettings = SETTINGS
    progress: list[LoadProgress | StageLoaded] = field(default_factory=list)
    pipelines: list[Pipeline] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def over(
        cls, model: TinyModel, *daemons: Daemon, settings: StageSettings = SETTINGS
    ) -> "AsyncIterator[Cluster]":
        """Dial the daemons; on leaving, pipelines and connections are closed."""
        clients = [await WorkerClient.dial(daemon.settings.listen) for daemon in daemons]
        cluster = cls(model, {client.profile.name: client for client in clients}, settings)
        try:
            yield cluster
        finally:
            async with asyncio.timeout(DEADLINE_S):
                for pipeline in cluster.pipelines:
                    await pipeline.close(unload=False)
                for client in clients:
                    await client.close()

    def placement(self, id_: str, epoch: int, cuts: Sequence[int], devices: Sequence[str]) -> Placement:
        """`cuts` are the first layers of the second and later stages, `devices` are like "a/0"."""
        bounds = [0, *cuts, self.model.spec.num_layers]
        stages = []
        for index, device in enumerate(devices):
            worker, _, number = device.partition("/")
            layers = LayerRange(bounds[index], bounds[index + 1])
            stages.append(StageSpec(index, DeviceId(WorkerName(worker), int(number or 0)), layers))
        return Placement(PlacementId(id_), Epoch(epoch), self.model.spec.num_layers, tuple(stages))

    @property
    def demand(self) -> Demand:
        """NUM_BLOCKS of every cache group, for tests that plan their own steps."""
        return Demand(self.model.spec, TensorIndex(()), self.settings, NUM_BLOCKS * BLOCK_TOKENS, gives_back=False)

    async def deploy(
        self, cuts: Sequence[int] = (), devices: Sequence[str] = ("a",), *, id_: str = "p", epoch: int = 1
    ) -> Pipeline:
        """A placement up and ready."""
        placement = self.placement(id_, epoch, cuts, devices)
        async with asyncio.timeout(DEADLINE_S):
            pipeline = await deploy(
                placement,
                str(self.model.path),
                self.workers,
                self.progress.append,
                self.demand,
            )
        self.pipelines.append(pipeline)
        return pipeline

    async def stages(self, worker: str) -> tuple[LoadedStage, ...]:
        """What a worker says it holds."""
        return (await self.workers[WorkerName(worker)].describe()).stages

    async def until_orphaned(self, worker: str) -> None:
        """Wait until nobody controls a stage there."""
        async with asyncio.timeout(DEADLINE_S):
            while any(stage.controlled for stage in await self.stages(worker)):
                await asyncio.sleep(0.01)


async def next_done(pipeline: Pipeline) -> StepDone:
    """The next answer, within a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        return await pipeline.next_done()


async def failure_of(pipeline: Pipeline) -> LaminaError:
    """What ends the pipeline; answers before it are skipped."""
    try:
        while True:
            await next_done(pipeline)
    except LaminaError as error:
        return error


@dataclass
class Talk:
    """One sequence of one pipeline. Its blocks are those of row `seq` of the pool; steps are the pipeline's own."""

    pipeline: Pipeline
    prompt: Sequence[int]
    seq: int = 0
    max_tokens: int = 100
    sampling: SamplingParams = field(default_factory=SamplingParams)
    first_step: int = 0
    tokens: list[int] = field(default_factory=list)
    num_issued: int = 0

    def add(self) -> None:
        """Make the sequence known to the last stage."""
        add = AddSequence(SeqId(self.seq), self.sampling, tuple(self.prompt), frozenset(), self.max_tokens)
        self.pipeline.add_sequence(add)

    def issue(self) -> None:
        """The prompt as one step, then one sampled token a step, ahead of the answers."""
        step = self.first_step + self.num_issued
        pos = len(self.prompt) + self.num_issued - 1 if self.num_issued else 0
        source = FromSample(StepId(step - 1), 0) if self.num_issued else Tokens(tuple(self.prompt))
        end = pos + (1 if self.num_issued else len(self.prompt))
        first = self.seq * self.pipeline.settings.max_blocks_per_seq
        held, needed = -(-pos // BLOCK_TOKENS), -(-end // BLOCK_TOKENS)
        blocks = tuple(BlockId(first + block) for block in range(held, needed))
        piece = SeqSlice(SeqId(self.seq), pos, end - pos, source, (blocks,), True)
        self.pipeline.issue(StepPlan(self.pipeline.placement.epoch, StepId(step), (piece,)))
        self.num_issued += 1

    def take(self, done: StepDone) -> None:
        """Remember the answer's tokens."""
        self.tokens += [token.token for token in done.tokens if token.seq == self.seq]

    async def run(self, num_tokens: int, *, ahead: int = 3) -> list[int]:
        """Generate, `ahead` steps ahead of the answers; forget the sequence; its tokens."""
        self.add()
        while len(self.tokens) < num_tokens:
            while self.num_issued < num_tokens and self.num_issued - len(self.tokens) < ahead:
                self.issue()
            self.take(await next_done(self.pipeline))
        self.pipeline.remove_sequence(RemoveSequence(SeqId(self.seq)))
        return self.tokens


async def eventually(check: Callable[[], bool]) -> None:
    """Wait until `check` holds. Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE_S):
        while not check():
            await asyncio.sleep(0.01)


def run_scene(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test in a loop of its own. Afterwards no task may be left, and no exception may have been lost."""
    unhandled: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await scene()
        own = asyncio.current_task()
        await eventually(lambda: asyncio.all_tasks() <= {own})

    asyncio.run(main())
    gc.collect()
    assert unhandled == []
