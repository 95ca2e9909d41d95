"""The life of a placement over real servers: describe, load, allocate, link, steps, the end."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from lamina.coordinator.cluster.client import LoadProgress, StageLoaded
from lamina.kernels.registry import create_backend
from lamina.spec.errors import InvalidRequest, StaleEpoch, Unavailable
from lamina.spec.memory import arena_bytes
from lamina.spec.model import LayerRange
from support.inprocess import InProcessModel
from support.loopback import NUM_BLOCKS, SETTINGS, Cluster, Talk, TinyModel, next_done, run_scene, running_worker
from support.tiny import write_tiny_llama

PROMPT = [1, 40, 7, 99, 250, 3, 17]
Says = Callable[[Sequence[int], int], list[int]]
GIB = 2**30


@pytest.mark.parametrize(
    ("cuts", "devices"),
    [
        ((), ("a",)),
        ((2,), ("a", "b")),
        ((1, 2), ("a", "b", "c")),
        ((1, 2, 3), ("a", "b", "c", "d")),
        ((2,), ("a", "a")),
        ((1, 2, 3), ("a", "b", "a", "b")),
    ],
    ids=str,
)
def test_the_same_tokens_however_it_is_split(
    model: TinyModel, whole_model_says: Says, cuts: tuple[int, ...], devices: tuple[str, ...]
) -> None:
    """One to four workers, also several stages on one device (a local link): greedy text is the whole model's."""

    async def scene() -> None:
        async with AsyncExitStack() as stack:
            daemons = [await stack.enter_async_context(running_worker(name)) for name in sorted(set(devices))]
            cluster = await stack.enter_async_context(Cluster.over(model, *daemons))
            pipeline = await cluster.deploy(cuts, devices)
            assert await Talk(pipeline, PROMPT).run(20) == whole_model_says(PROMPT, 20)
            await pipeline.close(unload=True)
            for name in set(devices):
                assert await cluster.stages(name) == ()

    run_scene(scene)


def test_what_is_reported_along_the_way(model: TinyModel) -> None:
    """Progress ends at the bytes of the stage; what a stage takes leaves the worker's free memory, and comes back."""

    async def scene() -> None:
        async with running_worker("a", max_memory_bytes=GIB) as a, Cluster.over(model, a) as cluster:
            worker = cluster.workers[next(iter(cluster.workers))]
            free_before = worker.profile.devices[0].free_bytes
            pipeline = await cluster.deploy()
            loaded = [item for item in cluster.progress if isinstance(item, StageLoaded)]
            counts = [item.done_bytes for item in cluster.progress if isinstance(item, LoadProgress)]
            assert len(loaded) == 1
            assert cluster.progress[-1] is loaded[0]
            assert counts == sorted(counts)
            (stage,) = await cluster.stages("a")
            assert (stage.placement, stage.epoch, stage.stage, stage.layers) == ("p", 1, 0, LayerRange(0, 4))
            assert stage.model_digest == model.spec.digest
            assert stage.settings_digest == SETTINGS.digest()
            assert stage.arena_bytes == loaded[0].arena_bytes == arena_bytes(model.spec, LayerRange(0, 4), SETTINGS)
            assert stage.cache_bytes == NUM_BLOCKS * sum(loaded[0].block_bytes)
            taken = stage.weight_bytes + stage.arena_bytes + stage.cache_bytes
            assert free_before - worker.profile.devices[0].free_bytes == taken
            assert (stage.controlled, stage.num_sequences, stage.num_steps) == (True, 0, 0)
            await Talk(pipeline, PROMPT).run(5)
            while (stage := (await cluster.stages("a"))[0]).num_sequences:  # the removal is on its way
                await asyncio.sleep(0.01)
            assert stage.num_steps == 5
            assert stage.busy_s > 0
            await pipeline.close(unload=True)
            assert (await worker.describe()).devices[0].free_bytes == free_before

    run_scene(scene)


