"""A stage on the event loop, with its device and edges faked: what is posted, sent, relayed and refused, and when."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from lamina.rpc_worker.device_thread import Worker
from lamina.rpc_worker.stage import LaunchedStep, StageResult
from lamina.rpc_worker.stage_facts import StageFacts
from lamina.rpc_worker.stage_model import Outcome
from lamina.rpc_worker.stage_runtime import StageKey, StageRuntime
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.spec.errors import InvalidPlan, LaminaError, StaleEpoch, Unavailable, WorkerLost
from lamina.spec.ids import Epoch, PlacementId, SeqId, StepId
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import (
    MAX_RUN_AHEAD,
    AddSequence,
    RemoveSequence,
    SampledToken,
    SeqSlice,
    StepDone,
    StepPlan,
    Tokens,
)
from lamina.v1 import step_pb2 as pb
from support.planner_models import demand_of

SPEC = demand_of(4, [32] * 4).spec
SETTINGS = StageSettings(max_rows=4, max_seqs=2, max_logit_rows=2, max_context=64)


class FakeStage:
    """Answers each step at once; remembers what it was told."""

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last
        self.facts = StageFacts(cache_bytes=1)
        self.told: list[str] = []  # edits and steps
        self.nonfinite = 0

    max_launched = 1

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def launch(self, ready: ReadyStep, prepared: StepPlan | None, *, sampled: None, hands_over: bool) -> LaunchedStep:
        assert prepared in (None, ready.plan)
        assert not hands_over
        return LaunchedStep(ready, Outcome(np.zeros(0), None), 0.0)  # type: ignore[arg-type]

    def due_s(self, launched: LaunchedStep) -> float:
        return 0.0

    def is_done(self, launched: LaunchedStep) -> bool:
        return True

    def finish(self, launched: LaunchedStep) -> StageResult:
        ready = launched.ready
        if not self.is_last:
            return StageResult(ready, np.ones((ready.plan.num_rows, SPEC.hidden), np.float32), None, self.nonfinite)
        tokens = tuple(SampledToken(piece.seq, piece.end, 5) for piece in ready.plan.slices)
        return StageResult(ready, None, StepDone(ready.plan.epoch, ready.plan.step, tokens), 0)

    def add_sequence(self, add: AddSequence) -> None:
        self.told.append(f"add {add.seq}")

    def remove_sequence(self, seq: SeqId) -> None:
        self.told.append(f"remove {seq}")

    def reset_sequences(self) -> None:
        self.told.append("reset")


class FakeDevice:
    """Holds what it is given until `work` runs it; the loop hears at once."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []

    def post(self, fn: Callable[[], Any], on_done: Callable[[Any], None]) -> None:
        def job() -> None:
            try:
                outcome = fn()
            except Exception as error:
                outcome = error
            on_done(outcome)

        self.queue.append(job)

    def wake(self, worker: Worker) -> None:
        self.queue.append(worker.advance)

    def tell_loop(self, fn: Callable[[], None]) -> None:
        fn()

    def work(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class FakeLink:
    """Remembers what was sent."""

    rtt_s = 0.0
    num_bytes = queue_depth = 0

    def __init__(self) -> None:
        self.sent: list[pb.FramesRequest] = []
        self.closed = False

    def send(self, message: pb.FramesRequest) -> None:
        self.sent.append(message)

    async def close(self) -> None:
        self.closed = True


class Bench:
    """Stage `index` of two, controlled, linked."""

    def __init__(self, index: int, num_stages: int = 2) -> None:
        self.stage = FakeStage(index == num_stages - 1)
        self.device = FakeDevice()
        self.link = FakeLink()
        self.runtime = StageRuntime(
            StageKey(PlacementId("p"), Epoch(1), index, num_stages),
            self.stage,  # type: ignore[arg-type]
            self.device,  # type: ignore[arg-type]
            SPEC,
            LayerRange(2 * index, 2 * index + 2),
            SETTINGS,
            "a",
        )
        self.responses = self.runtime.attach_controller()

    def plan(self, step: int) -> None:
        piece = SeqSlice(SeqId(step), 0, 1, Tokens((1,)), ((),), True)
        self.runtime.handle_command(StepPlan(Epoch(1), StepId(step), (piece,)))

    def frame(self, step: int) -> None:
        frame = pb.Frame(epoch=1, step=step, dtype=pb.FRAME_DTYPE_F32, rows=1, hidden=SPEC.hidden)
        frame.payload = bytes(4 * SPEC.hidden)
        self.runtime.handle_frames_message(pb.FramesRequest(frame=frame))

    def answers(self) -> list[str]:
        """What went to the coordinator: steps (`r` where they need a relay), failures, the end."""
        found = []
        while not self.responses.empty():
            response = self.responses.get_nowait()
            if response is None:
                found.append("end")
            elif response.HasField("failure"):
                found.append(f"{response.failure.error}: {response.failure.message}")
            else:
                found.append(f"{response.done.step}{'r' if response.done.needs_relay else ''}")
        return found


def scene(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test."""

    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@scene
async def test_a_stage_goes_through_its_steps_without_the_loop() -> None:
    """One step at a time, so that others who share the device have their turn; results leave in order."""
    bench = Bench(0)
    await bench.runtime.attach_link(bench.link)
    for step in range(20):
        bench.plan(step)
    device = bench.device
    device.queue[1:] = []  # woken once
    for num_done in range(1, 21):
        assert len(device.queue) == 1
        device.queue.pop(0)()
        assert [message.frame.step for message in bench.link.sent] == list(range(num_done))


@scene
async def test_no_step_begins_once_the_stage_has_failed() -> None:
    """A coordinator may be MAX_RUN_AHEAD steps ahead; what waits is dropped."""
    bench = Bench(0)
    await bench.runtime.attach_link(bench.link)
    for step in range(20):
        bench.plan(step)
    bench.device.queue.pop(0)()
    bench.runtime.fail(LaminaError("enough"))
    bench.device.work()
    assert bench.runtime._queue.next_step == 1
    assert bench.answers() == ["LaminaError: a (layers 0-1): enough", "end"]


@scene
async def test_edits_come_before_the_plans_that_follow_them() -> None:
    """Even where the compute thread is at work when both arrive."""
    bench = Bench(0, num_stages=1)
    bench.plan(0)
    bench.runtime.handle_command(AddSequence(SeqId(7), SamplingParams(), (1,), frozenset(), 5))
    bench.plan(1)
    bench.runtime.handle_command(RemoveSequence(SeqId(0)))
    bench.device.work()
    assert bench.stage.told == ["add 7", "remove 0"]
    assert bench.answers() == ["0", "1"]


@scene
async def test_results_for_a_stage_of_this_process_go_straight_to_it() -> None:
    """Hidden states and answers; the loop hears of answers only, for the coordinator."""
    first, last = Bench(0), Bench(1)
    last.device = first.device
    last.runtime._runner._device = first.device  # type: ignore[assignment]
    await first.runtime.attach_neighbour(last.runtime)
    await last.runtime.attach_neighbour(first.runtime)
    for step in range(3):
        for bench in (first, last):
            bench.plan(step)
    first.device.work()
    assert (first.answers(), last.answers()) == ([], ["0", "1", "2"])
    assert first.runtime._queue._tokens == {(SeqId(step), 1): 5 for step in range(3)}
    await last.runtime.end()
    for bench in (first, last):
        bench.device.work()
    first.plan(3)
    first.device.work()
    cause = "edge to stage 1 lost: its epoch has ended"
    assert first.answers() == [f"WorkerLost: a (layers 0-1): {cause}", "end"]


@scene
async def test_tokens_that_a_first_stage_of_this_process_refuses_are_relayed() -> None:
    first, last = Bench(0), Bench(1)
    await last.runtime.attach_neighbour(first.runtime)
    await first.runtime.end()
    for step in range(2):
        last.plan(step)
        last.frame(step)
    last.device.work()
    assert last.answers() == ["0r", "1r"]


@scene
async def test_the_end_forgets_sequences_before_anything_that_follows() -> None:
    """The reset is queued at once, so that a successor's work comes after it; a second end does nothing."""
    bench = Bench(1)
    await bench.runtime.attach_link(bench.link)
    bench.plan(0)
    bench.frame(0)
    await bench.runtime.end()
    assert bench.runtime.has_ended
    assert not bench.runtime.is_controlled
    assert bench.link.closed
    successor = bench.runtime.successor(StageKey(PlacementId("q"), Epoch(1), 1, 2))
    successor.attach_controller()
    successor.handle_command(AddSequence(SeqId(7), SamplingParams(), (1,), frozenset(), 5))
    await bench.runtime.end()
    bench.device.work()
    assert bench.stage.told == ["reset", "add 7"]
    assert bench.answers() == ["end"], "the step that was under way is answered to nobody"
    with pytest.raises(StaleEpoch, match="has ended"):
        bench.frame(1)
    with pytest.raises(StaleEpoch, match="epoch 1 of p#1 is refused, the stage's epoch has ended"):
        bench.runtime.check_key("p", 1, 1)


@scene
async def test_an_edge_that_opens_after_the_end_is_closed() -> None:
    bench = Bench(0)
    await bench.runtime.end()
    with pytest.raises(StaleEpoch, match="ended while its edge was opened"):
        await bench.runtime.attach_link(bench.link)
    assert bench.link.closed


@scene
async def test_a_second_edge_replaces_the_first() -> None:
    bench, second = Bench(0), FakeLink()
    await bench.runtime.attach_link(bench.link)
    await bench.runtime.attach_link(second)
    assert (bench.link.closed, second.closed) == (True, False)


@scene
async def test_without_an_edge_forward_the_stage_fails() -> None:
    bench = Bench(0)
    bench.plan(0)
    bench.device.work()
    cause = "no edge to stage 1 for step 0; link the stages first"
    assert bench.answers() == [f"Unavailable: a (layers 0-1): {cause}", "end"]


@scene
async def test_losing_the_edge_forward_ends_the_epoch() -> None:
    """Named once, whatever else fails afterwards; later plans are not run."""
    bench = Bench(0)
    await bench.runtime.attach_link(bench.link)
    bench.runtime.link_lost(WorkerLost("stage 1 at b: connection lost"))
    bench.runtime.fail(LaminaError("something else"))
    bench.plan(0)
    bench.device.work()
    assert bench.runtime._queue.next_step == 0
    assert bench.answers() == [
        "WorkerLost: a (layers 0-1): edge to stage 1 lost: stage 1 at b: connection lost",
        "end",
    ]


@scene
async def test_a_failure_before_the_coordinator_came_is_told_when_it_comes() -> None:
    """An edge may break between linking and the Steps stream: whoever opens the stream must not wait for ever."""
    runtime = Bench(0).runtime.successor(StageKey(PlacementId("p"), Epoch(2), 0, 2))
    runtime.link_lost(WorkerLost("stage 1 at b: connection lost"))
    with pytest.raises(WorkerLost, match=r"a \(layers 0-1\): edge to stage 1 lost: stage 1 at b: connection lost"):
        runtime.attach_controller()
    assert not runtime.is_controlled


@scene
async def test_losing_the_feedback_edge_sends_its_answers_again() -> None:
    """What was given to the edge may not have arrived: the coordinator is asked to relay it, and all that follows."""
    bench = Bench(1)
    await bench.runtime.attach_link(bench.link)
    for step in range(3):
        bench.plan(step)
        bench.frame(step)
        bench.device.work()
    assert [message.done.step for message in bench.link.sent] == [0, 1, 2]
    assert bench.answers() == ["0", "1", "2"]
    bench.runtime.link_lost(WorkerLost("gone"))
    bench.plan(3)
    bench.frame(3)
    bench.device.work()
    assert bench.answers() == ["0r", "1r", "2r", "3r"]


@scene
async def test_answers_that_nobody_reads_end_the_epoch() -> None:
    """A coordinator that plans on and on without reading must not fill the worker's memory."""
    bench = Bench(0, num_stages=1)
    for step in range(1000):
        if bench.runtime._failure is not None:
            break
        bench.plan(step)
        bench.device.work()
    answers = bench.answers()
    cause = f"the coordinator leaves {2 * MAX_RUN_AHEAD} answers unread"
    assert answers[-2:] == [f"InvalidPlan: a (layers 0-1): {cause}", "end"]
    assert len(answers) == 2 * MAX_RUN_AHEAD + 3


@pytest.mark.parametrize("broken", ["launch", "finish", "is_done"])
def test_an_exception_of_the_device_is_named(broken: str) -> None:
    asyncio.run(_exception_scene(broken))


async def _exception_scene(broken: str) -> None:
    bench = Bench(0, num_stages=1)
    setattr(bench.stage, broken, lambda *_, **__: 1 / 0)
    bench.plan(0)
    bench.device.work()
    assert bench.answers() == ["LaminaError: a (layers 0-1): ZeroDivisionError: division by zero", "end"]


@scene
async def test_sequences_are_for_the_last_stage() -> None:
    first, last = Bench(0), Bench(1)
    add = AddSequence(SeqId(1), SamplingParams(), (1,), frozenset(), 5)
    with pytest.raises(InvalidPlan, match="sequences are added to the last stage only"):
        first.runtime.handle_command(add)
    last.runtime.handle_command(add)
    for bench in (first, last):
        bench.runtime.handle_command(RemoveSequence(SeqId(1)))
        bench.device.work()
    assert first.stage.told == ["remove 1"]
    assert last.stage.told == ["add 1", "remove 1"]


@scene
async def test_one_controller_at_a_time_and_only_with_a_cache() -> None:
    bench = Bench(0)
    with pytest.raises(Unavailable, match="another coordinator controls this stage"):
        bench.runtime.attach_controller()
    bench.stage.facts = StageFacts()
    await bench.runtime.end()
    with pytest.raises(Unavailable, match="has no cache yet"):
        bench.runtime.successor(StageKey(PlacementId("p"), Epoch(2), 0, 2)).attach_controller()


@scene
async def test_the_first_stage_of_several_takes_answers_only() -> None:
    bench = Bench(0)
    with pytest.raises(InvalidPlan, match="the first stage takes tokens, not frames"):
        bench.frame(0)
    with pytest.raises(InvalidPlan, match="message 'done' is out of order"):
        Bench(1).runtime.handle_frames_message(pb.FramesRequest(done=pb.StepDone(epoch=1)))
