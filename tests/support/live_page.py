"""The page over a scripted engine, served on a real port; workers that are described but not there."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from lamina.coordinator.api.settings import OPEN, ApiSettings
from lamina.coordinator.cli.http_server import HttpServer, address_of, bind
from lamina.coordinator.cluster.client import WorkerClient
from lamina.coordinator.model_file import ModelFile
from lamina.spec.address import Address
from lamina.spec.device import DeviceProfile, LoadedStage, WorkerProfile
from lamina.spec.errors import WorkerUnreachable
from lamina.spec.ids import DeviceId, Epoch, PlacementId, WorkerName
from lamina.spec.model import LayerRange
from lamina.spec.placement import Placement, StageSpec
from lamina.wire.version import own_version
from support.scripted import CONFIG, Api, Script

Result = TypeVar("Result")
PAGE_CONFIG = replace(CONFIG, max_context=2048, num_blocks=(512,))
PLACEMENT = PlacementId("p1")
MIB = 2**20
GIB = 2**30


@dataclass
class DescribedWorker:
    """Stands for a WorkerClient: it answers with its profile, or, `is_lost`, not at all."""

    profile: WorkerProfile
    address: Address
    is_lost: bool = False

    async def describe(self) -> WorkerProfile:
        if self.is_lost:
            raise WorkerUnreachable(f"worker {self.profile.name} at {self.address}: no connection")
        self.work(steps=40, busy_s=0.5)
        return self.profile

    def work(self, steps: int, busy_s: float) -> None:
        """Its stages have run that much more."""
        more = tuple(
            replace(stage, num_steps=stage.num_steps + steps, busy_s=stage.busy_s + busy_s)
            for stage in self.profile.stages
        )
        self.profile = replace(self.profile, stages=more)


def described_workers(ranges: Sequence[LayerRange]) -> list[DescribedWorker]:
    """One worker per range, unequal in kind and memory."""
    kinds = (
        ("cuda", "NVIDIA GeForce GTX 1080 Ti", "sm_61", 11 * GIB),
        ("cpu", "Intel(R) Core(TM) i9-13900HX CPU", "avx512-vnni", 32 * GIB),
        ("cuda", "NVIDIA GeForce RTX 4080 Laptop GPU", "sm_89", 12 * GIB),
    )
    workers = []
    for index, layers in enumerate(ranges):
        kind, device_name, kernel, total = kinds[index % len(kinds)]
        name = WorkerName(("attic", "nas", "laptop")[index % 3] + (str(index // 3) if index >= 3 else ""))
        weight, cache, arena = len(layers) * 310 * MIB, len(layers) * 64 * MIB, 190 * MIB
        device = DeviceProfile(
            id=DeviceId(name, 0),
            kind=kind,
            name=device_name,
            total_bytes=total,
            free_bytes=int(0.9 * total) - weight - cache - arena,
            kernel=kernel,
            compute_dtype="f32",
            kv_dtypes=("f16",),
            graphs=False,
            threads=8 if kind == "cpu" else 0,
            weight_bits={},
        )
        stage = LoadedStage(
            PLACEMENT, Epoch(1), index, 0, layers, "", b"", weight, cache, arena, True, 100 * index, 0.0, 2
        )
        address = Address(f"192.168.1.{10 + index}", 50051)
        profile = WorkerProfile(own_version(), name, str(address), (device,), (stage,), 60.0)
        workers.append(DescribedWorker(profile, address))
    return workers


def placement_of(workers: Sequence[DescribedWorker]) -> Placement:
    """The placement that these workers describe."""
    specs = tuple(
        StageSpec(stage.stage, worker.profile.devices[stage.device].id, stage.layers)
        for worker in workers
        for stage in worker.profile.stages
    )
    return Placement(PLACEMENT, Epoch(1), specs[-1].layers.stop, specs)


class LivePage:
    """A server in a thread. What touches it runs on its loop, by `call`."""

    def __init__(self, model: ModelFile, script: Script, settings: ApiSettings, step_s: float) -> None:
        self._bound = bind(Address("127.0.0.1", 0))
        self.url = f"http://{address_of(self._bound)}"
        self._started = threading.Event()
        self._arguments = (model, script, settings, step_s)
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        model, script, settings, step_s = self._arguments
        with Api(model, script, config=PAGE_CONFIG, settings=settings) as self.api:
            answer_at_once = self.api.pipeline.next_done

            async def answer_slowly() -> Any:
                await asyncio.sleep(step_s)
                return await answer_at_once()

            async def serve() -> None:
                self._loop = asyncio.get_running_loop()
                self._server = HttpServer(self.api.app, self._bound)
                self._started.set()
                await self._server.run_on_sockets()

            self.api.pipeline.next_done = answer_slowly  # type: ignore[method-assign]
            self.api.run(serve())

    def start(self) -> None:
        """Until the server is about to listen; connections wait in the backlog."""
        self._thread.start()
        assert self._started.wait(10)

    def stop(self) -> None:
        """End the server and its engine."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the server's loop."""

        async def run() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def follow(self, workers: Sequence[DescribedWorker], link_rtts_s: Sequence[float]) -> None:
        """Let the server know these workers; looks at them twice, two seconds apart as it would seem."""
        cluster = self.api.service.cluster

        async def look() -> None:
            cluster.follow([cast(WorkerClient, worker) for worker in workers], placement_of(workers), link_rtts_s)
            await cluster.look()
            cluster._last_s -= 2.0
            await cluster.look()

        asyncio.run_coroutine_threadsafe(look(), self._loop).result(10)

    def look(self) -> None:
        """One more look at the workers."""
        asyncio.run_coroutine_threadsafe(self.api.service.cluster.look(), self._loop).result(10)


@contextmanager
def running_page(
    model: ModelFile, script: Script, settings: ApiSettings = OPEN, step_s: float = 0.0
) -> Iterator[LivePage]:
    """A page that answers by a script, a token every `step_s` seconds."""
    page = LivePage(model, script, settings, step_s)
    page.start()
    try:
        yield page
    finally:
        page.stop()
