"""Stages that outlive their coordinator: adopted without reading, or evicted; whoever comes late is refused."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lamina.coordinator.cluster.client import LoadProgress
from lamina.rpc_worker.daemon import Daemon
from lamina.spec.errors import CapacityExceeded, InvalidCheckpoint, InvalidRequest, StaleEpoch, Unavailable
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.v1 import step_pb2 as pb
from lamina.v1 import worker_pb2_grpc
from lamina.wire.channel import connect
from lamina.wire.status import ERROR_KEY
from support.loopback import SETTINGS, Cluster, Talk, TinyModel, run_scene, running_worker

PROMPT = [1, 40, 7, 99, 250, 3, 17]
Says = Callable[[Sequence[int], int], list[int]]


def used_bytes(daemon: Daemon) -> int:
    """What a worker's first device has handed out."""
    return int(daemon.devices[0].backend.ledger.used_bytes)  # type: ignore[attr-defined]


@pytest.fixture
def passing_model(model: TinyModel, tmp_path: Path) -> TinyModel:
    """A copy of the model that a test may delete."""
    return TinyModel.open(Path(shutil.copy(model.path, tmp_path / "passing.gguf")))


@pytest.mark.parametrize(("id_", "epoch"), [("q", 1), ("p", 2)], ids=["new placement", "next epoch"])
def test_orphans_are_adopted_without_reading(
    passing_model: TinyModel, whole_model_says: Says, id_: str, epoch: int
) -> None:
    """The file is gone, and still the next coordinator gets its stages; no byte is allocated beyond the first time."""

    async def scene() -> None:
        async with running_worker("a") as a, running_worker("b") as b:
            async with Cluster.over(passing_model, a, b) as first:
                pipeline = await first.deploy((2,), ("a", "b"))
                await Talk(pipeline, [5, 6, 7]).run(3)
                used = used_bytes(a), used_bytes(b)
            async with Cluster.over(passing_model, a, b) as second:
                await second.until_orphaned("a")
                await second.until_orphaned("b")
                passing_model.path.unlink()
                pipeline = await second.deploy((2,), ("a", "b"), id_=id_, epoch=epoch)
                assert [p.total_bytes for p in second.progress if isinstance(p, LoadProgress)] in ([], [1], [1, 1])
                (stage,) = await second.stages("a")
                assert (stage.placement, stage.epoch) == (id_, epoch)
                assert (used_bytes(a), used_bytes(b)) == used
                assert await Talk(pipeline, PROMPT).run(12) == whole_model_says(PROMPT, 12)

    run_scene(scene)


def test_old_names_are_refused_after_adoption(model: TinyModel) -> None:
    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            worker = cluster.workers[next(iter(cluster.workers))]
            old = await cluster.deploy()
            await old.close(unload=False)
            await cluster.until_orphaned("a")
            new = await cluster.deploy(epoch=2)
            stage = old.placement.stages[0]
            with pytest.raises(StaleEpoch, match="epoch 1 of p#0 is refused, the stage's epoch is 2"):
                await worker.open_steps(old.placement, stage, SETTINGS)
            with pytest.raises(StaleEpoch):
                await worker.allocate_cache(old.placement, stage, (8,))
            with pytest.raises(StaleEpoch):
                await worker.link_stage(old.placement, stage, 0, worker.address)
            with pytest.raises(StaleEpoch):
                await worker.prepare_grammar(old.placement, stage, "{}")
            with pytest.raises(StaleEpoch, match="p#0 is in epoch 2 already"):
                await cluster.deploy(epoch=1)
            assert len(await Talk(new, PROMPT).run(3)) == 3

    run_scene(scene)


