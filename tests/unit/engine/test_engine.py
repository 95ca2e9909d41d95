"""The engine's loop over a pipeline that a test answers by hand: what its streams say, and when they end."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, cast

import pytest

from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.coordinator.engine import engine as module
from lamina.coordinator.engine.engine import Engine
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.spec.errors import CapacityExceeded, InvalidPlan, LaminaError, Unavailable, WorkerLost
from lamina.spec.ids import Epoch, PlacementId
from lamina.spec.placement import Placement
from lamina.spec.step import AddSequence, RemoveSequence, SampledToken, StepDone, StepPlan, Tokens
from support.sim_engine import BASE, request

DEADLINE_S = 5.0


class HandPipeline:
    """Answers what `answer` is told to."""

    def __init__(self, epoch: int = 0) -> None:
        self.placement = Placement(PlacementId("p"), Epoch(epoch), 0, ())
        self.answers: asyncio.Queue[StepDone | LaminaError] = asyncio.Queue()
        self.plans: list[StepPlan] = []
        self.adds: list[AddSequence] = []
        self.prepared: list[str] = []
        self.is_closed = self.was_unloaded = False

    def issue(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    async def prepare_grammar(self, grammar: str) -> None:
        self.prepared.append(grammar)

    def add_sequence(self, add: AddSequence) -> None:
        self.adds.append(add)

    def remove_sequence(self, remove: RemoveSequence) -> None:
        pass

    def answer(self, token: int) -> None:
        plan = self.plans[0]
        tokens = tuple(SampledToken(piece.seq, piece.end, token) for piece in plan.slices)
        self.answers.put_nowait(StepDone(plan.epoch, plan.step, tokens))

    async def next_done(self) -> StepDone:
        answer = await self.answers.get()
        if isinstance(answer, LaminaError):
            raise answer
        return answer

    async def close(self, *, unload: bool) -> None:
        self.is_closed, self.was_unloaded = True, unload


def test_a_prompt_is_on_its_way_before_the_steps_after_it_are_planned() -> None:
    async def scene() -> None:
        pipeline = HandPipeline()
        engine = Engine(Scheduler(BASE), cast(Pipeline, pipeline))
        engine.start()
        stream = engine.submit(request(range(1, 5), 8))
        assert [plan.num_rows for plan in pipeline.plans] == [4]
        await asyncio.sleep(0)
        assert [plan.num_rows for plan in pipeline.plans] == [4, 1]
        stream.close()
        await engine.close()
        engine._issue()
        assert len(pipeline.plans) == 2, "nothing is sent once the engine has ended"

    run(scene)


def test_a_fault_while_the_steps_after_a_prompt_are_planned_ends_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for that callback: without an end, the stream would wait for ever."""

    async def scene() -> None:
        pipeline, scheduler = HandPipeline(), Scheduler(BASE)
        engine = Engine(scheduler, cast(Pipeline, pipeline), keeps_requests=True)
        engine.start()
        seen: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context.get("exception")))
        stream = engine.submit(request(range(1, 5), 8))
        fault = KeyError("ours")

        def fail(now: float) -> None:
            raise fault

        monkeypatch.setattr(Scheduler, "schedule", lambda self, now: fail(now))
        with pytest.raises(WorkerLost, match="the engine stopped: KeyError: 'ours'"):
            await anext(stream)
        assert seen == [fault]
        assert not engine.is_suspended, "no other pipeline would cure it"
        await engine.close()

    run(scene)


LOSS = WorkerLost("w1 is gone")


class Suspended:
    """An engine with one stream of prompt 1-4 that got token 7, its pipeline lost and closed."""

    def __init__(self) -> None:
        self.first = HandPipeline()
        self.engine = Engine(Scheduler(BASE), cast(Pipeline, self.first), keeps_requests=True)

    async def lose(self) -> "Suspended":
        self.engine.start()
        self.stream = self.engine.submit(request(range(1, 5), 8))
        self.first.answer(7)
        assert (await anext(self.stream)).token == 7
        self.first.answers.put_nowait(LOSS)
        assert await self.engine.wait_for_failure() is LOSS
        await self.engine.close()
        return self

    def resume(self, epoch: int = 1) -> HandPipeline:
        pipeline = HandPipeline(epoch)
        self.engine.resume(cast(Pipeline, pipeline), BASE)
        return pipeline


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene()

    asyncio.run(bounded())


