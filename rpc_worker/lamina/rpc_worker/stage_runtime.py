"""A loaded stage as the daemon's event loop sees it: its step queue, its controller, its edge forward.

Owned by the loop. The `Stage` behind it belongs to the compute thread and is touched only through `DeviceThread`.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from lamina.rpc_worker.device_thread import DeviceThread
from lamina.rpc_worker.link import Link
from lamina.rpc_worker.stage import Stage, StageResult
from lamina.rpc_worker.step_queue import StepQueue
from lamina.spec.errors import InvalidPlan, LaminaError, StaleEpoch, Unavailable, WorkerLost
from lamina.spec.ids import Epoch, PlacementId
from lamina.spec.model import LayerRange, ModelSpec
from lamina.spec.placement import StageSettings
from lamina.spec.step import AddSequence, RemoveSequence, SampleToken, StepCommand, StepDone, StepPlan
from lamina.v1 import step_pb2 as pb
from lamina.wire.convert import done_from_message, done_to_message
from lamina.wire.frames import encode_frame
from lamina.wire.status import error_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageKey:
    """Which stage of which placement, in which epoch, of how many."""

    placement: PlacementId
    epoch: Epoch
    index: int
    num_stages: int

    @property
    def is_first(self) -> bool:
        """Takes tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Samples."""
        return self.index == self.num_stages - 1

    @property
    def next_index(self) -> int:
        """The stage that this one dials: its successor, or stage 0 for the last."""
        return (self.index + 1) % self.num_stages


class StageRuntime:
    """Moves plans, frames and tokens between the network and the compute thread."""

    def __init__(
        self,
        key: StageKey,
        stage: Stage,
        device: DeviceThread,
        spec: ModelSpec,
        layers: LayerRange,
        settings: StageSettings,
        worker_name: str,
    ) -> None:
        self.key = key
        self.stage = stage
        self.device = device
        self.spec = spec
        self.layers = layers
        self.settings = settings
        self._who = f"{worker_name} (layers {layers})"
        self._queue = self._new_queue()
        self._responses: asyncio.Queue[pb.StepsResponse | None] | None = None
        self._link: Link | None = None
        self._ended = False
        self._failed = False

    @property
    def is_controlled(self) -> bool:
        """Whether a coordinator holds the Steps stream."""
        return self._responses is not None

    def adopt(self, key: StageKey) -> None:
        """Serve another placement or epoch with the weights and cache that are already here."""
        self.key = key
        self._queue = self._new_queue()
        self._ended = self._failed = False

    def check_key(self, placement: str, epoch: int, stage: int) -> None:
        """Raise StaleEpoch unless these name this stage in its present epoch."""
        key = self.key
        if (placement, stage) != (key.placement, key.index) or epoch != key.epoch or self._ended:
            state = "has ended" if self._ended and epoch == key.epoch else f"is {key.epoch}"
            raise StaleEpoch(f"{self._who}: epoch {epoch} of {placement}#{stage} is refused, the stage's epoch {state}")

    # -- the coordinator's Steps stream

    def attach_controller(self) -> "asyncio.Queue[pb.StepsResponse | None]":
        """Begin the epoch's Steps stream; what is put on the queue goes to the coordinator, None ends the stream."""
        if self._responses is not None:
            raise Unavailable(f"{self._who}: another coordinator controls this stage")
        self._responses = asyncio.Queue()
        return self._responses

    async def detach_controller(self) -> None:
        """The coordinator is gone: its sequences and their blocks are forgotten, the epoch is over."""
        self._responses = None
        self._ended = True
        await self.close_link()
        await self.device.call(self.stage.reset_sequences)

    def handle_command(self, command: StepCommand) -> None:
        """Take one command. Raises InvalidPlan or StaleEpoch for a malformed or outdated one."""
        match command:
            case StepPlan():
                self._queue.add_plan(command)
                self._pump()
            case AddSequence():
                if not self.key.is_last:
                    raise InvalidPlan(f"{self._who}: sequences are added to the last stage only")
                self.device.post(lambda: self.stage.add_sequence(command), self._report_failure)
            case RemoveSequence(seq):
                self.device.post(lambda: self.stage.remove_sequence(seq), self._report_failure)
            case SampleToken(epoch, seq, pos, token):
                self._queue.add_token(epoch, seq, pos, token)
                self._pump()

    # -- the edge from the stage before

    def handle_frames_message(self, message: pb.FramesRequest) -> None:
        """Take a frame or, on stage 0, an answer of the last stage. Raises InvalidPlan or StaleEpoch."""
        if self._ended:
            raise StaleEpoch(f"{self._who}: epoch {self.key.epoch} has ended")
        match message.WhichOneof("body"):
            case "frame":
                self._queue.add_frame(message.frame)
            case "done" if self.key.is_first:
                self._queue.add_done(done_from_message(message.done))
            case other:
                raise InvalidPlan(f"{self._who}: message {other!r} is out of order on a Frames stream")
        self._pump()

    # -- the edge to the next stage

    def attach_link(self, link: Link) -> None:
        """Use this edge for everything that leaves the stage."""
        self._link = link

    def link_lost(self, error: LaminaError) -> None:
        """The edge forward broke. Losing the feedback edge costs speed, any other ends the stage's epoch."""
        self._link = None
        if self.key.is_last:
            _log.warning("%s: feedback edge lost, tokens go through the coordinator: %s", self._who, error)
        elif not self._ended:
            self.fail(WorkerLost(f"{self._who}: edge to the next stage lost: {error}"))

    async def close_link(self) -> None:
        """Drop the edge forward."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    # -- steps

    def fail(self, error: LaminaError) -> None:
        """Tell the coordinator that this stage runs no further step of this epoch."""
        if self._failed:
            return
        self._failed = True
        _log.error("%s: %s", self._who, error)
        if self._responses is not None:
            failure = pb.StageFailure(error=error_name(error), message=str(error))
            self._responses.put_nowait(pb.StepsResponse(failure=failure))

    def _pump(self) -> None:
        while not self._failed and (ready := self._queue.pop_ready()) is not None:
            self.device.post(partial(self.stage.run, ready), self._on_result)

    def _on_result(self, outcome: StageResult | Exception) -> None:
        if isinstance(outcome, Exception):
            self._report_failure(outcome)
        elif self._ended or outcome.ready.plan.epoch != self.key.epoch:
            return  # its coordinator is gone
        elif outcome.done is not None:
            self._send_done(outcome.done)
        elif outcome.hidden is not None:
            self._send_hidden(outcome)

    def _send_hidden(self, result: StageResult) -> None:
        if result.num_nonfinite_rows:
            step = result.ready.plan.step
            _log.error("%s: %d rows of step %d are not finite", self._who, result.num_nonfinite_rows, step)
        if self._link is None:
            self.fail(Unavailable(f"{self._who}: no edge to stage {self.key.next_index}"))
        elif result.hidden is not None:
            frame = encode_frame(result.ready.plan, result.hidden, self.settings.wire_dtype)
            self._link.send(pb.FramesRequest(frame=frame))

    def _send_done(self, done: StepDone) -> None:
        message = done_to_message(done)
        if self.key.is_first:
            self._queue.add_done(done)
            self._pump()
        elif self._link is not None:
            self._link.send(pb.FramesRequest(done=message))
        else:
            message.needs_relay = True
        if self._responses is not None:
            self._responses.put_nowait(pb.StepsResponse(done=message))

    def _report_failure(self, outcome: object) -> None:
        if isinstance(outcome, LaminaError):
            self.fail(outcome)
        elif isinstance(outcome, Exception):
            _log.error("%s: unexpected failure", self._who, exc_info=outcome)
            self.fail(LaminaError(f"{self._who}: {type(outcome).__name__}: {outcome}"))

    def _new_queue(self) -> StepQueue:
        return StepQueue(
            self.key.epoch,
            takes_tokens=self.key.is_first,
            hidden=self.spec.hidden,
            wire_dtype=self.settings.wire_dtype,
            max_rows=self.settings.max_rows,
        )
