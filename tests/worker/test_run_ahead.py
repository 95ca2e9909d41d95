"""Steps launched before the host knows the tokens of the step before: the same answers as from a device that waits.

The device is the emulated GPU; deferred, it runs what it is given only when somebody waits or looks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.cuda.backend import CudaBackend, open_device
from lamina.kernels.cuda.device import Device
from lamina.rpc_worker.device_thread import Worker
from lamina.rpc_worker.stage import Stage, StageResult
from lamina.rpc_worker.step_queue import StepQueue
from lamina.rpc_worker.step_runner import Outcome, StepRunner
from lamina.spec.digest import model_digest
from lamina.spec.errors import InvalidPlan
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import (
    AddSequence,
    FinishReason,
    FromSample,
    RemoveSequence,
    SeqSlice,
    StepDone,
    StepPlan,
    Tokens,
)
from support.cuda_emulated import EmulatedDevice
from support.deferred import DeferredDevice

SETTINGS = StageSettings(max_rows=24, max_seqs=4, max_logit_rows=4, max_context=64, kv_dtype="f16")
BLOCKS_PER_SEQ = SETTINGS.max_blocks_per_seq
EPOCH = Epoch(1)
RUN_AHEAD = 2  # steps issued and not answered
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny import write_tiny_llama

    path = tmp_path_factory.mktemp("run_ahead") / "tiny.gguf"
    return write_tiny_llama(path, matrix_type=GGMLQuantizationType.Q8_0, hidden=64, ff=64, layers=2)


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
    """The stages of a model on one device and one thread, a controller that is told of every outcome."""

    stages: list[Stage]
    thread: Thread = field(default_factory=Thread)
    outcomes: list[Outcome] = field(default_factory=list)
    most_launched: int = 0

    def __post_init__(self) -> None:
        device: Any = self.thread
        self.queues = [
            StepQueue(EPOCH, SETTINGS, takes_tokens=index == 0, hidden=64, vocab_size=320)
            for index in range(len(self.stages))
        ]
        self.runners = [
            StepRunner(stage, queue, device, self.outcomes.append, self.outcomes.append)
            for stage, queue in zip(self.stages, self.queues, strict=True)
        ]
        for runner, following in zip(self.runners, self.runners[1:] + self.runners[:1], strict=True):
            runner.attach_neighbour(following)

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

    def until_answered(self) -> StepDone:
        """The next answer. Raises what a stage failed with."""
        while not self.outcomes:
            assert self.thread.work(), "nothing is left to do"
            self.most_launched = max(self.most_launched, len(self.runners[-1]._launched))
        outcome = self.outcomes.pop(0)
        if not isinstance(outcome, StageResult):
            raise outcome
        assert outcome.done is not None
        return outcome.done


CUTS = pytest.mark.parametrize("cuts", [(), (1,)], ids=["one stage", "two stages"])
NewBench = Callable[..., Bench]


@pytest.fixture
def new_bench(path: Path) -> Iterator[NewBench]:
    stages = []

    def make(device: Device, cuts: tuple[int, ...] = (), *, waits: bool = False) -> Bench:
        backend = CudaBackend(device=device)
        if waits or type(device) is EmulatedDevice:
            backend.capabilities = replace(backend.capabilities, asynchronous=False)
        file = read_gguf(path)
        spec = model_spec(file, model_digest(file))
        bounds = [0, *cuts, spec.num_layers]
        bench = Bench([Stage(backend, spec, LayerRange(*pair), SETTINGS) for pair in pairwise(bounds)])
        stages.extend(bench.stages)
        for stage in bench.stages:
            stage.load(file.tensors, lambda _: None)
            stage.allocate_cache((8 * BLOCKS_PER_SEQ,))
        return bench

    yield make
    for stage in stages:
        stage.free()


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


def converse(bench: Bench, talks: list[Talk], num_steps: int) -> list[StepDone]:
    """Issue a step of all sequences that are there, rows in another order each time, RUN_AHEAD before its answer."""
    answers: list[StepDone] = []
    for step in range(num_steps):
        while step - len(answers) >= RUN_AHEAD:
            answer = bench.until_answered()
            answers.append(answer)
            for sampled in answer.tokens:
                if sampled.finish is not None:
                    next(talk for talk in talks if talk.seq == sampled.seq).is_over = True
        for talk in talks:
            if talk.begins == step:
                bench.edit(talk.add())
            if talk.ends + RUN_AHEAD == step:  # every step that names it is answered
                bench.edit(RemoveSequence(SeqId(talk.seq)))
        there = [talk for talk in talks if talk.begins <= step < talk.ends and not talk.is_over]
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


@pytest.mark.parametrize("kind", ["greedy", "drawn", "mixed"])
@pytest.mark.parametrize("looks", [1, 3, 50])
def test_running_ahead_changes_no_answer(new_bench: NewBench, looks: int, kind: str) -> None:
    """Whatever the device's pace; sequences that ended, were cancelled or came in between included."""
    waiting, deferred = new_bench(EmulatedDevice()), new_bench(DeferredDevice(looks))
    expected = converse(waiting, scenes(kind), 24)
    assert converse(deferred, scenes(kind), 24) == expected
    assert (waiting.most_launched, deferred.most_launched) == (0, 2), "at the end of a job"
    finishes = [token.finish for answer in expected for token in answer.tokens if token.finish]
    assert finishes == [FinishReason.STOP, FinishReason.LENGTH]
    assert deferred.queue._tokens == waiting.queue._tokens, "of the last rows, which no step feeds on"
    assert not deferred.queue._fed_on_device


