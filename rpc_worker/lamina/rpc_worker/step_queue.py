"""Which step may run next: a pure state machine over plans, frames and sampled tokens. No IO, no clock.

A step is ready when it is the lowest one not yet handed out, its plan is there, and its input is complete: on stage 0
every `FromSample` token, on later stages the frame. Plans and inputs may arrive in either order; what is held back is
bounded by MAX_RUN_AHEAD. Whatever cannot belong to the placement is refused at once, before anything is built from it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.spec.errors import InvalidPlan, StaleEpoch
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.placement import StageSettings
from lamina.spec.step import MAX_RUN_AHEAD, FromSample, StepDone, StepPlan, Tokens
from lamina.v1 import step_pb2 as pb
from lamina.wire.frames import check_frame, check_frame_size, decode_frame


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """A plan with its input: token ids int32 [rows] on stage 0, hidden state float32 [rows, H] elsewhere."""

    plan: StepPlan
    tokens: NDArray[np.int32] | None
    hidden: NDArray[np.float32] | None


class StepQueue:
    """Holds plans and inputs of one stage and epoch until they are complete."""

    def __init__(
        self, epoch: Epoch, settings: StageSettings, *, takes_tokens: bool, hidden: int, vocab_size: int
    ) -> None:
        self._epoch = epoch
        self._settings = settings
        self._takes_tokens = takes_tokens
        self._hidden = hidden
        self._vocab_size = vocab_size
        self._next = StepId(0)
        self._plans: dict[StepId, StepPlan] = {}
        self._last_planned = StepId(-1)
        self._frames: dict[StepId, pb.Frame] = {}
        self._tokens: dict[tuple[SeqId, int], int] = {}  # by (seq, pos), oldest first
        # A plan refers back MAX_RUN_AHEAD steps at most, and each token comes twice at most (edge and relay).
        self._max_tokens = 2 * MAX_RUN_AHEAD * settings.max_logit_rows

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
        self._check_size(plan)
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
        else:
            check_frame_size(frame, self._settings.max_rows, self._hidden, self._settings.wire_dtype)
        self._frames[step] = frame

    def add_done(self, done: StepDone) -> None:
        """Take the tokens that a step sampled (direct edge from the last stage). Raises StaleEpoch or InvalidPlan."""
        self._check_epoch(done.epoch, f"answer to step {done.step}")
        if done.step >= self._next:
            raise InvalidPlan(f"answer to step {done.step}, which has not run here; step {self._next} runs next")
        for sampled in done.tokens:
            self.add_token(done.epoch, sampled.seq, sampled.pos, sampled.token)

    def add_token(self, epoch: Epoch, seq: SeqId, pos: int, token: int) -> None:
        """Take one sampled token, from either side; the first to come counts. Raises StaleEpoch or InvalidPlan."""
        self._check_epoch(epoch, f"token of sequence {seq}")
        if not self._takes_tokens:
            raise InvalidPlan(f"token of sequence {seq}: only the first stage takes tokens")
        self._check_ids((token,), f"sequence {seq}")
        self._tokens.setdefault((seq, pos), token)
        if len(self._tokens) > self._max_tokens:
            del self._tokens[next(iter(self._tokens))]

    def forget(self, seq: SeqId) -> None:
        """Drop the tokens of a sequence that is over."""
        for key in [key for key in self._tokens if key[0] == seq]:
            del self._tokens[key]

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
                    ids.append(sampled)
        for piece in plan.slices:
            self._tokens.pop((piece.seq, piece.pos), None)
        return np.array(ids, np.int32)

    def _check_epoch(self, epoch: Epoch, what: str) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"{what} is of epoch {epoch}, this stage is in epoch {self._epoch}")

    def _check_size(self, plan: StepPlan) -> None:
        settings = self._settings
        found = (plan.num_rows, len(plan.slices), plan.num_logit_rows)
        limits = (settings.max_rows, settings.max_seqs, settings.max_logit_rows)
        if any(size > limit for size, limit in zip(found, limits, strict=True)):
            raise InvalidPlan(f"step {plan.step} has {found} (rows, sequences, logit rows), the arena holds {limits}")
        for piece in plan.slices:
            if isinstance(piece.input, Tokens):
                self._check_ids(piece.input.ids, f"step {plan.step}, sequence {piece.seq}")

    def _check_ids(self, ids: tuple[int, ...], where: str) -> None:
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise InvalidPlan(f"{where}: token ids {min(ids)} .. {max(ids)} are not within [0, {self._vocab_size})")

    def _check_frame(self, frame: pb.Frame, plan: StepPlan) -> None:
        check_frame(frame, plan, self._hidden, self._settings.wire_dtype)
