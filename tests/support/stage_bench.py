"""The stages of a small model with their runners, threads that a test runs by hand, and talks to lead with them.

Which thread does something next is up to an order that a test chooses; how far the devices lag behind is theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from lamina.kernels.backend import Backend
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.device import Device
from lamina.rpc_worker.device_thread import Worker
from lamina.rpc_worker.stage import Stage, StageResult
from lamina.rpc_worker.step_queue import StepQueue
from lamina.rpc_worker.step_runner import Neighbour, Outcome, StepRunner
from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import AddSequence, FromSample, RemoveSequence, SeqSlice, StepDone, StepPlan, Tokens
from support.cuda_emulated import EmulatedDevice

SETTINGS = StageSettings(max_rows=24, max_seqs=4, max_logit_rows=4, max_context=64, kv_dtype="f16")
BLOCKS_PER_SEQ = SETTINGS.max_blocks_per_seq
EPOCH = Epoch(1)
RUN_AHEAD = 2  # steps issued and not answered
GREEDY = SamplingParams()


class Thread:
    """The compute thread, run by hand: jobs first, then a look at what is launched."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []
        self.watched: dict[Worker, bool] = {}

    def post(self, fn: Callable[[], Any], on_done: Callable[[Any], None]) -> None:
        self.jobs.append(lambda: on_done(fn()))

    def wake(self, worker: Worker) -> None:
        self.jobs.append(lambda: self.advance(worker))

    def tell_loop(self, fn: Callable[[], None]) -> None:
        fn()

    def advance(self, worker: Worker) -> None:
        self.watched[worker] = worker.advance() is not None

    def work(self) -> bool:
        """A job, or a look; whether there was anything to do."""
        if self.jobs:
            self.jobs.pop(0)()
            return True
        looked_at = [worker for worker, has_launched in self.watched.items() if has_launched]
        for worker in looked_at:
            self.advance(worker)
        return bool(looked_at)


@dataclass
class Bench:
    """The stages of a model, a thread for each device, a controller that is told of every outcome.

    `order` picks the thread that works next; without one they take turns.
    """

    stages: list[Stage]
    order: Random | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    most_launched: int = 0

    def __post_init__(self) -> None:
        threads: dict[Backend, Any] = {stage._backend: Thread() for stage in self.stages}
        self.threads: list[Thread] = list(threads.values())
        self.queues = [
            StepQueue(EPOCH, SETTINGS, takes_tokens=index == 0, hidden=64, vocab_size=320)
            for index in range(len(self.stages))
        ]
        self.runners = [
            StepRunner(stage, queue, threads[stage._backend], self.hear, self.outcomes.append)
            for stage, queue in zip(self.stages, self.queues, strict=True)
        ]
        for runner, following in zip(self.runners, self.runners[1:] + self.runners[:1], strict=True):
            runner.attach_neighbour(following)

    def hear(self, outcome: Outcome, taker: Neighbour | None) -> None:
        """What the loop would be told."""
        self.outcomes.append(outcome)

    @property
    def queue(self) -> StepQueue:
        """Of stage 0."""
        return self.queues[0]

    @property
    def stage(self) -> Stage:
        """The last one."""
        return self.stages[-1]

    def plan(self, step: int, *slices: SeqSlice) -> None:
        """To every stage, the last one first."""
        for queue, runner in zip(reversed(self.queues), reversed(self.runners), strict=True):
            queue.add_plan(StepPlan(EPOCH, StepId(step), slices))
            runner.wake()

    def edit(self, edit: AddSequence | RemoveSequence) -> None:
        """To those whom it concerns."""
        for queue in self.queues if isinstance(edit, RemoveSequence) else self.queues[-1:]:
            queue.add_edit(edit)

    def work(self) -> bool:
        """Something on one of the threads; whether there was anything to do."""
        if self.order is None:
            self.threads.append(self.threads.pop(0))
        else:
            self.order.shuffle(self.threads)
        return any(thread.work() for thread in self.threads)

    def until_answered(self) -> StepDone:
        """The next answer. Raises what a stage failed with."""
        while True:
            while not self.outcomes:
                assert self.work(), "nothing is left to do"
                self.most_launched = max(self.most_launched, len(self.runners[-1]._launched))
            outcome = self.outcomes.pop(0)
            if not isinstance(outcome, StageResult):
                raise outcome
            if outcome.done is not None:  # else an earlier stage tells of rows that are not finite
                return outcome.done


