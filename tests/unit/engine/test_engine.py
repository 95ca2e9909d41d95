"""The engine's loop over a pipeline that a test answers by hand: what its streams say, and when they end."""

import asyncio
from typing import cast

import pytest

from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.coordinator.engine.engine import Engine
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.spec.errors import Unavailable
from lamina.spec.step import AddSequence, RemoveSequence, SampledToken, StepDone, StepPlan
from support.sim_engine import BASE, request

DEADLINE_S = 5.0


class HandPipeline:
    """Answers what `answer` is told to."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[StepDone] = asyncio.Queue()
        self.plans: list[StepPlan] = []
        self.is_closed = False

    def issue(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def add_sequence(self, add: AddSequence) -> None:
        pass

    def remove_sequence(self, remove: RemoveSequence) -> None:
        pass

    def answer(self, token: int) -> None:
        plan = self.plans[0]
        tokens = tuple(SampledToken(piece.seq, piece.end, token) for piece in plan.slices)
        self.answers.put_nowait(StepDone(plan.epoch, plan.step, tokens))

    async def next_done(self) -> StepDone:
        return await self.answers.get()

    async def close(self, *, unload: bool) -> None:
        self.is_closed = True


def test_closing_ends_the_streams_that_still_wait() -> None:
    """A request in flight when the server stops hears so after its last token; a later one is refused."""

    async def scene() -> None:
        pipeline = HandPipeline()
        engine = Engine(Scheduler(BASE), cast(Pipeline, pipeline))
        engine.start()
        streams = [engine.submit(request(range(1, 5), 8)), engine.submit(request(range(1, 9), 8))]
        pipeline.answer(7)
        assert (await anext(streams[0])).token == 7
        waiting = asyncio.create_task(anext(streams[0]))
        await asyncio.sleep(0)
        await engine.close()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(Unavailable, match="the server is shutting down"):
                await waiting
            with pytest.raises(Unavailable, match="the server is shutting down"):
                await anext(streams[1])
            assert isinstance(await engine.wait_for_failure(), Unavailable)
        with pytest.raises(Unavailable, match="the server is shutting down"):
            engine.submit(request(range(1, 5)))
        assert pipeline.is_closed
        await engine.close()

    asyncio.run(scene())
