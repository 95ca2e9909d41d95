"""Loads that overlap, are cancelled, or meet the end of the worker: no byte and no stage is left behind."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lamina.coordinator.cluster.client import LoadProgress, StageLoaded, WorkerClient
from lamina.rpc_worker.daemon import Daemon
from lamina.spec.errors import InvalidConfig, LaminaError, StaleEpoch, Unavailable
from lamina.spec.gguf import read_gguf
from lamina.spec.placement import Placement
from lamina.v1 import worker_pb2 as wpb
from lamina.v1 import worker_pb2_grpc
from lamina.wire.channel import connect
from lamina.wire.profiles import settings_to_message, version_to_message
from lamina.wire.status import ERROR_KEY
from lamina.wire.version import own_version
from support.loopback import (
    DEADLINE_S,
    SETTINGS,
    Cluster,
    Talk,
    TinyModel,
    eventually,
    failure_of,
    run_scene,
    running_worker,
)

PROMPT = [1, 40, 7]


def used_bytes(daemon: Daemon) -> int:
    """What a worker's first device has handed out."""
    return int(daemon.devices[0].backend.ledger.used_bytes)  # type: ignore[attr-defined]


@contextmanager
def slow(daemon: Daemon, method: str, seconds: float) -> Iterator[None]:
    """Each call of a backend method takes this long."""
    backend = daemon.devices[0].backend
    real = getattr(backend, method)

    def delayed(*args: object, **kwargs: object) -> object:
        time.sleep(seconds)
        return real(*args, **kwargs)

    setattr(backend, method, delayed)
    try:
        yield
    finally:
        delattr(backend, method)


async def load(cluster: Cluster, placement: Placement, seen: list[object] | None = None) -> StageLoaded:
    """Load stage 0 of a placement on worker a."""
    worker = next(iter(cluster.workers.values()))
    stage, model = placement.stages[0], cluster.model
    async for item in worker.load_stage(placement, stage, model.spec, str(model.path), cluster.settings):
        if seen is not None:
            seen.append(item)
        if isinstance(item, StageLoaded):
            return item
    raise AssertionError("no answer")


def test_progress_is_reported_while_loading(model: TinyModel) -> None:
    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            seen: list[object] = []
            with slow(a, "load_weight", 0.03):
                await load(cluster, cluster.placement("p", 1, (), ("a",)), seen)
            counts = [item.done_bytes for item in seen if isinstance(item, LoadProgress)]
            assert len(set(counts)) >= 3
            assert counts == sorted(counts)
            total = sum(tensor.num_bytes for tensor in read_gguf(model.path).tensors.values())
            assert {item.total_bytes for item in seen if isinstance(item, LoadProgress)} <= {0, total}

    run_scene(scene)


def test_a_cancelled_load_frees_everything(model: TinyModel) -> None:
    """The client goes away in mid-load: the load stops between two tensors, and the next one finds all memory."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            seen: list[object] = []
            with slow(a, "load_weight", 0.05):
                loading = asyncio.create_task(load(cluster, cluster.placement("p", 1, (), ("a",)), seen))
                await eventually(lambda: used_bytes(a) > 0 and bool(seen))
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
                await eventually(lambda: used_bytes(a) == 0)
                assert await cluster.stages("a") == ()
            pipeline = await cluster.deploy(id_="q")
            assert len(await Talk(pipeline, PROMPT).run(2)) == 2

    run_scene(scene)


def test_a_load_cancelled_while_it_waits_for_another(model: TinyModel) -> None:
    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            with slow(a, "load_weight", 0.03):
                first = asyncio.create_task(load(cluster, cluster.placement("p", 1, (), ("a",))))
                await eventually(lambda: used_bytes(a) > 0)
                second = asyncio.create_task(load(cluster, cluster.placement("q", 1, (), ("a",))))
                await asyncio.sleep(0.1)
                second.cancel()
                await first
            await asyncio.gather(second, return_exceptions=True)
            assert [stage.placement for stage in await cluster.stages("a")] == ["p"]

    run_scene(scene)


def test_the_same_stage_twice_at_once(model: TinyModel) -> None:
    """One wins, the other is refused as stale; there is one stage's memory in use."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            placement = cluster.placement("p", 1, (), ("a",))
            outcomes = await asyncio.gather(load(cluster, placement), load(cluster, placement), return_exceptions=True)
            refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            assert [type(error) for error in refused] == [StaleEpoch]
            (stage,) = await cluster.stages("a")
            assert used_bytes(a) == stage.weight_bytes + stage.arena_bytes

    run_scene(scene)