def load_bench(
    path: Path,
    devices: Sequence[Device],
    cuts: tuple[int, ...] = (),
    *,
    waits: bool = False,
    order: Random | None = None,
) -> Bench:
    """A stage for each range between the cuts, on the devices in turn. Free the stages.

    A device that `waits`, as an emulated one always does, is done when it returns.
    """
    backends: list[Backend] = [CudaBackend(device=device) for device in devices]
    for backend, device in zip(backends, devices, strict=True):
        if waits or type(device) is EmulatedDevice:
            backend.capabilities = replace(backend.capabilities, asynchronous=False)
    file = read_gguf(path)
    spec = model_spec(file, model_digest(file))
    ranges = [LayerRange(*pair) for pair in pairwise([0, *cuts, spec.num_layers])]
    stages = [Stage(backends[i % len(backends)], spec, layers, SETTINGS) for i, layers in enumerate(ranges)]
    for stage in stages:
        stage.load(file.tensors, lambda _: None)
        stage.allocate_cache((8 * BLOCKS_PER_SEQ,))
    return Bench(stages, order)


def new_bench_epoch(bench: Bench) -> Bench:
    """The same stages under new queues and runners."""
    for runner in bench.runners:
        runner.end()
    while bench.work():
        pass
    return Bench(bench.stages, bench.order)


@dataclass
class Talk:
    """A sequence as the coordinator sees it."""

    seq: int
    prompt: tuple[int, ...]
    begins: int = 0  # step
    ends: int = 1000  # step at which it is cancelled or preempted
    sampling: SamplingParams = GREEDY
    stop_ids: frozenset[int] = frozenset()
    max_tokens: int = 12
    pos: int = 0
    source: FromSample | None = None
    is_over: bool = False

    def add(self) -> AddSequence:
        return AddSequence(SeqId(self.seq), self.sampling, self.prompt, self.stop_ids, self.max_tokens)

    def next_slice(self, step: int, row: int) -> SeqSlice:
        """A chunk of the prompt, or what was sampled last."""
        blocks = ()
        if self.pos == 0:
            first = self.seq * BLOCKS_PER_SEQ
            blocks = tuple(BlockId(first + i) for i in range(BLOCKS_PER_SEQ))
        pos, chunk = self.pos, self.prompt[self.pos : self.pos + 9]
        source = Tokens(chunk) if chunk else self.source
        assert source is not None
        self.pos += len(chunk) or 1
        wants = self.pos >= len(self.prompt)
        if wants:
            self.source = FromSample(StepId(step), row)
        return SeqSlice(SeqId(self.seq), pos, self.pos - pos, source, (blocks,), wants)


def converse(bench: Bench, talks: list[Talk], num_steps: int, num_groups: int = 1) -> list[StepDone]:
    """Issue a step of all sequences that are there, rows in another order each time, RUN_AHEAD before its answer.

    With several groups the sequences take turns, as micro-batches do.
    """
    answers: list[StepDone] = []
    run_ahead = RUN_AHEAD * num_groups
    for step in range(num_steps):
        while step - len(answers) >= run_ahead:
            answer = bench.until_answered()
            answers.append(answer)
            for sampled in answer.tokens:
                if sampled.finish is not None:
                    next(talk for talk in talks if talk.seq == sampled.seq).is_over = True
        for talk in talks:
            if talk.begins == step:
                bench.edit(talk.add())
            if talk.ends + run_ahead == step:  # every step that names it is answered
                bench.edit(RemoveSequence(SeqId(talk.seq)))
        there = [talk for talk in talks if talk.begins <= step < talk.ends and not talk.is_over]
        there = [talk for talk in there if talk.seq % num_groups == step % num_groups] or there[:1]
        order = there[step % len(there) :] + there[: step % len(there)]
        bench.plan(step, *(talk.next_slice(step, row) for row, talk in enumerate(order)))
    while len(answers) < num_steps:
        answers.append(bench.until_answered())
    return answers


def scenes(kind: str) -> list[Talk]:
    """Prompts in chunks beside decodes; one ends by a stop id, one by length, one is cancelled, one preempted.

    Two are "drawn" on the device beside greedy ones; "mixed" has one beside them that needs its logits on the host.
    """
    talks = [
        Talk(0, tuple(range(40, 60)), max_tokens=9),
        Talk(1, (1, 2, 3), stop_ids=frozenset({82})),
        Talk(2, (4, 5, 6, 7, 8), begins=2, ends=7),
        Talk(3, (9, 10), begins=9, max_tokens=40),
    ]
    if kind != "greedy":
        talks[0].sampling = SamplingParams(temperature=0.9, top_p=0.9, seed=5)
        talks[3].sampling = SamplingParams(temperature=1.2, top_k=40, seed=6)
    if kind == "mixed":
        talks[2].sampling = SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.2)
    return talks


def tokens_of(answers: list[StepDone], seq: int) -> list[int]:
    return [token.token for answer in answers for token in answer.tokens if token.seq == seq]
