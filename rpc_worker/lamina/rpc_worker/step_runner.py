"""Takes a stage through its steps on the compute thread: the next one begins the moment it can, no loop is asked.

Owns the steps that are launched and not finished. Everything else it touches belongs to the compute thread too (the
stage) or may be touched by any (the queue). Results go straight to the neighbour: a `Link` to another process, or the
runner of the next stage where that lives in this one. If its device then reaches this one and both run asynchronously,
they do not come to the host in between: the hidden state is copied from buffer to buffer, and stage 0 takes the tokens
that the last stage has sampled before the host knows them.
What is lent so, by whom and for how long, is `loan`'s affair; a runner ends what its own stage has lent.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Event
from lamina.rpc_worker.device_thread import DeviceThread
from lamina.rpc_worker.loan import Loan
from lamina.rpc_worker.stage import LaunchedStep, PreparedStep, Stage, StageResult
from lamina.rpc_worker.step_queue import Hidden, LentTokens, ReadyStep, StepQueue
from lamina.spec.errors import CapacityExceeded, LaminaError, StaleEpoch
from lamina.spec.ids import Epoch
from lamina.spec.step import AddSequence, StepDone, StepPlan

_log = logging.getLogger(__name__)
Outcome = StageResult | Exception


class Neighbour(Protocol):
    """Who takes what a stage's steps leave, on the compute thread. Raises LaminaError for what it refuses."""

    def take_hidden(self, plan: StepPlan, hidden: NDArray[np.float32]) -> None:
        """A step's hidden state, float32 [rows, H], for the next stage; it is there during the call only."""

    def take_done(self, done: StepDone) -> None:
        """What the last stage has sampled, for stage 0."""