def test_losing_the_controller_frees_its_sequences(model: TinyModel) -> None:
    """The stream's end is the epoch's end: sequences are forgotten, the weights stay, old plans are refused."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            pipeline = await cluster.deploy()
            talk = Talk(pipeline, PROMPT)
            talk.add()
            talk.issue()
            await next_done(pipeline)
            assert (await cluster.stages("a"))[0].num_sequences == 1
            await pipeline.close(unload=False)
            await cluster.until_orphaned("a")
            (stage,) = await cluster.stages("a")
            assert stage.num_sequences == 0
            assert stage.weight_bytes > 0
            worker, placement = cluster.workers[next(iter(cluster.workers))], pipeline.placement
            with pytest.raises(StaleEpoch, match=r"a \(layers 0-3\): epoch 1 of p#0 is refused.*has ended"):
                await worker.open_steps(placement, placement.stages[0], SETTINGS)
            with pytest.raises(StaleEpoch):
                await worker.allocate_cache(placement, placement.stages[0], (NUM_BLOCKS,))

    run_scene(scene)


def test_two_placements_on_one_worker_share_nothing(model: TinyModel, whole_model_says: Says) -> None:
    """P-12: equal epochs, sequences, blocks and shapes, interleaved step by step on the same devices."""

    async def scene() -> None:
        async with running_worker("a") as a, running_worker("b") as b, Cluster.over(model, a, b) as cluster:
            pipelines = [await cluster.deploy((2,), ("a", "b"), id_=id_) for id_ in ("p", "q")]
            prompts = [PROMPT, [9, 9, 30, 200]]
            talks = [Talk(pipeline, prompt) for pipeline, prompt in zip(pipelines, prompts, strict=True)]
            for talk in talks:
                talk.add()
            for _ in range(12):
                for talk in talks:
                    talk.issue()
                for talk in reversed(talks):
                    talk.take(await next_done(talk.pipeline))
            for talk, prompt in zip(talks, prompts, strict=True):
                assert talk.tokens == whole_model_says(prompt, 12)
            await pipelines[0].close(unload=True)  # the other one goes on
            talks[1].issue()
            talks[1].take(await next_done(pipelines[1]))
            assert talks[1].tokens == whole_model_says(prompts[1], 13)

    run_scene(scene)


def test_two_models_on_one_worker(model: TinyModel, whole_model_says: Says, tmp_path: Path) -> None:
    """P-12: of equal shape and other weights: a recording, a cache or a weight of the one in the other would show."""
    path = write_tiny_llama(
        tmp_path / "b.gguf", matrix_type=GGMLQuantizationType.F32, hidden=64, ff=96, layers=4, seed=4
    )
    other = TinyModel.open(path)
    alone = InProcessModel(path, create_backend("reference"), settings=SETTINGS).greedy([PROMPT], 8)[0]
    assert alone != whole_model_says(PROMPT, 8)

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as one, Cluster.over(other, a) as two:
            talks = [Talk(await one.deploy(), PROMPT), Talk(await two.deploy(id_="q"), PROMPT)]
            for talk in talks:
                talk.add()
            for _ in range(8):
                for talk in talks:
                    talk.issue()
                    talk.take(await next_done(talk.pipeline))
            assert [talk.tokens for talk in talks] == [whole_model_says(PROMPT, 8), alone]

    run_scene(scene)


def test_two_devices_of_one_worker(model: TinyModel, whole_model_says: Says) -> None:
    """P-24, A-19: the boundary between two devices of a worker does not touch the network."""

    async def scene() -> None:
        async with running_worker("a", ("reference", "mock")) as a, Cluster.over(model, a) as cluster:
            pipeline = await cluster.deploy((2,), ("a/0", "a/1"))
            stages = {stage.stage: stage.device for stage in await cluster.stages("a")}
            assert stages == {0: 0, 1: 1}
            assert await Talk(pipeline, PROMPT).run(4) == [0, 0, 0, 0]  # the mock's logits are all 0

    run_scene(scene)


def test_refusals_name_what_is_wrong(model: TinyModel) -> None:
    """Each is typed, says who refuses, and leaves the running placement as it is."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            worker = cluster.workers[next(iter(cluster.workers))]
            pipeline = await cluster.deploy()
            placement, (stage,) = pipeline.placement, pipeline.placement.stages
            other = cluster.placement("nobody", 1, (), ("a",))
            with pytest.raises(InvalidRequest, match=r"worker a at .*: worker a holds no stage nobody#0; load it"):
                await worker.allocate_cache(other, stage, (8,))
            with pytest.raises(Unavailable, match="its cache cannot be replaced now"):
                await worker.allocate_cache(placement, stage, (8,))
            with pytest.raises(InvalidRequest, match="stage 0 is followed by 0, not 3"):
                await worker.link_stage(placement, stage, 3, worker.address)
            with pytest.raises(Unavailable, match="another coordinator controls this stage"):
                await worker.open_steps(placement, stage, SETTINGS)
            late = cluster.placement("p", 0, (), ("a",))
            with pytest.raises(StaleEpoch, match="epoch 0 of p#0 is refused"):
                await worker.open_steps(late, stage, SETTINGS)
            assert await worker.unload(other) == 0
            assert len(await Talk(pipeline, PROMPT).run(3)) == 3

    run_scene(scene)


def test_steps_before_the_cache(model: TinyModel) -> None:
    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            worker, placement = cluster.workers[next(iter(cluster.workers))], cluster.placement("p", 1, (), ("a",))
            stage = placement.stages[0]
            async for _ in worker.load_stage(placement, stage, model.spec, str(model.path), SETTINGS):
                pass
            with pytest.raises(Unavailable, match="has no cache yet; allocate it first"):
                await worker.open_steps(placement, stage, SETTINGS)
            for wrong in ((), (0,), (1, 1)):
                with pytest.raises(InvalidRequest, match="1 numbers of blocks >= 1 are wanted"):
                    await worker.allocate_cache(placement, stage, wrong)

    run_scene(scene)
