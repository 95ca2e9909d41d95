"""A stage on the event loop with its device and edges faked, which a test works by hand."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.rpc_worker.device_thread import Worker
from lamina.rpc_worker.stage import LaunchedStep, StageResult
from lamina.rpc_worker.stage_facts import StageFacts
from lamina.rpc_worker.stage_model import Outcome
from lamina.rpc_worker.stage_runtime import StageKey, StageRuntime
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.spec.ids import Epoch, PlacementId, SeqId, StepId
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.step import AddSequence, SampledToken, SeqSlice, StepDone, StepPlan, Tokens
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

    max_launched = 1

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def reaches(self, other: "FakeStage") -> bool:
        return False

    def launch(self, ready: ReadyStep, prepared: StepPlan | None, *, lends: bool) -> LaunchedStep:
        assert prepared in (None, ready.plan)
        assert not lends
        return LaunchedStep(ready, Outcome(np.zeros(0), None), 0.0)  # type: ignore[arg-type]

    def due_s(self, launched: LaunchedStep) -> float:
        return 0.0

    def is_done(self, launched: LaunchedStep) -> bool:
        return True

    def finish(self, launched: LaunchedStep) -> StageResult:
        ready = launched.ready
        if not self.is_last:
            return StageResult(ready, np.ones((ready.plan.num_rows, SPEC.hidden), np.float32), None)
        tokens = tuple(SampledToken(piece.seq, piece.end, 5) for piece in ready.plan.slices)
        return StageResult(ready, None, StepDone(ready.plan.epoch, ready.plan.step, tokens))

    def count(self, launched: LaunchedStep) -> None:
        pass

    def note_nonfinite(self, plan: StepPlan, hidden: NDArray[np.float32]) -> None:
        assert np.isfinite(hidden).all()

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
    """Remembers the steps whose results it was given."""

    kind = "direct"
    rtt_s = 0.0
    num_bytes = queue_depth = 0

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.closed = False

    def take_hidden(self, plan: StepPlan, hidden: NDArray[np.float32]) -> None:
        assert hidden.shape == (plan.num_rows, SPEC.hidden)
        self.sent.append(plan.step)

    def take_done(self, done: StepDone) -> None:
        self.sent.append(done.step)

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
