"""A loaded placement, ready for steps: one Steps stream per stage, commands out, answers in.

Owned by the coordinator's loop. It routes; it decides nothing.
"""

import asyncio
from collections.abc import Mapping, Sequence

import grpc

from lamina.coordinator.cluster.client import StepsCall, WorkerClient
from lamina.coordinator.mailbox import Mailbox
from lamina.spec.errors import LaminaError, WorkerLost
from lamina.spec.grammars import KEPT_CHARACTERS, GrammarCache
from lamina.spec.ids import WorkerName
from lamina.spec.placement import Placement, StageSettings
from lamina.spec.step import AddSequence, RemoveSequence, SampleToken, StepDone, StepPlan
from lamina.v1 import step_pb2 as pb
from lamina.wire.convert import done_from_message, encode_command
from lamina.wire.status import error_from_name, error_from_rpc

_BATCH_BYTES = 2**20  # commands are joined until a message has so many; each is far smaller than what gRPC may carry


async def _next_request(outbox: Mailbox[bytes]) -> bytes:
    """The request that carries what waits in an outbox, in order; waits for something."""
    taken, commands = [await outbox.get()], outbox.items
    num_bytes = len(taken[0])
    while commands and num_bytes + len(commands[0]) <= _BATCH_BYTES:
        taken.append(commands.popleft())
        num_bytes += len(taken[-1])
    return b"".join(taken)


class Pipeline:
    """Commands are queued without blocking and written in order, those that wait for a stage as one message.

    `next_done` yields answers in step order.
    """

    def __init__(
        self,
        placement: Placement,
        settings: StageSettings,
        num_blocks: tuple[int, ...],
        workers: Mapping[WorkerName, WorkerClient],
        calls: list[StepsCall],
        link_rtts_s: Sequence[float] = (),
    ) -> None:
        self.placement = placement
        self.settings = settings
        self.num_blocks = num_blocks
        self.link_rtts_s = tuple(link_rtts_s)  # of the edges in stage order, when they were opened
        self._workers = [workers[stage.device.worker] for stage in placement.stages]
        self._calls = calls
        self._outboxes: list[Mailbox[bytes]] = [Mailbox() for _ in calls]  # encoded commands
        self._answers: Mailbox[StepDone | LaminaError] = Mailbox()
        self._grammars: GrammarCache[None] = GrammarCache(KEPT_CHARACTERS // 2)  # in the order of the stage's uses
        self._last_answered = -1
        self._failure: LaminaError | None = None
        self._tasks = [asyncio.create_task(self._write(i)) for i in range(len(calls))]
        self._tasks += [asyncio.create_task(self._read(i)) for i in range(len(calls))]

    @property
    def num_stages(self) -> int:
        """Stages of the placement."""
        return len(self._calls)

    def issue(self, plan: StepPlan) -> None:
        """Send a plan to every stage."""
        self._send_all(encode_command(plan))

    def add_sequence(self, add: AddSequence) -> None:
        """Make a sequence known to the last stage, before its first step."""
        if add.grammar:
            self._grammars.put(add.grammar, None)
        self._outboxes[-1].put(encode_command(add))

    def remove_sequence(self, remove: RemoveSequence) -> None:
        """Have every stage forget a sequence; all steps that name it are done."""
        self._send_all(encode_command(remove))

    async def prepare_grammar(self, grammar: str) -> None:
        """Have the last stage compile a grammar, so that no step waits for it; at once if it has it from before.

        Raises InvalidRequest if it cannot be used, Unavailable if it takes too long, and what a lost worker raises.
        """
        if grammar not in self._grammars:
            await self._workers[-1].prepare_grammar(self.placement, self.placement.stages[-1], grammar)
            self._grammars.put(grammar, None)

    async def next_done(self) -> StepDone:
        """The next answer. Raises what ended the epoch: WorkerLost with the worker's name, or what a stage reported.

        What ended it first is what every later call raises.
        """
        if self._failure is not None:
            raise self._failure
        answer = await self._answers.get()
        if isinstance(answer, LaminaError):
            self._failure = answer
            raise answer
        return answer

    async def close(self, *, unload: bool) -> None:
        """End the streams; with `unload`, free the stages too (a worker that is gone does not hinder the others)."""
        for task in self._tasks:
            task.cancel()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose(WorkerLost(f"placement {self.placement.id} was closed"))
        if unload:
            ends = [worker.unload(self.placement) for worker in {id(w): w for w in self._workers}.values()]
            await asyncio.gather(*ends, return_exceptions=True)

    def _take(self, done: StepDone) -> None:
        """An answer. Where the edge to stage 0 broke, the last stage sends again what may have been lost on it."""
        if done.needs_relay:
            self._relay(done)
        if done.step > self._last_answered:
            self._last_answered = done.step
            self._answers.put(done)

    def _relay(self, done: StepDone) -> None:
        """The edge from the last stage to stage 0 is down: tokens go through here."""
        for sampled in done.tokens:
            token = SampleToken(done.epoch, sampled.seq, sampled.pos, sampled.token)
            self._outboxes[0].put(encode_command(token))

    def _send_all(self, command: bytes) -> None:
        for outbox in self._outboxes:
            outbox.put(command)

    async def _write(self, index: int) -> None:
        call, outbox = self._calls[index], self._outboxes[index]
        try:
            while True:
                await call.write(await _next_request(outbox))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader sees the same end, with its reason
        except Exception as error:
            self._lose_by_fault(index, error)

    async def _read(self, index: int) -> None:
        call = self._calls[index]
        try:
            while isinstance(response := await call.read(), pb.StepsResponse):
                if response.HasField("done"):
                    self._take(done_from_message(response.done))
                elif response.HasField("failure"):
                    self._lose(error_from_name(response.failure.error, response.failure.message))
            self._lose(WorkerLost(f"{self._describe(index)}: ended the step stream"))
        except grpc.aio.AioRpcError as error:
            self._lose(error_from_rpc(error, self._describe(index)))
        except LaminaError as error:
            self._lose(type(error)(f"{self._describe(index)}: {error}"))
        except Exception as error:
            self._lose_by_fault(index, error)

    def _lose_by_fault(self, index: int, error: Exception) -> None:
        """Nobody awaits the streams' tasks: one that ended in silence would leave everybody waiting for ever."""
        self._lose(WorkerLost(f"{self._describe(index)}: the step stream failed: {type(error).__name__}: {error}"))

    def _lose(self, error: LaminaError) -> None:
        self._answers.put(error)

    def _describe(self, index: int) -> str:
        return f"{self._workers[index].who} (layers {self.placement.stages[index].layers})"
