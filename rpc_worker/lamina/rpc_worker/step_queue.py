"""Which step may run next: a state machine over plans, hidden states and sampled tokens. No IO, no clock.

A step is ready when it is the lowest one not yet handed out, its plan is there, and its input is complete: on stage 0
every `FromSample` token, on later stages the hidden state. Plans and inputs may arrive in either order; what is held
back is bounded by MAX_RUN_AHEAD. Whatever cannot belong to the placement is refused at once, by raising into whoever
brought it, before anything is built from it.

Any thread may bring something, the compute thread takes steps out: every method holds the queue's lock.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from struct import Struct
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.rpc_worker.loan import Loan
from lamina.spec.errors import InvalidPlan, StaleEpoch
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.placement import StageSettings
from lamina.spec.step import MAX_RUN_AHEAD, AddSequence, RemoveSequence, StepDone, StepPlan, Tokens
from lamina.wire.frames import Frame, check_frame, check_frame_size, decode_frame

Edit = AddSequence | RemoveSequence
OnDevice = Mapping[tuple[SeqId, int], int]
_pack = Struct("=i").pack  # a token beside those that came packed


class ReadyStep(NamedTuple):
    """A plan with its input: token ids int32 [rows] on stage 0, hidden state float32 [rows, H] elsewhere.

    What a stage of this process has left on its device is `lent`: the hidden state, or on stage 0 the tokens that the
    host does not know yet. A token of -1 - i is that in row i of the buffer lent.
    """

    plan: StepPlan
    tokens: NDArray[np.int32] | None
    hidden: NDArray[np.float32] | None
    lent: Loan | None = None


class LentTokens(NamedTuple):
    """Tokens of a step that are on the device: which of the lent rows is that of (sequence, position)."""

    step: StepId
    rows: OnDevice
    loan: Loan


Hidden = NDArray[np.float32] | Loan


class StepQueue:
    """Holds plans and inputs of one stage and epoch until they are complete."""

    def __init__(
        self, epoch: Epoch, settings: StageSettings, *, takes_tokens: bool, hidden: int, vocab_size: int
    ) -> None:
        self._lock = Lock()
        self._epoch = epoch
        self._settings = settings
        self._takes_tokens = takes_tokens
        self._hidden = hidden
        self._vocab_size = vocab_size
        self._next = StepId(0)
        self._plans: dict[StepId, StepPlan] = {}
        self._last_planned = StepId(-1)
        self._inputs: dict[StepId, Frame | Hidden] = {}
        self._edits: list[Edit] = []
        self._tokens: dict[tuple[SeqId, int], int] = {}  # by (seq, pos), oldest first
        self._lent: deque[LentTokens] = deque()  # the newest last
        self._fed_on_device: set[tuple[SeqId, int]] = set()  # tokens that were used before the host knew them
        # A plan refers back MAX_RUN_AHEAD steps at most, and each token comes twice at most (edge and relay).
        self._max_tokens = 2 * MAX_RUN_AHEAD * settings.max_logit_rows

    @property
    def next_step(self) -> StepId:
        """The step that runs next."""
        return self._next

    def add_plan(self, plan: StepPlan) -> None:
        """Take the next plan. Raises StaleEpoch, or InvalidPlan if it is out of order or too large."""
        with self._lock:
            self._check_epoch(plan.epoch, "plan of step", plan.step)
            if plan.step != self._last_planned + 1:
                raise InvalidPlan(f"plan of step {plan.step} after that of step {self._last_planned}")
            if plan.step >= self._next + MAX_RUN_AHEAD:
                raise InvalidPlan(f"plan of step {plan.step} is more than {MAX_RUN_AHEAD} ahead of step {self._next}")
            self._check_size(plan)
            self._check_input(self._inputs.get(plan.step), plan)
            self._plans[plan.step] = plan
            self._last_planned = plan.step

    def add_edit(self, edit: Edit) -> None:
        """Take what must be known, or may be forgotten, before any step whose plan comes later runs."""
        with self._lock:
            self._edits.append(edit)
            if isinstance(edit, RemoveSequence):
                for key in [key for key in self._tokens if key[0] == edit.seq]:
                    del self._tokens[key]
                self._fed_on_device = {key for key in self._fed_on_device if key[0] != edit.seq}

    def expect_frame(self, frame: Frame) -> None:
        """Whether `add_frame` would take it, for one whose payload has not come. Raises like that."""
        with self._lock:
            self._check_frame(frame)

    def add_frame(self, frame: Frame) -> None:
        """Take a hidden state off the wire. Raises StaleEpoch, or InvalidPlan if it fits no plan or no step."""
        with self._lock:
            self._check_frame(frame)
            self._inputs[StepId(frame.step)] = frame

    def add_hidden(self, epoch: Epoch, step: StepId, hidden: Hidden) -> None:
        """Take a hidden state from a stage of this process. Raises like `add_frame`."""
        with self._lock:
            self._check_expected(epoch, step)
            if step in self._plans:
                self._check_input(hidden, self._plans[step])
            self._inputs[step] = hidden

    def add_done(self, done: StepDone) -> None:
        """Take the tokens of an answer. Raises StaleEpoch or InvalidPlan."""
        self.add_tokens(done.epoch, done.step, [(token.seq, token.pos, token.token) for token in done.tokens])

    def add_tokens(self, epoch: Epoch, step: StepId, tokens: Iterable[tuple[SeqId, int, int]]) -> None:
        """Take what a step sampled, (sequence, position, token) each. Raises StaleEpoch or InvalidPlan."""
        with self._lock:
            self._check_epoch(epoch, "answer to step", step)
            if step >= self._next:
                raise InvalidPlan(f"answer to step {step}, which has not run here; step {self._next} runs next")
            for seq, pos, token in tokens:
                self._add_token(seq, pos, token)

    def add_lent(self, epoch: Epoch, lent: LentTokens) -> None:
        """Take tokens that are on the device of the last stage, in this process. Raises StaleEpoch.

        They serve as many steps as the loan lasts. The last stage begins none of those before its hidden state has come
        from here, so it cannot write the buffer again before those steps are launched here.
        """
        with self._lock:
            self._check_epoch(epoch, "tokens of step", lent.step)
            self._lent.append(lent)
            if len(self._lent) > lent.loan.lasts:
                self._lent.popleft()

    def add_token(self, epoch: Epoch, seq: SeqId, pos: int, token: int) -> None:
        """Take one sampled token, from either side; the first to come counts. Raises StaleEpoch or InvalidPlan."""
        with self._lock:
            self._check_epoch(epoch, "token of sequence", seq)
            self._add_token(seq, pos, token)

    def pop_edits(self) -> list[Edit]:
        """What was added since the last call, in order."""
        with self._lock:
            edits, self._edits = self._edits, []
            return edits

    def peek_plan(self) -> StepPlan | None:
        """The plan of the next step, whether or not its input is complete; None while there are edits to pop."""
        with self._lock:
            return None if self._edits else self._plans.get(self._next)

    def pop_ready(self) -> ReadyStep | None:
        """The next step if it is complete, else None; None as well while there are edits to pop."""
        with self._lock:
            plan = self._plans.get(self._next)
            if plan is None or self._edits:
                return None
            tokens = lent = received = None
            if self._takes_tokens:
                tokens, lent = self._input_tokens(plan)
            else:
                received = self._inputs.pop(self._next, None)
            if tokens is None and received is None:
                return None
            del self._plans[self._next]
            self._next = StepId(self._next + 1)
        if isinstance(received, Frame):
            return ReadyStep(plan, None, decode_frame(received))
        if isinstance(received, Loan):
            return ReadyStep(plan, None, None, received)
        return ReadyStep(plan, tokens, received, lent)

    def _input_tokens(self, plan: StepPlan) -> tuple[NDArray[np.int32] | None, Loan | None]:
        """The step's tokens, None if one is nowhere yet, and the loan that has those which only the device knows."""
        parts: list[bytes] = []
        used: list[tuple[SeqId, int]] = []
        fed: list[tuple[SeqId, int]] = []
        newest: LentTokens | None = None
        tokens = self._tokens
        for piece in plan.slices:
            key, source = (piece.seq, piece.pos), piece.input
            sampled = tokens.get(key)
            if sampled is not None:
                used.append(key)
            if isinstance(source, Tokens):
                parts.append(source.packed)
            elif sampled is not None:
                parts.append(_pack(sampled))
            else:
                lent = self._lent_with(key, plan.step)
                if lent is None:
                    return None, None
                fed.append(key)
                parts.append(_pack(-1 - lent.loan.first - lent.rows[key]))
                if newest is None or newest.step < lent.step:
                    newest = lent  # all are of one buffer, and what came before it is there as well
        for key in used:
            del tokens[key]
        self._fed_on_device.update(fed)
        return np.frombuffer(b"".join(parts), np.int32), None if newest is None else newest.loan

    def _lent_with(self, key: tuple[SeqId, int], step: StepId) -> LentTokens | None:
        for lent in reversed(self._lent):
            if key in lent.rows:
                return lent if step <= lent.step + lent.loan.lasts else None
        return None

    def _add_token(self, seq: SeqId, pos: int, token: int) -> None:
        if not self._takes_tokens:
            raise InvalidPlan(f"token of sequence {seq}: only the first stage takes tokens")
        if not 0 <= token < self._vocab_size:
            raise self._bad_ids(token, f"sequence {seq}")
        if (seq, pos) in self._fed_on_device:
            self._fed_on_device.remove((seq, pos))
            return
        self._tokens.setdefault((seq, pos), token)
        if len(self._tokens) > self._max_tokens:
            del self._tokens[next(iter(self._tokens))]

    def _check_frame(self, frame: Frame) -> None:
        step = StepId(frame.step)
        self._check_expected(Epoch(frame.epoch), step)
        plan = self._plans.get(step)
        if plan is None:
            check_frame_size(frame, self._settings.max_rows, self._hidden, self._settings.wire_dtype)
        else:
            self._check_input(frame, plan)

    def _check_expected(self, epoch: Epoch, step: StepId) -> None:
        self._check_epoch(epoch, "frame of step", step)
        if self._takes_tokens:
            raise InvalidPlan(f"frame of step {step}: the first stage takes tokens, not frames")
        if not self._next <= step < self._next + MAX_RUN_AHEAD or step in self._inputs:
            raise InvalidPlan(f"frame of step {step} is not expected; step {self._next} runs next")

    def _check_input(self, received: Frame | Hidden | None, plan: StepPlan) -> None:
        if isinstance(received, Frame):
            check_frame(received, plan, self._hidden, self._settings.wire_dtype)
        elif received is not None and len(received) != plan.num_rows:
            raise InvalidPlan(f"hidden state of step {plan.step} has {len(received)} rows, its plan {plan.num_rows}")

    def _check_epoch(self, epoch: Epoch, what: str, number: int) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"{what} {number} is of epoch {epoch}, this stage is in epoch {self._epoch}")

    def _check_size(self, plan: StepPlan) -> None:
        settings = self._settings
        found = num_rows, num_seqs, num_logit_rows = plan.num_rows, len(plan.slices), plan.num_logit_rows
        limits = max_rows, max_seqs, max_logit_rows = settings.max_rows, settings.max_seqs, settings.max_logit_rows
        if num_rows > max_rows or num_seqs > max_seqs or num_logit_rows > max_logit_rows:
            raise InvalidPlan(f"step {plan.step} has {found} (rows, sequences, logit rows), the arena holds {limits}")
        for piece in plan.slices:
            if isinstance(piece.input, Tokens):
                largest = int(np.frombuffer(piece.input.packed, np.uint32).max())
                if largest >= self._vocab_size:
                    raise self._bad_ids(largest, f"step {plan.step}, sequence {piece.seq}")

    def _bad_ids(self, token: int, where: str) -> InvalidPlan:
        return InvalidPlan(f"{where}: token id {token} is not within [0, {self._vocab_size})")