def test_an_old_neighbour_cannot_reach_an_adopted_stage(model: TinyModel, whole_model_says: Says) -> None:
    """P-12: a Frames stream opened to the old placement must not feed the new one, whose epoch has the same number."""

    async def scene() -> None:
        async with running_worker("a") as a, running_worker("b") as b, Cluster.over(model, a, b) as cluster:
            old = await cluster.deploy((2,), ("a", "b"), id_="p")
            channel = await connect(b.settings.listen)
            call = worker_pb2_grpc.WorkerStub(channel).Frames()
            opening = pb.FramesOpen(placement="p", epoch=1, from_stage=0, to_stage=1)
            await call.write(pb.FramesRequest(open=opening))
            assert (await call.read()).HasField("opened")  # type: ignore[union-attr]
            await old.close(unload=False)
            await cluster.until_orphaned("b")
            new = await cluster.deploy((2,), ("a", "b"), id_="q")
            poison = pb.Frame(epoch=1, step=0, dtype=pb.FRAME_DTYPE_F32, rows=len(PROMPT), hidden=64)
            poison.payload = bytes(4 * len(PROMPT) * 64)
            await call.write(pb.FramesRequest(frame=poison))
            assert dict(await call.trailing_metadata() or ()).get(ERROR_KEY) == "StaleEpoch"
            assert await Talk(new, PROMPT).run(8) == whole_model_says(PROMPT, 8)
            await channel.close()

    run_scene(scene)


def test_a_controlled_stage_is_nobody_elses(model: TinyModel) -> None:
    """A second coordinator may load beside the first, but not take its stage, whatever epoch it names."""

    async def scene() -> None:
        async with (
            running_worker("a") as a,
            Cluster.over(model, a) as first,
            Cluster.over(model, a) as second,
        ):
            pipeline = await first.deploy()
            with pytest.raises(Unavailable, match="p#0 is controlled by another coordinator"):
                await second.deploy(epoch=7)
            beside = await second.deploy(id_="q")
            assert len(await first.stages("a")) == 2
            for running in (pipeline, beside):
                assert len(await Talk(running, PROMPT).run(2)) == 2

    run_scene(scene)


def test_another_stage_evicts_orphans(model: TinyModel) -> None:
    """What nobody controls gives way to other layers; its memory comes back first."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            pipeline = await cluster.deploy((1, 2), ("a", "a", "a"), id_="p")
            assert a.registry.reclaimable_bytes(0) == 0
            await pipeline.close(unload=False)
            await cluster.until_orphaned("a")
            # Still held, and counted as free: a planner must not refuse for its sake.
            assert a.registry.reclaimable_bytes(0) == used_bytes(a) > 0
            pipeline = await cluster.deploy(id_="q")
            stages = await cluster.stages("a")
            assert [stage.placement for stage in stages] == ["q"]
            (stage,) = stages
            assert used_bytes(a) == stage.weight_bytes + stage.arena_bytes + stage.cache_bytes

    run_scene(scene)


def test_a_request_that_fails_evicts_nobody(model: TinyModel) -> None:
    """A wrong path, another digest, impossible layers: the orphans that might be adopted next are still there."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            pipeline = await cluster.deploy()
            await pipeline.close(unload=False)
            await cluster.until_orphaned("a")
            stranger = TinyModel(model.path, replace(model.spec, digest="0" * 64))
            cluster.model = stranger
            with pytest.raises(InvalidCheckpoint, match="is not the coordinator's model"):
                await cluster.deploy(id_="q")
            cluster.model = TinyModel(Path("/nowhere/x.gguf"), stranger.spec)
            with pytest.raises(InvalidCheckpoint, match=r"model file not found here \(tried /nowhere/x.gguf\)"):
                await cluster.deploy(id_="q")
            assert [stage.placement for stage in await cluster.stages("a")] == ["p"]

    run_scene(scene)


