"""The full life of a placement over real servers: describe, load, allocate, link, steps, the end."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from support.loopback import Cluster, Talk, TinyModel, running_worker

PROMPT = [1, 40, 7, 99, 250, 3, 17]
Says = Callable[[Sequence[int], int], list[int]]


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
    """On one to four workers, and with several stages on one device (a local link), greedy text is the whole model's."""

    async def scene() -> None:
        async with AsyncExitStack() as stack:
            daemons = [await stack.enter_async_context(running_worker(name)) for name in sorted(set(devices))]
            cluster = await stack.enter_async_context(Cluster.over(model, *daemons))
            pipeline = await cluster.deploy(cuts, devices)
            assert await Talk(pipeline, PROMPT).run(20) == whole_model_says(PROMPT, 20)
            await pipeline.close(unload=True)
            for name in set(devices):
                assert await cluster.stages(name) == ()

    asyncio.run(scene())
