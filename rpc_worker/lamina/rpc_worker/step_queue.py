"""Which step may run next: a pure state machine over plans, frames and sampled tokens. No IO, no clock.

A step is ready when it is the lowest one not yet handed out, its plan is there, and its input is complete: on stage 0
every `FromSample` token, on later stages the frame. Plans and inputs may arrive in either order; what is held back is
bounded by MAX_RUN_AHEAD.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.spec.errors import InvalidPlan, StaleEpoch
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.step import MAX_RUN_AHEAD, FromSample, StepDone, StepPlan, Tokens
from lamina.v1 import step_pb2 as pb
from lamina.wire.frames import check_frame, decode_frame


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """A plan with its input: token ids int32 [rows] on stage 0, hidden state float32 [rows, H] elsewhere."""

    plan: StepPlan
    tokens: NDArray[np.int32] | None
    hidden: NDArray[np.float32] | None


class StepQueue:
    """Holds plans and inputs of one stage and epoch until they are complete."""

    def __init__(self, epoch: Epoch, *, takes_tokens: bool, hidden: int, wire_dtype: str, max_rows: int) -> None:
        self._epoch = epoch
        self._takes_tokens = takes_tokens
        self._hidden = hidden
        self._wire_dtype = wire_dtype
        self._max_rows = max_rows
        self._next = StepId(0)
        self._plans: dict[StepId, StepPlan] = {}
        self._last_planned = StepId(-1)
        self._frames: dict[StepId, pb.Frame] = {}
        self._tokens: dict[tuple[SeqId, int], tuple[StepId, int]] = {}  # (seq, pos) -> (when, token)

    @property
    def next_step(self) -> StepId:
        """The step that runs next."""
        return self._next

    def add_plan(self, plan: StepPlan) -> None:
        """Take the next plan. Raises StaleEpoch, or InvalidPlan if it is out of order or too large."""
        self._check_epoch(plan.epoch, f"plan of step {plan.step}")
        if plan.step != self._last_planned + 1:
            raise InvalidPlan(f"plan of step {plan.step} after that of step {self._last_planned}")
        if plan.step >= self._next + MAX_RUN_AHEAD:
            raise InvalidPlan(f"plan of step {plan.step} is more than {MAX_RUN_AHEAD} ahead of step {self._next}")
        if plan.num_rows > self._max_rows:
            raise InvalidPlan(f"step {plan.step} has {plan.num_rows} rows, the arena holds {self._max_rows}")
        if plan.step in self._frames:
            self._check_frame(self._frames[plan.step], plan)
        self._plans[plan.step] = plan
        self._last_planned = plan.step

    def add_frame(self, frame: pb.Frame) -> None:
        """Take a hidden state. Raises StaleEpoch, or InvalidPlan if it does not fit its plan or its step."""
        self._check_epoch(Epoch(frame.epoch), f"frame of step {frame.step}")
        step = StepId(frame.step)
        if self._takes_tokens:
            raise InvalidPlan(f"frame of step {step}: the first stage takes tokens, not frames")
        if not self._next <= step < self._next + MAX_RUN_AHEAD or step in self._frames:
            raise InvalidPlan(f"frame of step {step} is not expected; step {self._next} runs next")
        if step in self._plans:
            self._check_frame(frame, self._plans[step])
        self._frames[step] = frame

    def add_done(self, done: StepDone) -> None:
        """Take the tokens that a step sampled (the direct edge from the last stage). Raises StaleEpoch."""
        for sampled in done.tokens:
            self.add_token(done.epoch, sampled.seq, sampled.pos, sampled.token)

    def add_token(self, epoch: Epoch, seq: SeqId, pos: int, token: int) -> None:
        """Take one sampled token, from either side; the first to come counts."""
        self._check_epoch(epoch, f"token of sequence {seq}")
        self._tokens.setdefault((seq, pos), (self._next, token))

    def pop_ready(self) -> ReadyStep | None:
        """The next step if it is complete, else None."""
        plan = self._plans.get(self._next)
        if plan is None:
            return None
        tokens = hidden = None
        if self._takes_tokens:
            tokens = self._input_tokens(plan)
            if tokens is None:
                return None
        else:
            frame = self._frames.pop(self._next, None)
            if frame is None:
                return None
            hidden = decode_frame(frame)
        del self._plans[self._next]
        self._next = StepId(self._next + 1)
        self._drop_old_tokens()
        return ReadyStep(plan, tokens, hidden)

    def _input_tokens(self, plan: StepPlan) -> NDArray[np.int32] | None:
        ids: list[int] = []
        for piece in plan.slices:
            match piece.input:
                case Tokens(known):
                    ids.extend(known)
                case FromSample():
                    sampled = self._tokens.get((piece.seq, piece.pos))
                    if sampled is None:
                        return None
                    ids.append(sampled[1])
        for piece in plan.slices:
            self._tokens.pop((piece.seq, piece.pos), None)
        return np.array(ids, np.int32)

    def _drop_old_tokens(self) -> None:
        """Tokens that no plan can refer to any more: of sequences that ended, or that came twice."""
        if len(self._tokens) > 4096:
            oldest = self._next - 2 * MAX_RUN_AHEAD
            self._tokens = {key: entry for key, entry in self._tokens.items() if entry[0] >= oldest}

    def _check_epoch(self, epoch: Epoch, what: str) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"{what} is of epoch {epoch}, this stage is in epoch {self._epoch}")

    def _check_frame(self, frame: pb.Frame, plan: StepPlan) -> None:
        check_frame(frame, plan, self._hidden, self._wire_dtype)