@pytest.mark.gpu
@CUTS
@pytest.mark.parametrize("kind", ["greedy", "drawn", "mixed"])
def test_running_ahead_on_a_card(new_bench: NewBench, cuts: tuple[int, ...], kind: str) -> None:
    waiting, ahead = new_bench(open_device(0), waits=True), new_bench(open_device(0), cuts)
    assert ahead.stage.max_launched == 2, "though steps this small are done before the next is planned"
    assert converse(ahead, scenes(kind), 24) == converse(waiting, scenes(kind), 24)


@pytest.mark.parametrize("kind", ["greedy", "drawn", "mixed"])
@pytest.mark.parametrize("looks", [1, 3, 50])
def test_stages_of_one_device_hand_over_on_it(new_bench: NewBench, looks: int, kind: str) -> None:
    """Neither the hidden state nor, where it can be helped, the token comes to the host between them."""
    whole, device = new_bench(EmulatedDevice()), DeferredDevice(looks)
    split = new_bench(device, (1,))
    expected = converse(whole, scenes(kind), 24)
    assert converse(split, scenes(kind), 24) == expected
    assert split.most_launched == 2
    slot = split.stages[0]._model._slot  # type: ignore[union-attr]
    assert not {**slot._given, **slot._left}, "the first stage has neither sent nor received a hidden state"
    assert split.queues[0]._tokens == whole.queue._tokens


@pytest.mark.parametrize("kind", ["drawn", "mixed"])
def test_the_device_draws_what_the_host_would(new_bench: NewBench, kind: str) -> None:
    """B-31: the same tokens where every row is drawn from logits on the host."""
    device, host = new_bench(EmulatedDevice()), new_bench(EmulatedDevice())
    sampler = host.stage._sampler
    sample = sampler.sample
    sampler._draw = None
    sampler.device_params = lambda rows: None  # type: ignore[method-assign]
    sampler.needs_logits = lambda rows: True  # type: ignore[method-assign]
    sampler.sample = lambda rows, logits, chosen=None: sample(rows, logits)  # type: ignore[method-assign]
    expected = converse(host, scenes(kind), 24)
    assert converse(device, scenes(kind), 24) == expected
    assert len(set(tokens_of(expected, 0))) > 4, "a draw, not a rut"


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, top_p=0.95)], ids=["greedy", "drawn"])
@CUTS
def test_such_steps_never_wait_for_the_device(
    new_bench: NewBench, sampling: SamplingParams, cuts: tuple[int, ...]
) -> None:
    """Nor does anything on the way to a launch: while a step runs the next is already there."""
    device = DeferredDevice(looks=4)
    bench = new_bench(device, cuts)
    converse(bench, [Talk(0, (1, 2, 3), max_tokens=60, sampling=sampling)], 3)  # recordings are made
    before = device.num_waits
    again = new_bench_epoch(bench)
    converse(again, [Talk(1, (1, 2, 3), max_tokens=60, sampling=sampling)], 30)
    assert device.num_waits - before == len(bench.stages), "the end of the epoch before, nothing else"


