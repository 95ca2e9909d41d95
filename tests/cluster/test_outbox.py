"""Commands on their way to a stage: nothing blocks, and what waits while one message is written travels as the next."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from lamina.coordinator.cluster import pipeline as module
from lamina.coordinator.cluster.client import StepsCall, WorkerClient
from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.coordinator.mailbox import Mailbox
from lamina.spec.errors import WorkerLost
from lamina.spec.ids import DeviceId, Epoch, PlacementId, SeqId, StepId, WorkerName
from lamina.spec.model import LayerRange
from lamina.spec.placement import Placement, StageSpec
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import AddSequence, RemoveSequence, SampleToken, SeqSlice, StepCommand, StepPlan, Tokens
from lamina.v1 import step_pb2 as pb
from lamina.wire.convert import command_from_message
from support.loopback import SETTINGS

ADD = AddSequence(SeqId(1), SamplingParams(), (), frozenset(), 5, num_omitted=2)
REMOVAL = RemoveSequence(SeqId(0))


def plan(step: int) -> StepPlan:
    return StepPlan(Epoch(1), StepId(step), (SeqSlice(SeqId(1), 0, 2, Tokens((4, 5)), ((),), True),))


class HeldCall:
    """A Steps stream whose writes wait until they are let go."""

    def __init__(self) -> None:
        self.written: list[list[StepCommand]] = []
        self.going = asyncio.Event()

    async def write(self, request: bytes) -> None:
        commands = pb.StepsRequest.FromString(request).commands
        self.written.append([command_from_message(command, 1) for command in commands])
        await self.going.wait()

    async def read(self) -> object:
        return await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        pass


class BrokenCall(HeldCall):
    """A Steps stream on which writing or reading fails as nothing should."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self._broken = broken

    async def write(self, request: bytes) -> None:
        if self._broken == "write":
            raise ValueError("no")

    async def read(self) -> object:
        if self._broken == "read":
            raise ValueError("no")
        return await super().read()


@pytest.mark.parametrize("broken", ["write", "read"])
def test_a_fault_on_a_stream_ends_the_pipeline(broken: str) -> None:
    """Nobody awaits the streams' tasks: every request would wait for ever."""

    async def scene() -> None:
        name = WorkerName("a")
        placement = Placement(PlacementId("p"), Epoch(1), 1, (StageSpec(0, DeviceId(name, 0), LayerRange(0, 1)),))
        worker = cast(WorkerClient, SimpleNamespace(who="worker a"))
        pipeline = Pipeline(placement, SETTINGS, (8,), {name: worker}, [cast(StepsCall, BrokenCall(broken))])
        pipeline.remove_sequence(REMOVAL)
        with pytest.raises(WorkerLost, match=r"worker a \(layers 0\): the step stream failed: ValueError: no"):
            await asyncio.wait_for(pipeline.next_done(), 5)
        await pipeline.close(unload=False)

    asyncio.run(scene())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_waits_travels_together_and_in_order() -> None:
    async def scene() -> None:
        name = WorkerName("a")
        stages = tuple(StageSpec(i, DeviceId(name, i), LayerRange(i, i + 1)) for i in range(2))
        calls = [HeldCall(), HeldCall()]
        worker = cast(WorkerClient, object())
        placement = Placement(PlacementId("p"), Epoch(1), 2, stages)
        pipeline = Pipeline(placement, SETTINGS, (8,), {name: worker}, [cast(StepsCall, call) for call in calls])
        pipeline.remove_sequence(REMOVAL)
        pipeline.add_sequence(ADD)
        pipeline.issue(plan(0))
        await settle()
        assert calls[0].written == [[REMOVAL, plan(0)]]
        assert calls[1].written == [[REMOVAL, ADD, plan(0)]]
        pipeline.issue(plan(1))
        pipeline.issue(plan(2))
        await settle()
        assert len(calls[0].written) == 1, "one write at a time"
        for call in calls:
            call.going.set()
        await settle()
        assert [call.written[1:] for call in calls] == [[[plan(1), plan(2)]]] * 2
        await pipeline.close(unload=False)

    asyncio.run(scene())


def test_a_message_is_not_joined_without_end() -> None:
    """Each command but the first that is longer than a batch comes whole, in order."""

    async def scene() -> None:
        outbox = Mailbox[bytes]()
        sizes = [3, module._BATCH_BYTES - 3, 1, 2 * module._BATCH_BYTES, 5, 6]
        for size in sizes:
            outbox.put(bytes(size))
        assert [len(await module._next_request(outbox)) for _ in range(4)] == [
            module._BATCH_BYTES,
            1,
            2 * module._BATCH_BYTES,
            11,
        ]
        waiting = asyncio.create_task(module._next_request(outbox))
        await settle()
        assert not waiting.done()
        outbox.put(b"x")
        assert await waiting == b"x"

    asyncio.run(scene())


def test_relayed_tokens_are_one_message() -> None:
    async def scene() -> None:
        outbox = Mailbox[bytes]()
        tokens = [SampleToken(Epoch(1), SeqId(i), 4, 7) for i in range(3)]
        for token in tokens:
            outbox.put(module.encode_command(token))
        request = pb.StepsRequest.FromString(await module._next_request(outbox))
        assert [command_from_message(command, 1) for command in request.commands] == tokens

    asyncio.run(scene())


def test_a_grammar_is_taken_for_known_while_the_last_stage_is_sure_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage forgets what it used longest ago, and what it is not asked for is no use."""

    async def scene() -> None:
        monkeypatch.setattr(module, "KEPT_CHARACTERS", 20)
        asked: list[str] = []

        async def prepare(placement: Placement, stage: StageSpec, grammar: str) -> None:
            asked.append(grammar)

        name = WorkerName("a")
        placement = Placement(PlacementId("p"), Epoch(1), 1, (StageSpec(0, DeviceId(name, 0), LayerRange(0, 1)),))
        worker = cast(WorkerClient, SimpleNamespace(who="worker a", prepare_grammar=prepare))
        pipeline = Pipeline(placement, SETTINGS, (8,), {name: worker}, [cast(StepsCall, HeldCall())])
        for grammar in ("aaaa", "bbbb", "aaaa"):
            await pipeline.prepare_grammar(grammar)
        assert asked == ["aaaa", "bbbb"]
        await pipeline.prepare_grammar("cccc")
        await pipeline.prepare_grammar("aaaa")
        assert asked == ["aaaa", "bbbb", "cccc", "aaaa"], "used before the others"
        pipeline.add_sequence(replace(ADD, grammar="cccc"))
        await pipeline.prepare_grammar("ddd")
        await pipeline.prepare_grammar("cccc")
        assert asked[4:] == ["ddd"], "its sequence was the last to use it"
        await pipeline.close(unload=False)

    asyncio.run(scene())