def test_a_failed_deployment_leaves_nothing(model: TinyModel) -> None:
    """Worker b cannot hold its half: what worker a loaded meanwhile is freed again."""

    async def scene() -> None:
        async with (
            running_worker("a") as a,
            running_worker("b", max_memory_bytes=2**16) as b,
            Cluster.over(model, a, b) as cluster,
        ):
            with pytest.raises(LaminaError, match=r"worker b at .*: layers 2-3 need"):
                await cluster.deploy((2,), ("a", "b"))
            assert await cluster.stages("a") == ()
            assert used_bytes(a) == 0

    run_scene(scene)


def test_the_worker_stops_during_a_load(model: TinyModel) -> None:
    """SIGTERM in mid-load: the load ends at the next tensor, its client hears why, and stopping takes no time."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            with slow(a, "load_weight", 0.2):  # 6 s in all
                loading = asyncio.create_task(load(cluster, cluster.placement("p", 1, (), ("a",))))
                await eventually(lambda: used_bytes(a) > 0)
                start = time.monotonic()
                await a.stop()
                assert time.monotonic() - start < 2
            with pytest.raises(Unavailable, match="loading layers 0-3 was stopped"):
                await loading
            assert used_bytes(a) == 0

    run_scene(scene)


def test_the_worker_stops_during_a_long_step(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is deep in a step is left behind after a deadline, and the event loop turns all the while."""
    monkeypatch.setattr("lamina.rpc_worker.daemon._STOP_DEADLINE_S", 0.3)

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            pipeline = await cluster.deploy()
            with slow(a, "replay", 1.5):
                talk = Talk(pipeline, PROMPT)
                talk.add()
                talk.issue()
                await asyncio.sleep(0.2)
                ticks = 0

                async def tick() -> None:
                    nonlocal ticks
                    while True:
                        await asyncio.sleep(0.01)
                        ticks += 1

                ticking = asyncio.create_task(tick())
                start = time.monotonic()
                await a.stop()
                assert time.monotonic() - start < 1.2
                assert ticks >= 10
                ticking.cancel()
                await asyncio.sleep(1.6)  # the thread is through by now

    run_scene(scene)


