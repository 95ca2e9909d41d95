"""A step queue in the hands of several threads."""

import threading
import time

import numpy as np

from lamina.rpc_worker.step_queue import StepQueue
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.placement import StageSettings
from lamina.spec.step import MAX_RUN_AHEAD, RemoveSequence, SeqSlice, StepPlan, Tokens
from lamina.v1 import step_pb2 as pb
from lamina.wire.frames import encode_frame, read_frame

EPOCH = Epoch(4)


def plan(step: int) -> StepPlan:
    return StepPlan(EPOCH, StepId(step), (SeqSlice(SeqId(step), 0, 2, Tokens((7, 8)), ((),), True),))


def test_two_threads_may_bring_what_a_third_takes_out() -> None:
    """Plans and edits from one, frames from another: every step once, in order, after the edits brought before it."""
    queue = StepQueue(EPOCH, StageSettings(), takes_tokens=False, hidden=3, vocab_size=100)
    num_steps, taken, applied = 400, [], []
    room = threading.Semaphore(MAX_RUN_AHEAD // 2)  # as the coordinator keeps it

    def bring_plans() -> None:
        for step in range(num_steps):
            room.acquire()
            queue.add_edit(RemoveSequence(SeqId(step)))
            queue.add_plan(plan(step))

    def bring_frames() -> None:
        for step in range(num_steps):
            while step >= queue.next_step + MAX_RUN_AHEAD:
                time.sleep(0)
            raw = encode_frame(plan(step), np.full((2, 3), step, np.float32), "f32")
            queue.add_frame(read_frame(pb.FramesRequest.FromString(raw).frame))

    threads = [threading.Thread(target=bring, daemon=True) for bring in (bring_plans, bring_frames)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while len(taken) < num_steps and time.monotonic() < deadline:
        applied += [edit.seq for edit in queue.pop_edits()]
        ready = queue.pop_ready()
        if ready is not None:
            assert ready.hidden is not None
            assert ready.plan.step in applied, "what was brought before a plan is applied before it"
            taken.append((ready.plan.step, float(ready.hidden[0, 0])))
            room.release()
    assert taken == [(step, float(step)) for step in range(num_steps)]
    for thread in threads:
        thread.join(5)