def test_a_stream_goes_on_over_another_pipeline() -> None:
    """C-18: what was generated is computed again in the next epoch, and not said twice."""

    async def scene() -> None:
        lost = await Suspended().lose()
        assert lost.engine.is_suspended
        assert not lost.first.was_unloaded  # the stages that are left are adopted by the next epoch
        with pytest.raises(WorkerLost, match="w1"):
            lost.engine.submit(request(range(1, 5)))
        second = lost.resume()
        assert lost.engine.failure is None
        (add,) = second.adds
        assert (add.num_prompt, add.num_generated) == (4, 1)
        assert (second.plans[0].epoch, second.plans[0].slices[0].input) == (1, Tokens((1, 2, 3, 4, 7)))
        second.answer(8)
        assert (await anext(lost.stream)).token == 8
        await lost.engine.close()
        assert second.was_unloaded

    run(scene)


def test_every_attempt_to_go_on_has_an_epoch_of_its_own() -> None:
    """A worker that an attempt lost half way holds that attempt's epoch and refuses it for ever."""

    async def scene() -> None:
        lost = await Suspended().lose()
        assert [lost.engine.claim_placement() for _ in range(2)] == [("p", 1), ("p", 2)]
        lost.resume(epoch=2)
        assert lost.engine.claim_placement() == ("p", 3)
        await lost.engine.close()

    run(scene)


def test_a_client_that_goes_while_the_engine_is_suspended_is_forgotten() -> None:
    async def scene() -> None:
        lost = await Suspended().lose()
        lost.stream.close()
        assert not lost.resume().plans

    run(scene)


def test_waiting_ends() -> None:
    async def scene() -> None:
        lost = await Suspended().lose()
        waiting = asyncio.create_task(anext(lost.stream))
        await asyncio.sleep(0)
        lost.engine.abandon(WorkerLost("not back in time"))
        with pytest.raises(WorkerLost, match="not back in time"):
            await waiting
        with pytest.raises(RuntimeError, match="not suspended"):
            lost.resume()

    run(scene)


def test_a_request_that_loses_every_pipeline_is_given_up() -> None:
    async def scene() -> None:
        lost = await Suspended().lose()
        for epoch in range(1, 4):
            pipeline = lost.resume(epoch)
            pipeline.answers.put_nowait(LOSS)
            await lost.engine.wait_for_failure()
            await lost.engine.close()
        assert not lost.resume(4).plans
        with pytest.raises(WorkerLost, match="given up after 4 losses"):
            await anext(lost.stream)

    run(scene)


def test_what_no_waiting_cures_ends_the_streams() -> None:
    async def scene() -> None:
        pipeline = HandPipeline()
        engine = Engine(Scheduler(BASE), cast(Pipeline, pipeline), keeps_requests=True)
        engine.start()
        stream = engine.submit(request(range(1, 5), 8))
        pipeline.answers.put_nowait(InvalidPlan("a defect"))
        with pytest.raises(InvalidPlan):
            await anext(stream)
        assert not engine.is_suspended

    run(scene)


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


def test_open_requests_have_as_many_grammars_as_the_last_stage_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """More are refused before they are compiled; one that is there takes no room, one that ends gives its back."""

    async def scene() -> None:
        monkeypatch.setattr(module, "_MAX_OPEN_CHARACTERS", 10)
        pipeline = HandPipeline()
        engine = Engine(Scheduler(BASE), cast(Pipeline, pipeline))
        engine.start()
        plain = request(range(1, 5))
        streams = [engine.submit(replace(plain, grammar=grammar)) for grammar in ("aaaa", "bbbb", "bbbb")]
        await engine.prepare_grammar("aaaa")
        too_many = r"have 8 characters, this one 3, of 10 in all; try again when fewer are open"
        with pytest.raises(CapacityExceeded, match=too_many):
            await engine.prepare_grammar("ccc")
        with pytest.raises(CapacityExceeded, match=too_many):
            engine.submit(replace(plain, grammar="ccc"))
        streams[1].close()
        with pytest.raises(CapacityExceeded, match=too_many):
            await engine.prepare_grammar("ccc")
        streams[2].close()
        await engine.prepare_grammar("ccc")
        assert pipeline.prepared == ["aaaa", "ccc"]
        await engine.close()

    run(scene)
