"""A stage on the event loop, with its device and edges faked: what is posted, sent, relayed and refused, and when."""

import asyncio
import logging

import pytest

from lamina.rpc_worker.stage_facts import StageFacts
from lamina.rpc_worker.stage_runtime import StageKey
from lamina.spec.errors import InvalidPlan, LaminaError, StaleEpoch, Unavailable, WorkerLost
from lamina.spec.ids import Epoch, PlacementId, SeqId
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import MAX_RUN_AHEAD, AddSequence, RemoveSequence
from lamina.v1 import step_pb2 as pb
from support.runtime_bench import Bench, FakeLink, scene


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
        assert bench.link.sent == list(range(num_done))


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


def test_a_normal_end_with_a_step_under_way_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """The next stage hears of it first: nobody needs to be warned of what a coordinator wanted."""
    asyncio.run(_ends_one_by_one())
    assert [record.message for record in caplog.records if record.levelno >= logging.INFO] == []
    asyncio.run(_ends_one_by_one(WorkerLost("connection lost")))
    assert "feedback edge lost, tokens go through the coordinator: connection lost" in caplog.text
    assert "edge to stage 1 lost: connection lost" in caplog.text


async def _ends_one_by_one(loss: LaminaError | None = None) -> None:
    """The next stage of each ends, or is lost, before the answer to a step is there."""
    first, last = Bench(0), Bench(1)
    for bench, following in ((first, Bench(1)), (last, Bench(0))):
        await bench.runtime.attach_neighbour(following.runtime)
        bench.plan(0)
        await following.runtime.end()
        if loss is not None:
            bench.runtime.link_lost(loss)
    last.frame(0)
    for bench in (first, last):
        bench.device.work()
    assert last.answers() == ["0r"]
    assert first.answers()[0].startswith("WorkerLost")


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
    assert bench.link.sent == [0, 1, 2]
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
async def test_a_fault_beside_the_device_ends_the_stage_and_not_the_thread() -> None:
    """What no step raises, as the time at which to look at it: the thread serves other stages."""
    bench = Bench(1)

    def due_s(launched: object) -> float:
        raise ValueError("no")

    bench.stage.due_s = due_s  # type: ignore[method-assign]
    bench.stage.is_done = lambda launched: False  # type: ignore[method-assign]
    bench.plan(0)
    bench.frame(0)
    bench.device.work()
    assert bench.answers() == ["LaminaError: a (layers 2-3): ValueError: no", "end"]
    bench.device.wake(bench.runtime._runner)
    bench.device.work()


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
