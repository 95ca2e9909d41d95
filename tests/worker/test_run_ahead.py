"""Steps launched before the host knows the tokens of the step before: the same answers as from a device that waits.

The device is the emulated GPU; deferred, it runs what it is given only when somebody waits or looks.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.cuda.backend import open_device
from lamina.kernels.cuda.device import Device
from lamina.spec.errors import InvalidPlan
from lamina.spec.ids import SeqId
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import FinishReason, SeqSlice, StepDone, Tokens
from support.cuda_emulated import EmulatedDevice
from support.deferred import DeferredDevice
from support.stage_bench import GREEDY, Bench, Talk, converse, load_bench, new_bench_epoch, scenes, tokens_of
from support.tiny import write_tiny_llama


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run_ahead") / "tiny.gguf"
    return write_tiny_llama(path, matrix_type=GGMLQuantizationType.Q8_0, hidden=64, ff=64, layers=2)


CUTS = pytest.mark.parametrize("cuts", [(), (1,)], ids=["one stage", "two stages"])
NewBench = Callable[..., Bench]


@pytest.fixture
def new_bench(path: Path) -> Iterator[NewBench]:
    stages = []

    def make(device: Device, cuts: tuple[int, ...] = (), *, waits: bool = False) -> Bench:
        bench = load_bench(path, [device], cuts, waits=waits)
        stages.extend(bench.stages)
        return bench

    yield make
    for stage in stages:
        stage.free()


class Waited(NamedTuple):
    """What one stage made of a scene that waits for every step, and the tokens that its queue had left."""

    answers: list[StepDone]
    left: dict[tuple[SeqId, int], int]


@pytest.fixture(scope="module")
def waited(path: Path) -> Iterator[Callable[[str], Waited]]:
    """By kind of scene, computed once."""
    stages = []

    def run(kind: str) -> Waited:
        bench = load_bench(path, [EmulatedDevice()])
        stages.extend(bench.stages)
        answers = converse(bench, scenes(kind), 24)
        assert bench.most_launched == 0, "at the end of a job"
        return Waited(answers, bench.queue._tokens)

    yield cache(run)
    for stage in stages:
        stage.free()


@pytest.mark.parametrize("kind", ["greedy", "drawn", "mixed"])
@pytest.mark.parametrize("looks", [1, 3, 50])
def test_running_ahead_changes_no_answer(
    new_bench: NewBench, waited: Callable[[str], Waited], looks: int, kind: str
) -> None:
    """Whatever the device's pace; sequences that ended, were cancelled or came in between included."""
    deferred = new_bench(DeferredDevice(looks))
    expected = waited(kind).answers
    assert converse(deferred, scenes(kind), 24) == expected
    assert deferred.most_launched == 2, "at the end of a job"
    finishes = [token.finish for answer in expected for token in answer.tokens if token.finish]
    assert finishes == [FinishReason.STOP, FinishReason.LENGTH]
    assert deferred.queue._tokens == waited(kind).left, "of the last rows, which no step feeds on"
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
def test_stages_of_one_device_hand_over_on_it(
    new_bench: NewBench, waited: Callable[[str], Waited], looks: int, kind: str
) -> None:
    """Neither the hidden state nor, where it can be helped, the token comes to the host between them."""
    split = new_bench(DeferredDevice(looks), (1,))
    assert converse(split, scenes(kind), 24) == waited(kind).answers
    assert split.most_launched == 2
    slot = split.stages[0]._model._slot  # type: ignore[union-attr]
    assert not {**slot._given, **slot._left}, "the first stage has neither sent nor received a hidden state"
    assert split.queues[0]._tokens == waited(kind).left


@pytest.mark.parametrize("kind", ["drawn", "mixed"])
def test_the_device_draws_what_the_host_would(new_bench: NewBench, waited: Callable[[str], Waited], kind: str) -> None:
    """B-31: the same tokens where every row is drawn from logits on the host."""
    host = new_bench(EmulatedDevice())
    sampler = host.stage._sampler
    sample = sampler.sample
    sampler._draw = None
    sampler.device_params = lambda rows: None  # type: ignore[method-assign]
    sampler.needs_logits = lambda rows: True  # type: ignore[method-assign]
    sampler.sample = lambda rows, logits, chosen=None: sample(rows, logits)  # type: ignore[method-assign]
    expected = converse(host, scenes(kind), 24)
    assert waited(kind).answers == expected
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
        assert bench.work()
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
    while bench.work():
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
