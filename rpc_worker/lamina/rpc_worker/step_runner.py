"""Takes a stage through its steps on the compute thread: the next one begins the moment it can, no loop is asked.

Owns the steps that are launched and not finished. Everything else it touches belongs to the compute thread too (the
stage) or may be touched by any (the queue). Where the next stage lives in this process, results go straight to it.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from lamina.rpc_worker.device_thread import DeviceThread
from lamina.rpc_worker.stage import LaunchedStep, Stage, StageResult
from lamina.rpc_worker.step_queue import OnDevice, StepQueue
from lamina.spec.errors import LaminaError, StaleEpoch
from lamina.spec.step import AddSequence

_log = logging.getLogger(__name__)
Outcome = StageResult | Exception


class StepRunner:
    """One epoch of one stage. `on_outcome` hears on the loop of every step's result, in order, or of the first failure.

    `on_edge_lost` hears on the loop why a neighbour of this process refused a result. After either, or after `stop`, no
    further step is begun.
    """

    def __init__(
        self,
        stage: Stage,
        queue: StepQueue,
        device: DeviceThread,
        on_outcome: Callable[[Outcome], None],
        on_edge_lost: Callable[[LaminaError], None],
    ) -> None:
        self._stage = stage
        self._queue = queue
        self._device = device
        self._on_outcome = on_outcome
        self._on_edge_lost = on_edge_lost
        self._launched: deque[LaunchedStep] = deque()
        self._failure: Exception | None = None
        self._stopped = False
        self._ended = False
        self.neighbour: StepRunner | None = None  # who takes the results, where that is a stage of this process

    # -- from any thread

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

    def take_result(self, result: StageResult) -> None:
        """The result of the stage before, or on stage 0 of the last. Raises StaleEpoch or InvalidPlan."""
        if self._ended:
            raise StaleEpoch("its epoch has ended")
        if result.done is not None:
            self._queue.add_done(result.done)
        elif result.hidden is not None:
            plan = result.ready.plan
            self._queue.add_hidden(plan.epoch, plan.step, result.hidden)
        self.wake()

    # -- on the compute thread

    def advance(self) -> bool:
        """Launch the next step if there is one and room for it, finish the oldest if the device is done with it.

        A step at a time, so that others who share the thread have their turn. Whether launched work is left.
        """
        has_begun = self._begin()
        has_ended = self._end()
        if has_begun or has_ended:
            self.wake()
        return bool(self._launched)

    def _close(self) -> None:
        self._launched.clear()
        self._stage.reset_sequences()

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
            ready = self._queue.pop_ready(self._on_device())
            if ready is None:
                return False
            self._launched.append(self._stage.launch(ready))
        except Exception as error:  # told once the steps before it are
            self._failure = error
        return True

    def _has_room(self) -> bool:
        launched = self._launched
        return not launched or (len(launched) < self._stage.max_launched and not launched[-1].needs_logits)

    def _on_device(self) -> OnDevice:
        """Tokens that a next step can take from the device: those of the step before, where this is the only stage."""
        return self._launched[-1].sampled if self._launched and self.neighbour is self else {}

    def _end(self) -> bool:
        if self._launched:
            try:
                if not self._stage.is_done(self._launched[0]):
                    return False
                result = self._stage.finish(self._launched.popleft())
            except Exception as error:
                self._launched.clear()
                self._failure = error
            else:
                self._deliver(result)
                return True
        if self._failure is None or self._stopped:
            return False
        self._stopped = True
        self._device.tell_loop(partial(self._on_outcome, self._failure))
        return False

    def _deliver(self, result: StageResult) -> None:
        neighbour = self.neighbour
        if neighbour is not None:
            try:
                neighbour.take_result(result)
            except LaminaError as error:
                self._device.tell_loop(partial(self._on_edge_lost, error))
            else:
                if result.done is None and not result.num_nonfinite_rows:
                    return  # it went where it should, and nobody on the loop has anything to say of it
        self._device.tell_loop(partial(self._on_outcome, result))