class StepRunner:
    """One epoch of one stage. `on_outcome` hears on the loop, in order, of the results that somebody there has to know
    of, and which neighbour took each (None: nobody did), or of the first failure.

    `on_edge_lost` hears on the loop why a neighbour refused a result. After either, or after `stop`, no further step is
    begun.
    """

    def __init__(
        self,
        stage: Stage,
        queue: StepQueue,
        device: DeviceThread,
        on_outcome: Callable[[Outcome, Neighbour | None], None],
        on_edge_lost: Callable[[LaminaError], None],
    ) -> None:
        self._stage = stage
        self._queue = queue
        self._device = device
        self._on_outcome = on_outcome
        self._on_edge_lost = on_edge_lost
        self._launched: deque[LaunchedStep] = deque()
        self._prepared: PreparedStep | None = None  # of the next step
        self._failure: Exception | None = None
        self._stopped = False
        self._ended = False
        self._lent: deque[Loan] = deque()  # to the neighbour, the newest last
        self._neighbour: Neighbour | None = None

    # -- from any thread

    @property
    def neighbour(self) -> Neighbour | None:
        """Who takes the results now."""
        return self._neighbour

    def attach_neighbour(self, following: Neighbour | None) -> None:
        """Results go straight to the next stage from now on; on the last stage that is stage 0."""
        self._neighbour = following

    def wake(self) -> None:
        """The queue has something new."""
        self._device.wake(self)

    def stop(self) -> None:
        """Begin no further step; what is launched is finished and told."""
        self._stopped = True

    def end(self) -> None:
        """The epoch is over: begin nothing, take nothing, give up what is launched, forget the sequences."""
        self._stopped = self._ended = True
        self._device.post(self._close, self._on_closed)

    def take_done(self, done: StepDone) -> None:
        """On stage 0: what the last stage has sampled. Raises StaleEpoch or InvalidPlan."""
        self._require_open()
        self._queue.add_done(done)
        self.wake()

    def take_lent(self, epoch: Epoch, lent: LentTokens) -> None:
        """On stage 0: where the last stage's device has tokens that no host knows yet. Raises StaleEpoch."""
        self._require_open()
        self._queue.add_lent(epoch, lent)
        self.wake()

    def take_hidden(self, plan: StepPlan, hidden: NDArray[np.float32]) -> None:
        """What the stage before has made of a step. Raises StaleEpoch or InvalidPlan."""
        self._take_input(plan, hidden.copy())

    def take_loan(self, plan: StepPlan, loan: Loan) -> None:
        """The same, on the device of the stage before. Raises StaleEpoch or InvalidPlan."""
        self._take_input(plan, loan)

    def _take_input(self, plan: StepPlan, hidden: Hidden) -> None:
        self._require_open()
        self._queue.add_hidden(plan.epoch, plan.step, hidden)
        self.wake()

    def _require_open(self) -> None:
        if self._ended:
            raise StaleEpoch("its epoch has ended")

    # -- on the compute thread

    def advance(self) -> float | None:
        """Finish the oldest step if the device is done with it, launch the next if there is one and room for it.

        A step at a time, so that others who share the thread have their turn. When to look at what is launched.
        """
        try:
            has_ended = self._end()  # first: the next stage waits for it
            has_begun = self._begin()
            has_ended = (has_begun and self._end()) or has_ended  # a device that does not work by itself is done by now
            if has_begun or has_ended:
                self.wake()
            return self._stage.due_s(self._launched[0]) if self._launched else None
        except Exception as error:  # a fault of ours: it ends this stage's epoch, not the thread of all stages
            self._launched.clear()
            self._stopped = True
            self._device.tell_loop(partial(self._on_outcome, error, None))
            return None

    def awaited(self) -> Event | None:
        """What the oldest launched step is done with."""
        return self._launched[0].outcome.transfers.event if self._launched else None

    def note_unfinished(self) -> None:
        """That was watched, and not done until just now."""
        self._stage.note_unfinished()

    def _close(self) -> None:
        self._launched.clear()
        self._prepared = None
        while self._lent:
            self._lent.popleft().end()
        self._stage.reset_sequences()  # and waits for what was launched, here and by those who borrowed

    def _on_closed(self, outcome: object) -> None:
        if isinstance(outcome, Exception):
            _log.error("the sequences of an epoch that is over could not be forgotten", exc_info=outcome)

    def _begin(self) -> bool:
        if self._stopped or self._failure is not None or not self._has_room():
            return False
        try:
            for edit in self._queue.pop_edits():
                if isinstance(edit, AddSequence):
                    self._stage.add_sequence(edit)
                else:
                    self._stage.remove_sequence(edit.seq)
            ready = self._queue.pop_ready()
            if ready is None:
                self._prepare()
                return False
            self._launch(ready)
        except Exception as error:  # told once the steps before it are
            self._failure = error
        return True

    def _prepare(self) -> None:
        """While the next step's input is on its way, do what needs none."""
        plan = None if self._prepared else self._queue.peek_plan()
        if plan is not None:
            self._prepared = self._stage.prepare(plan)

    def _launch(self, ready: ReadyStep) -> None:
        neighbour = self._neighbour if isinstance(self._neighbour, StepRunner) else None  # who could borrow
        lends = neighbour is not None and neighbour._stage.reaches(self._stage)
        prepared, self._prepared = self._prepared, None
        while self._lent and len(self._lent) >= self._lent[0].lasts:
            self._lent.popleft().end()  # the step about to be launched writes there
        try:
            launched = self._stage.launch(ready, prepared, lends=lends)
        except CapacityExceeded as error:
            launched = self._stage.refuse(ready, error)
        self._launched.append(launched)
        if ready.lent is not None:
            ready.lent.give_back()
        if neighbour is not None and launched.lent is not None:
            self._lend(neighbour, launched, launched.lent)

    def _lend(self, neighbour: "StepRunner", launched: LaunchedStep, loan: Loan) -> None:
        plan = launched.ready.plan
        if neighbour is not self:  # who reads it in its very next step, and before that writes it
            self._lent.append(loan)
        if self._stage.is_last:
            lent = LentTokens(plan.step, launched.sampled, loan)
            self._give(lambda: neighbour.take_lent(plan.epoch, lent))
        else:
            loan.on_back = self.wake
            self._give(lambda: neighbour.take_loan(plan, loan))

    def _has_room(self) -> bool:
        launched = self._launched
        if self._lent and not self._stage.is_last and not self._lent[-1].is_back:
            return False  # the hidden state of the step launched last is not copied yet
        return not launched or (len(launched) < self._stage.max_launched and not launched[-1].needs_logits)

    def _end(self) -> bool:
        if self._launched:
            try:
                if not self._stage.is_done(self._launched[0]):
                    return False
                launched = self._launched.popleft()
                result = self._stage.finish(launched)
            except Exception as error:
                self._launched.clear()
                self._failure = error
            else:
                self._deliver(result)
                self._stage.count(launched)
                return True
        if self._failure is None or self._stopped:
            return False
        self._stopped = True
        self._device.tell_loop(partial(self._on_outcome, self._failure, None))
        return False

    def _deliver(self, result: StageResult) -> None:
        neighbour, hidden = self._neighbour, result.hidden
        if result.done is None and hidden is None:
            return  # lent when it was launched
        taker = neighbour if neighbour is not None and self._give(partial(_hand_over, neighbour, result)) else None
        if hidden is not None:
            self._stage.note_nonfinite(result.ready.plan, hidden)  # now that the next stage has it
            if neighbour is not None:
                return  # it went where it should, or the loop hears why not, and has nothing else to say of it
            result = result._replace(hidden=None)
        self._device.tell_loop(partial(self._on_outcome, result, taker))

    def _give(self, hand_over: Callable[[], None]) -> bool:
        try:
            hand_over()
        except LaminaError as error:
            self._device.tell_loop(partial(self._on_edge_lost, error))
            return False
        return True


def _hand_over(neighbour: Neighbour, result: StageResult) -> None:
    if result.done is not None:
        neighbour.take_done(result.done)
    elif result.hidden is not None:
        neighbour.take_hidden(result.ready.plan, result.hidden)
