"""Takes a stage through its steps on the compute thread: the next one begins the moment it can, no loop is asked.

Owns the steps that are launched and not finished. Everything else it touches belongs to the compute thread too (the
stage) or may be touched by any (the queue). Where the next stage lives in this process, results go straight to it; on
the same device, if that runs asynchronously, they never leave it: the hidden state is copied from buffer to buffer, and
stage 0 takes the tokens that the last stage has sampled before the host knows them.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from lamina.kernels.buffer import Buffer
from lamina.rpc_worker.device_thread import DeviceThread
from lamina.rpc_worker.stage import LaunchedStep, PreparedStep, Stage, StageResult
from lamina.rpc_worker.step_queue import DeviceHidden, Hidden, OnDevice, ReadyStep, StepQueue
from lamina.spec.errors import CapacityExceeded, LaminaError, StaleEpoch
from lamina.spec.step import AddSequence, StepDone, StepPlan

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
        self._prepared: PreparedStep | None = None  # of the next step
        self._failure: Exception | None = None
        self._stopped = False
        self._ended = False
        self._is_handed = False  # the hidden state of the step launched last is not copied yet
        self._neighbour: StepRunner | None = None  # who takes the results, where that is a stage of this process
        self._feeder: StepRunner | None = None  # the last stage, on stage 0 of the same process

    # -- from any thread

    @property
    def has_neighbour(self) -> bool:
        """Whether results go to a stage of this process."""
        return self._neighbour is not None

    def attach_neighbour(self, following: "StepRunner | None") -> None:
        """Results go straight to the next stage from now on; on the last stage that is stage 0."""
        self._neighbour = following
        if following is not None and self._stage.is_last:
            following._feeder = self

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

    def take_hidden(self, plan: StepPlan, hidden: Hidden) -> None:
        """What the stage before has made of a step. Raises StaleEpoch or InvalidPlan."""
        self._require_open()
        self._queue.add_hidden(plan.epoch, plan.step, hidden)
        self.wake()

    def _require_open(self) -> None:
        if self._ended:
            raise StaleEpoch("its epoch has ended")

    # -- on the compute thread

    def advance(self) -> float | None:
        """Launch the next step if there is one and room for it, finish the oldest if the device is done with it.

        A step at a time, so that others who share the thread have their turn. When to look at what is launched.
        """
        has_begun = self._begin()
        has_ended = self._end()
        if has_begun or has_ended:
            self.wake()
        return self._stage.due_s(self._launched[0]) if self._launched else None

    def _close(self) -> None:
        self._launched.clear()
        self._prepared = None
        self._is_handed = False
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
            feeder = self._feeder if self._shares_device_with(self._feeder) else None
            ready = self._queue.pop_ready(feeder._sampled() if feeder else None)
            if ready is None:
                self._prepare()
                return False
            self._launch(ready, feeder._stage.tokens_buffer if feeder else None)
        except Exception as error:  # told once the steps before it are
            self._failure = error
        return True

    def _prepare(self) -> None:
        """While the next step's input is on its way, do what needs none."""
        plan = None if self._prepared else self._queue.peek_plan()
        if plan is not None:
            self._prepared = self._stage.prepare(plan)

    def _launch(self, ready: ReadyStep, sampled: Buffer | None) -> None:
        neighbour = self._neighbour if self._shares_device_with(self._neighbour) else None
        hands_over = neighbour is not None and not self._stage.is_last
        prepared, self._prepared = self._prepared, None
        try:
            launched = self._stage.launch(ready, prepared, sampled=sampled, hands_over=hands_over)
        except CapacityExceeded as error:
            launched, hands_over = self._stage.refuse(ready, error), False
        self._launched.append(launched)
        if ready.handed is not None:
            ready.handed.on_taken()
        if neighbour is None:
            return
        if hands_over:
            self._is_handed = True
            handed = DeviceHidden(self._stage.hidden_buffer, ready.plan.num_rows, self._on_taken)
            self._give(lambda: neighbour.take_hidden(ready.plan, handed))
        else:
            neighbour.wake()  # the tokens are there, as far as the device is concerned

    def _on_taken(self) -> None:
        self._is_handed = False
        self.wake()

    def _has_room(self) -> bool:
        launched = self._launched
        if self._is_handed:
            return False
        return not launched or (len(launched) < self._stage.max_launched and not launched[-1].needs_logits)

    def _sampled(self) -> OnDevice | None:
        """Where the device keeps the tokens of the step launched last, which the host does not know yet."""
        return self._launched[-1].sampled if self._launched else None

    def _shares_device_with(self, other: "StepRunner | None") -> bool:
        """Whether what one leaves on the device is there for the other, in the order of their launches."""
        if other is None or other._device is not self._device:
            return False
        return min(self._stage.max_launched, other._stage.max_launched) > 1

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
        neighbour, done, hidden = self._neighbour, result.done, result.hidden
        if done is not None:
            if neighbour is not None:
                self._give(lambda: neighbour.take_done(done))
        elif hidden is None:
            return  # handed over when it was launched
        elif neighbour is not None:
            self._give(lambda: neighbour.take_hidden(result.ready.plan, hidden))
            if not result.num_nonfinite_rows:
                return  # it went where it should, and nobody on the loop has anything to say of it
        self._device.tell_loop(partial(self._on_outcome, result))

    def _give(self, hand_over: Callable[[], None]) -> None:
        try:
            hand_over()
        except LaminaError as error:
            self._device.tell_loop(partial(self._on_edge_lost, error))
