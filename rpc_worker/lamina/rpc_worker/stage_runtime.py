"""A loaded stage as the daemon's event loop sees it: its controller, its edge forward, what comes in for its queue.

Owned by the loop. The `Stage` behind it belongs to the compute thread, where a `StepRunner` takes it through its steps.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.rpc_worker.device_thread import DeviceThread, Feed
from lamina.rpc_worker.grammar import GrammarCompiler
from lamina.rpc_worker.link import Link
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.step_queue import StepQueue
from lamina.rpc_worker.step_runner import Neighbour, Outcome, StepRunner
from lamina.spec.errors import InvalidPlan, InvalidRequest, LaminaError, StaleEpoch, Unavailable, WorkerLost
from lamina.spec.ids import Epoch, PlacementId, SeqId, StepId
from lamina.spec.model import LayerRange, ModelSpec
from lamina.spec.placement import StageSettings
from lamina.spec.step import (
    MAX_RUN_AHEAD,
    AddSequence,
    RemoveSequence,
    SampleToken,
    StepCommand,
    StepDone,
    StepPlan,
)
from lamina.v1 import step_pb2 as pb
from lamina.wire.convert import done_from_message, done_to_message
from lamina.wire.frames import Frame, read_frame
from lamina.wire.status import error_name

_log = logging.getLogger(__name__)
# A coordinator counts a step as issued until it has read the answer, so more than these never wait to be read.
_MAX_UNREAD = 2 * MAX_RUN_AHEAD

Responses = asyncio.Queue[pb.StepsResponse | None]


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
    """Moves plans, frames and tokens between the network and the compute thread, for one epoch of one stage.

    It ends once, with its controller or when it is unloaded; the stage behind it may then serve a successor.
    """

    def __init__(
        self,
        key: StageKey,
        stage: Stage,
        device: DeviceThread,
        spec: ModelSpec,
        layers: LayerRange,
        settings: StageSettings,
        worker_name: str,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`grammars` is the last stage's, which shares it with `stage`."""
        self.key = key
        self.stage = stage
        self.device = device
        self.spec = spec
        self.layers = layers
        self.settings = settings
        self.worker_name = worker_name
        self._grammars = grammars
        self._who = f"{worker_name} (layers {layers})"
        self._queue = StepQueue(
            key.epoch, settings, takes_tokens=key.is_first, hidden=spec.hidden, vocab_size=spec.vocab_size
        )
        self._runner = StepRunner(stage, self._queue, device, self._on_outcome, self.link_lost)
        if key.is_first and key.is_last:
            self._runner.attach_neighbour(self._runner)
        self._responses: Responses | None = None
        self._link: Link | None = None
        self._sent_back: deque[pb.StepDone] = deque(maxlen=MAX_RUN_AHEAD)  # answers given to the feedback edge
        self._failure: LaminaError | None = None
        self.has_ended = False

    @property
    def link(self) -> Link | None:
        """The edge to the next stage; None where that lives in this process, or until it is opened."""
        return self._link

    @property
    def is_controlled(self) -> bool:
        """Whether a coordinator holds the Steps stream."""
        return self._responses is not None

    def successor(self, key: StageKey) -> "StageRuntime":
        """The same weights under another placement or epoch. This runtime must have ended, or never begun."""
        return StageRuntime(
            key, self.stage, self.device, self.spec, self.layers, self.settings, self.worker_name, self._grammars
        )

    def check_key(self, placement: str, epoch: int, stage: int) -> None:
        """Raise StaleEpoch unless these name this stage in its present epoch."""
        key = self.key
        if (placement, stage) != (key.placement, key.index) or epoch != key.epoch or self.has_ended:
            state = "has ended" if self.has_ended and epoch == key.epoch else f"is {key.epoch}"
            raise StaleEpoch(f"{self._who}: epoch {epoch} of {placement}#{stage} is refused, the stage's epoch {state}")

    # -- the coordinator's Steps stream

    def attach_controller(self) -> Responses:
        """Begin the epoch's Steps stream; what is put on the queue goes to the coordinator, None ends the stream.

        Raises Unavailable, and what the stage failed with before anybody could be told.
        """
        if self._failure is not None:
            raise self._failure
        if self._responses is not None:
            raise Unavailable(f"{self._who}: another coordinator controls this stage")
        if not self.stage.facts.cache_bytes:
            raise Unavailable(f"{self._who}: has no cache yet; allocate it first")
        self._responses = asyncio.Queue()
        return self._responses

    async def end(self) -> None:
        """The epoch is over: its sequences and their blocks are forgotten. Only the first call does anything.

        All that others may see is done before the first await, so that a successor finds the device's queue in order.
        """
        if self.has_ended:
            return
        self.has_ended = True
        responses, self._responses = self._responses, None
        if responses is not None:
            responses.put_nowait(None)
        self._runner.end()
        await self.close_link()

    def handle_command(self, command: StepCommand) -> None:
        """Take one command. Raises InvalidPlan or StaleEpoch for a malformed or outdated one."""
        match command:
            case StepPlan():
                self._queue.add_plan(command)
            case AddSequence() if not self.key.is_last:
                raise InvalidPlan("sequences are added to the last stage only")
            case AddSequence() | RemoveSequence():
                self._queue.add_edit(command)
            case SampleToken(epoch, seq, pos, token):
                self._queue.add_token(epoch, seq, pos, token)
        self._runner.wake()

    async def prepare_grammar(self, grammar: str) -> None:
        """Have a grammar compiled beside the steps. Raises InvalidRequest, Unavailable, InvalidCheckpoint."""
        if self._grammars is None:
            raise InvalidRequest(f"{self._who}: only the last stage follows grammars")
        await self._grammars.prepare(grammar)

    # -- the edge from the stage before: from any thread

    def handle_frames_message(self, message: pb.FramesRequest) -> None:
        """Take a frame or, on stage 0, an answer of the last stage. Raises InvalidPlan or StaleEpoch."""
        match message.WhichOneof("body"):
            case "frame":
                self.take_frame(read_frame(message.frame))
            case "done":
                done = done_from_message(message.done)
                self.take_tokens(done.epoch, done.step, [(token.seq, token.pos, token.token) for token in done.tokens])
            case other:
                raise InvalidPlan(f"{self._who}: message {other!r} is out of order on a Frames stream")

    def expect_frame(self, frame: Frame) -> None:
        """Whether a frame may come whose payload has not been read. Raises InvalidPlan or StaleEpoch."""
        self._require_open()
        self._queue.expect_frame(frame)

    def take_frame(self, frame: Frame) -> None:
        """The hidden state of a step. Raises InvalidPlan or StaleEpoch."""
        self._require_open()
        self._queue.add_frame(frame)
        self._runner.wake()

    def take_tokens(self, epoch: Epoch, step: StepId, tokens: Sequence[tuple[SeqId, int, int]]) -> None:
        """On stage 0: what a step has sampled, (sequence, position, token) each. Raises InvalidPlan or StaleEpoch."""
        self._require_open()
        if not self.key.is_first:
            raise InvalidPlan(f"{self._who}: message 'done' is out of order on a Frames stream")
        self._queue.add_tokens(epoch, step, tokens)
        self._runner.wake()

    def lend(self, feed: Feed) -> bool:
        """Have the compute thread read a feed between steps, until it hands it back; False if it never does that."""
        return self.device.lend(feed)

    def _require_open(self) -> None:
        if self.has_ended:
            raise StaleEpoch(f"{self._who}: epoch {self.key.epoch} has ended")

    # -- the edge to the next stage: on the loop

    async def attach_link(self, link: Link) -> None:
        """Use this edge for everything that leaves the stage. Raises StaleEpoch if the epoch ended meanwhile."""
        if self.has_ended:
            await link.close()
            raise StaleEpoch(f"{self._who}: epoch {self.key.epoch} ended while its edge was opened")
        self._runner.attach_neighbour(link)
        await self._replace_link(link)

    async def attach_neighbour(self, following: "StageRuntime") -> None:
        """What leaves the stage goes straight to the next one, which lives in this process."""
        self._runner.attach_neighbour(following._runner)
        await self._replace_link(None)

    def link_lost(self, error: LaminaError) -> None:
        """The edge forward broke. Losing the feedback edge costs speed, any other ends the stage's epoch.

        With a step under way that is how an epoch ends where the next stage hears of it first: no news to anybody.
        """
        self._link = None
        self._runner.attach_neighbour(None)
        is_over = isinstance(error, StaleEpoch)
        if not self.key.is_last:
            level = logging.DEBUG if is_over else logging.ERROR
            self.fail(WorkerLost(f"edge to stage {self.key.next_index} lost: {error}"), level)
            return
        level = logging.DEBUG if is_over else logging.WARNING
        _log.log(level, "%s: feedback edge lost, tokens go through the coordinator: %s", self._who, error)
        for answer in self._sent_back:  # stage 0 may lack any of these, and keeps the first of two
            answer.needs_relay = True
            self._respond(pb.StepsResponse(done=answer))
        self._sent_back.clear()

    async def close_link(self) -> None:
        """Drop the edge forward."""
        self._runner.attach_neighbour(None)
        await self._replace_link(None)

    async def _replace_link(self, link: Link | None) -> None:
        replaced, self._link = self._link, link
        if replaced is not None:
            await replaced.close()

    # -- steps

    def fail(self, error: LaminaError, level: int = logging.ERROR) -> None:
        """Tell the coordinator that this stage runs no further step of this epoch, and end its stream.

        Without a coordinator yet, the next that comes is told.
        """
        if self._failure is not None or self.has_ended:
            return
        self._runner.stop()
        self._failure = failure = type(error)(f"{self._who}: {error}")
        _log.log(level, "%s", failure)
        if self._responses is not None:
            self._responses.put_nowait(pb.StepsResponse(failure=_failure_message(failure)))
            self._responses.put_nowait(None)

    def _on_outcome(self, outcome: Outcome, taker: Neighbour | None) -> None:
        if self.has_ended:
            return  # nobody waits for it
        if isinstance(outcome, LaminaError):
            is_over = isinstance(outcome, StaleEpoch)  # a stage of this process heard of the end first: no news
            self.fail(outcome, logging.DEBUG if is_over else logging.ERROR)
        elif isinstance(outcome, Exception):
            _log.error("%s: unexpected failure", self._who, exc_info=outcome)
            self.fail(LaminaError(f"{type(outcome).__name__}: {outcome}"))
        elif outcome.done is not None:
            self._answer(outcome.done, taker)
        else:
            where = f"stage {self.key.next_index} for step {outcome.ready.plan.step}"
            self.fail(Unavailable(f"no edge to {where}; link the stages first"))

    def _answer(self, done: StepDone, taker: Neighbour | None) -> None:
        """Tell the coordinator, who relays the tokens to stage 0 unless they have taken an edge that stands."""
        message = done_to_message(done)
        if taker is None or taker is not self._runner.neighbour:
            message.needs_relay = True
        elif self._link is not None:
            self._sent_back.append(message)
        self._respond(pb.StepsResponse(done=message))

    def _respond(self, response: pb.StepsResponse) -> None:
        if self._responses is None or self._failure is not None:
            return
        self._responses.put_nowait(response)
        if self._responses.qsize() > _MAX_UNREAD:
            self.fail(InvalidPlan(f"the coordinator leaves {_MAX_UNREAD} answers unread"))


def _failure_message(error: LaminaError) -> pb.StageFailure:
    return pb.StageFailure(error=error_name(error), message=str(error))