def new_bench_epoch(bench: Bench) -> Bench:
    """The same stages under new queues and runners."""
    for runner in bench.runners:
        runner.end()
    while bench.thread.work():
        pass
    return Bench(bench.stages)


@CUTS
def test_an_epoch_may_end_with_steps_in_flight(new_bench: NewBench, cuts: tuple[int, ...]) -> None:
    """They are dropped, and the next epoch starts as if nothing had been."""
    bench = new_bench(DeferredDevice(looks=1000), cuts)
    expected = converse(new_bench(EmulatedDevice()), [Talk(1, (1, 2, 3))], 10)
    talk = Talk(0, (7, 7, 7))
    bench.edit(talk.add())
    for step in range(2):
        bench.plan(step, talk.next_slice(step, 0))
    while len(bench.runners[-1]._launched) < 2:
        assert bench.thread.work()
    again = new_bench_epoch(bench)
    assert bench.outcomes == []
    assert converse(again, [Talk(1, (1, 2, 3))], 10) == expected


@CUTS
def test_a_launch_that_fails_is_told_after_the_answers_before_it(new_bench: NewBench, cuts: tuple[int, ...]) -> None:
    bench = new_bench(DeferredDevice(looks=7), cuts)
    talk = Talk(0, (1, 2, 3))
    bench.edit(talk.add())
    bench.plan(0, talk.next_slice(0, 0))
    bench.plan(1, replace_pos(talk.next_slice(1, 0), 9))
    bench.plan(2, talk.next_slice(2, 0))
    if not cuts:
        assert bench.until_answered().step == 0
    with pytest.raises(InvalidPlan, match="its next position is 3"):
        bench.until_answered()
    while bench.thread.work():
        pass
    assert bench.queue.next_step == 2, "no further step is begun"


def replace_pos(piece: SeqSlice, pos: int) -> SeqSlice:
    return piece._replace(pos=pos, input=Tokens((1,)))


def test_a_finish_that_fails_drops_what_was_launched_after_it(new_bench: NewBench) -> None:
    bench = new_bench(DeferredDevice(looks=7))

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    bench.stage._sampler.sample = fail  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        converse(bench, [Talk(0, (1, 2, 3))], 4)
    assert not bench.runners[0]._launched


def test_a_sequence_that_is_not_finite_ends_alone_though_its_token_is_fed(new_bench: NewBench) -> None:
    """A-05, B-35: its -1 goes into the next step before the host has seen it, and spoils nobody else's row."""
    results = []
    for device in (EmulatedDevice(), DeferredDevice(looks=5)):
        bench = new_bench(device)
        bench.queue._vocab_size = bench.stage._sampler._vocab_size = 1000  # or they would refuse token 900
        talks = [Talk(0, (1, 2, 3)), Talk(1, (4, 900))]
        results.append(converse(bench, talks, 12))
    for answers in results:
        (error,) = [token for answer in answers for token in answer.tokens if token.finish is FinishReason.ERROR]
        assert (error.seq, error.pos) == (1, 2)
    assert [tokens_of(answers, 0) for answers in results] == [tokens_of(results[0], 0)] * 2
    assert len(tokens_of(results[0], 0)) == 12


def tokens_of(answers: list[StepDone], seq: int) -> list[int]:
    return [token.token for answer in answers for token in answer.tokens if token.seq == seq]