def test_unload_while_steps_run(model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever unloads a running placement ends it with a reason; the memory comes back when the step is through.

    To the worker's log that is no error.
    """

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            pipeline = await cluster.deploy()
            with slow(a, "replay", 0.1):
                talk = Talk(pipeline, PROMPT)
                talk.add()
                for _ in range(5):
                    talk.issue()
                worker: WorkerClient = next(iter(cluster.workers.values()))
                assert await worker.unload(pipeline.placement) == 1
            error = await failure_of(pipeline)
            assert (type(error), str(error)) == (Unavailable, "a (layers 0-3): it was unloaded")
            assert used_bytes(a) == 0
            again = await cluster.deploy()  # the same name and epoch are free again
            assert len(await Talk(again, PROMPT).run(2)) == 2

    run_scene(scene)
    grave = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert [line for line in grave if "unloaded" in line] == []


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"device": 5}, "InvalidRequest", "worker a has 1 device(s), device 5 was asked for"),
        ({"stage": 1}, "InvalidRequest", "stage 1 of 1 does not exist"),
        ({"num_layers": 0}, "InvalidSplit", "stage 0 is to have 0 layers"),
        ({"num_layers": 5}, "InvalidSplit", "layers 0-4 do not exist"),
        ({"num_layers": 2**32 - 1}, "InvalidSplit", "do not exist"),
        ({"first_layer": 1, "num_layers": 3}, "InvalidSplit", "stage 0 of 1 cannot have layers 1-3"),
        ({"num_layers": 3}, "InvalidSplit", "stage 0 of 1 cannot have layers 0-2"),
        ({"num_stages": 2}, "InvalidSplit", "stage 0 of 2 cannot have layers 0-3"),
        ({"model_digest": ""}, "InvalidCheckpoint", "is not the coordinator's model"),
        ({"model_path": ""}, "InvalidCheckpoint", "model file not found here"),
        ({"model_path": "/"}, "InvalidCheckpoint", "model file not found here"),
        ({"model_path": "x\0y"}, "InvalidCheckpoint", "model file not found here"),
        ({"model_path": "/" + "漢" * 5000}, "InvalidCheckpoint", "model file not found here"),
        ({"model_digest": "漢\n" * 5000}, "InvalidCheckpoint", "is not the coordinator's model"),
    ],
    ids=range(14),
)
def test_impossible_requests(model: TinyModel, change: dict[str, object], kind: str, said: str) -> None:
    """Refused with a type and a reason before anything is read or evicted."""

    async def scene() -> None:
        async with running_worker("a") as a:
            channel = await connect(a.settings.listen)
            request = wpb.LoadStageRequest(
                version=version_to_message(own_version()),
                placement="p",
                epoch=1,
                num_stages=1,
                model_path=str(model.path),
                model_digest=model.spec.digest,
                num_layers=4,
                settings=settings_to_message(SETTINGS),
            )
            for name, value in change.items():
                setattr(request, name, value)
            call = worker_pb2_grpc.WorkerStub(channel).LoadStage(request)
            async with asyncio.timeout(DEADLINE_S):
                assert said in (await call.details() or "")
            assert dict(await call.trailing_metadata() or ()).get(ERROR_KEY) == kind
            assert used_bytes(a) == 0
            await channel.close()

    run_scene(scene)


def test_frames_that_no_message_holds(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a byte is read, where the stage has a neighbour; a model on one stage sends none."""
    monkeypatch.setattr("lamina.wire.frames.MAX_PAYLOAD_BYTES", 2**20)  # steps of so small a model never fill 64 MiB
    settings = replace(SETTINGS, max_rows=2**12 + 1)  # of 64 float32 values

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a, settings=settings) as cluster:
            with pytest.raises(InvalidConfig, match=r"4097 rows x 64 f32 .* a --max-rows of at most 4096$"):
                await load(cluster, cluster.placement("p", 1, (2,), ("a", "a")))
            assert used_bytes(a) == 0

    run_scene(scene)


def test_describe_answers_during_a_load(model: TinyModel) -> None:
    """A load holds the device for minutes; the cluster's page must not wait for it. Afterwards the figures are new."""

    async def scene() -> None:
        async with running_worker("a", max_memory_bytes=2**30) as a, Cluster.over(model, a) as cluster:
            worker = next(iter(cluster.workers.values()))
            with slow(a, "load_weight", 0.1):  # 3 s in all
                loading = asyncio.create_task(load(cluster, cluster.placement("p", 1, (), ("a",))))
                await eventually(lambda: used_bytes(a) > 0)
                profile = await worker.describe()
                assert not loading.done()
                assert (profile.devices[0].free_bytes, profile.stages) == (2**30, ())
                loaded = await loading
            profile = await worker.describe()
            (stage,) = profile.stages
            assert profile.devices[0].free_bytes == loaded.free_bytes == 2**30 - used_bytes(a)
            assert stage.weight_bytes + stage.arena_bytes == used_bytes(a)

    run_scene(scene)