@pytest.mark.parametrize("change", [{"max_rows": 32}, {"kv_dtype": "f16"}], ids=str)
def test_other_settings_are_not_adopted(model: TinyModel, change: dict[str, object]) -> None:
    """B-44: an arena or cache of other settings is another stage."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            pipeline = await cluster.deploy()
            await pipeline.close(unload=False)
            await cluster.until_orphaned("a")
            cluster.settings = replace(SETTINGS, **change)  # type: ignore[arg-type]
            await cluster.deploy(id_="q")
            assert [s.settings_digest for s in await cluster.stages("a")] == [cluster.settings.digest()]
            worker = cluster.workers[next(iter(cluster.workers))]
            placement = cluster.placement("q", 1, (), ("a",))
            with pytest.raises(InvalidRequest, match="stage settings differ"):
                await worker.open_steps(placement, placement.stages[0], SETTINGS)

    run_scene(scene)


def test_a_stage_that_is_about_to_be_controlled_is_kept(model: TinyModel) -> None:
    """Between load and Steps lie the other stages' loads: a stranger may neither adopt nor evict it until then."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            worker = cluster.workers[next(iter(cluster.workers))]
            for id_, expected in (("p", ["p"]), ("q", ["p", "q"])):
                placement = cluster.placement(id_, 1, (), ("a",))
                stage = placement.stages[0]
                async for _ in worker.load_stage(placement, stage, model.spec, str(model.path), SETTINGS):
                    pass
                assert [s.placement for s in await cluster.stages("a")] == expected
            a.registry._clock = lambda: 1e12  # both coordinators were gone long ago
            await cluster.deploy(id_="r")
            assert {s.placement for s in await cluster.stages("a")} < {"p", "q", "r"}

    run_scene(scene)


def test_whatever_names_a_placement_keeps_its_stages(model: TinyModel) -> None:
    """A sibling's load and the calls after it renew all stages; 30 s after the last, the coordinator counts as gone."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            now = 0.0
            a.registry._clock = lambda: now
            worker = cluster.workers[next(iter(cluster.workers))]

            async def load(id_: str, index: int, cuts: tuple[int, ...], settings: StageSettings) -> list[str]:
                placement = cluster.placement(id_, 1, cuts, ("a",) * (len(cuts) + 1))
                async for _ in worker.load_stage(
                    placement, placement.stages[index], model.spec, str(model.path), settings
                ):
                    pass
                return sorted(f"{s.placement}{s.stage}" for s in await cluster.stages("a"))

            others = [replace(SETTINGS, max_context=context) for context in (32, 48, 64)]
            await load("p", 0, (2,), SETTINGS)
            now = 25
            await load("p", 1, (2,), SETTINGS)
            now = 50
            assert await load("q", 0, (), others[0]) == ["p0", "p1", "q0"]
            placement = cluster.placement("p", 1, (2,), ("a", "a"))
            await worker.allocate_cache(placement, placement.stages[1], (8,))
            now = 79
            await worker.link_stage(placement, placement.stages[0], 1, worker.address)
            now = 108
            assert await load("r", 0, (), others[1]) == ["p0", "p1", "r0"]
            now = 109
            assert await load("s", 0, (), others[2]) == ["r0", "s0"]

    run_scene(scene)


def test_an_adopted_stage_does_not_leak_what_held_its_name(model: TinyModel) -> None:
    """p#0 of epoch 2 is p#1's weights of another placement: the old p#0 must be freed, not forgotten."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            for id_, cuts in (("p", (1,)), ("q", (2,))):
                pipeline = await cluster.deploy(cuts, ("a", "a"), id_=id_)
                if id_ == "p":
                    held = pipeline
            await held.close(unload=False)
            await pipeline.close(unload=False)
            await cluster.until_orphaned("a")
            await cluster.deploy((2,), ("a", "a"), id_="p", epoch=2)
            stages = await cluster.stages("a")
            taken = sum(s.weight_bytes + s.arena_bytes + s.cache_bytes for s in stages)
            assert [s.layers for s in stages if s.placement == "p"] == [LayerRange(0, 2), LayerRange(2, 4)]
            assert used_bytes(a) == taken

    run_scene(scene)


def test_no_room_beside_a_controlled_stage(model: TinyModel) -> None:
    """C-04: the second load is refused with numbers; the first goes on."""

    async def scene() -> None:
        async with running_worker("a", max_memory_bytes=7 * 2**18) as a, Cluster.over(model, a) as cluster:
            pipeline = await cluster.deploy()
            with pytest.raises(CapacityExceeded, match=r"layers 0-3 need .* MiB \(weights .*, arena .*\), .* MiB are"):
                await cluster.deploy(id_="q")
            assert [s.placement for s in await cluster.stages("a")] == ["p"]
            assert len(await Talk(pipeline, PROMPT).run(3)) == 3

    run_scene(scene)
