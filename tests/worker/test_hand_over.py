"""Stages on several cards of one process: what one leaves for another passes from card to card, and both run ahead.

The cards are emulated; deferred, each runs what it is given when somebody waits or looks, or another card waits for it.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.cuda.backend import open_device
from lamina.kernels.cuda.device import Device, Span
from lamina.kernels.registry import present_devices
from lamina.rpc_worker.stage import StageResult
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.spec.errors import CapacityExceeded, LaminaError, StaleEpoch
from lamina.spec.step import FinishReason, StepDone
from support.cuda_emulated import EmulatedDevice
from support.deferred import DeferredDevice
from support.stage_bench import Bench, Talk, converse, load_bench, new_bench_epoch, scenes, tokens_of
from support.tiny import write_tiny_llama

KINDS = pytest.mark.parametrize("kind", ["greedy", "drawn", "mixed"])
GROUPS = pytest.mark.parametrize("groups", [1, 2])
NUM_STEPS = {1: 14, 2: 22, 3: 20}  # by groups: long enough for the events of `scenes`, in threes but for one
NewBench = Callable[..., Bench]
Answers = Callable[[str, int], list[StepDone]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hand_over") / "tiny.gguf"
    return write_tiny_llama(path, matrix_type=GGMLQuantizationType.Q8_0, hidden=64, ff=64, layers=3)


@pytest.fixture
def new_bench(path: Path) -> Iterator[NewBench]:
    stages = []

    def make(*devices: Device, cuts: tuple[int, ...] = (1,), waits: bool = False, seed: int | None = None) -> Bench:
        bench = load_bench(path, devices, cuts, waits=waits, order=None if seed is None else Random(seed))
        stages.extend(bench.stages)
        return bench

    yield make
    for stage in stages:
        stage.free()


@pytest.fixture(scope="module")
def in_one_piece(path: Path) -> Iterator[Callable[[list[Talk], int, int], list[StepDone]]]:
    """What one stage on one card answers, which waits for every step."""
    bench = load_bench(path, [EmulatedDevice()], ())

    def answer(talks: list[Talk], num_steps: int, groups: int = 1) -> list[StepDone]:
        return converse(new_bench_epoch(bench), talks, num_steps, groups)

    yield answer
    bench.stage.free()


@pytest.fixture(scope="module")
def expected(in_one_piece: Callable[[list[Talk], int, int], list[StepDone]]) -> Answers:
    """The same for `scenes` by kind and groups, computed once."""
    return cache(lambda kind, groups: in_one_piece(scenes(kind), NUM_STEPS[groups], groups))


@pytest.fixture(scope="module")
def expected_of_a_talk(in_one_piece: Callable[[list[Talk], int, int], list[StepDone]]) -> list[StepDone]:
    return in_one_piece([Talk(1, (1, 2, 3))], 10, 1)


def host_buffers(bench: Bench) -> list[set[str]]:
    """What each stage has sent or received through the host."""
    slots = [stage._model._slot for stage in bench.stages]  # type: ignore[union-attr]
    return [{*slot._given, *slot._left} for slot in slots]


@pytest.mark.parametrize(
    ("kind", "groups", "looks", "seed"),
    [
        ("greedy", 1, (3, 50), 2),
        ("greedy", 2, (50, 2), 3),
        ("mixed", 1, (50, 2), 3),
        ("mixed", 2, (3, 50), 2),
    ],
)
def test_two_cards_answer_like_one(
    new_bench: NewBench, expected: Answers, kind: str, groups: int, looks: tuple[int, int], seed: int
) -> None:
    """Whichever is the slower, whichever thread comes first. Nothing passes through the host that need not."""
    split = new_bench(*map(DeferredDevice, looks), seed=seed)
    assert converse(split, scenes(kind), NUM_STEPS[groups], groups) == expected(kind, groups)
    assert len(split.threads) == 2
    assert host_buffers(split) == [set(), {"best"}]
    assert not split.queue._fed_on_device


@pytest.mark.parametrize(
    ("kind", "groups", "num_devices", "seed"),
    [("mixed", 1, 2, 0), ("greedy", 3, 2, 1), ("greedy", 1, 3, 2), ("drawn", 3, 3, 3)],
)
def test_three_stages(
    new_bench: NewBench, expected: Answers, kind: str, groups: int, num_devices: int, seed: int
) -> None:
    """On three cards, or on two in turn, where first and last stage share one and the loans between them have no need
    of events."""
    devices = [DeferredDevice(Random(seed + i).choice((1, 4, 30))) for i in range(num_devices)]
    split = new_bench(*devices, cuts=(1, 2), seed=seed)
    assert converse(split, scenes(kind), NUM_STEPS[groups], groups) == expected(kind, groups)
    assert host_buffers(split) == [set(), set(), {"best"}]


@GROUPS
def test_no_host_waits_and_every_token_stays_on_the_cards(new_bench: NewBench, groups: int) -> None:
    """Decode: stage 0 has launched its next step before the last stage's card has begun the one before."""
    devices = DeferredDevice(looks=6), DeferredDevice(looks=6)
    bench = new_bench(*devices)
    talks = [Talk(seq, (1, 2, 3 + seq), max_tokens=60) for seq in range(groups)]
    converse(bench, talks, 6, groups)  # recordings are made
    again = new_bench_epoch(bench)
    before = [device.num_waits for device in devices]
    num_fed = 0
    pop_ready = again.queue.pop_ready

    def counting() -> ReadyStep | None:
        nonlocal num_fed
        ready = pop_ready()
        num_fed += ready is not None and ready.lent is not None
        return ready

    again.queue.pop_ready = counting  # type: ignore[method-assign]
    talks = [Talk(4 + seq, (1, 2, 3 + seq), max_tokens=60) for seq in range(groups)]
    converse(again, talks, 24, groups)
    assert [device.num_waits for device in devices] == before
    assert again.most_launched == 2
    assert num_fed == 24 - groups, "all but the prompts"


def test_a_card_that_waits_hands_over_through_the_host(new_bench: NewBench, expected: Answers) -> None:
    """As a CPU beside a GPU does: one of the two has nothing that the other could follow."""
    for kind, *pair in (
        ("mixed", EmulatedDevice(), DeferredDevice(3)),
        ("greedy", DeferredDevice(3), EmulatedDevice()),
    ):
        split = new_bench(*pair, seed=1)
        assert converse(split, scenes(kind), NUM_STEPS[1]) == expected(kind, 1)
        is_deferred = [isinstance(device, DeferredDevice) for device in pair]
        assert [bool(names) for names in host_buffers(split)] == is_deferred


def test_an_epoch_ends_with_hand_overs_under_way(new_bench: NewBench, expected_of_a_talk: list[StepDone]) -> None:
    """In whatever order the stages hear of it: nobody fails with anything but the end, nobody reads what is freed, and
    the next epoch starts as if nothing had been."""
    devices = DeferredDevice(looks=1000), DeferredDevice(looks=1000)
    bench = new_bench(*devices, seed=0)
    rng = Random(0)
    for epoch in range(18):
        talk = Talk(0, (7, 7, 7))
        bench.edit(talk.add())
        for step in range(4):
            bench.plan(step, talk.next_slice(step, 0))
        for _ in range(rng.randrange(12)):
            bench.work()
        for runner in rng.sample(bench.runners, 2):
            runner.end()
            for _ in range(rng.randrange(4)):
                bench.work()
        while bench.work():
            pass
        assert all(isinstance(outcome, StaleEpoch | StageResult) for outcome in bench.outcomes), epoch
        assert not any(runner._launched or runner._lent for runner in bench.runners)
        bench = Bench(bench.stages, bench.order)
    for device in devices:
        device.looks = 2
    assert converse(bench, [Talk(1, (1, 2, 3))], 10) == expected_of_a_talk


def test_what_was_lent_is_not_freed_before_it_is_copied(new_bench: NewBench) -> None:
    """A stage that goes waits, with its own stream, for the copies that another card has still to make."""
    first, second = DeferredDevice(looks=1000), DeferredDevice(looks=1000)
    bench = new_bench(first, second)
    talk = Talk(0, (1, 2, 3))
    bench.edit(talk.add())
    bench.plan(0, talk.next_slice(0, 0))
    while not bench.runners[1]._launched:
        assert bench.work()
    waiting = len(second._waiting)
    bench.runners[0].end()
    thread: Any = bench.runners[0]._device
    while thread.jobs:
        thread.work()
    assert 0 < len(second._waiting) < waiting, "the copy was made, what comes after it was not waited for"
    bench.runners[1].end()
    while bench.work():
        pass


@pytest.mark.parametrize("side", [0, 1])
def test_a_failure_on_one_side(
    new_bench: NewBench, expected_of_a_talk: list[StepDone], monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    """It is told once, by the stage that failed; the other neither fails nor goes on for ever, and both can be used
    again."""
    devices = DeferredDevice(looks=2), DeferredDevice(looks=2)
    bench = new_bench(*devices, seed=side)

    class Broken(LaminaError):
        pass

    def fail(owner: Device, source: Span, target: Span) -> None:
        raise Broken

    converse(bench, [Talk(0, (1, 2, 3))], 3)
    bench = new_bench_epoch(bench)
    with monkeypatch.context() as broken:
        broken.setattr(devices[side], "copy_from", fail)
        with pytest.raises(Broken):
            converse(bench, [Talk(0, (1, 2, 3))], 6)
        while bench.work():
            pass
        assert not any(isinstance(outcome, Exception) for outcome in bench.outcomes)
    assert converse(new_bench_epoch(bench), [Talk(1, (1, 2, 3))], 10) == expected_of_a_talk


@pytest.mark.parametrize("side", [0, 1])
def test_a_card_without_memory_for_a_step(new_bench: NewBench, monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    """C-04: the step's own sequences end, the loan is given back all the same, and others go on."""
    devices = DeferredDevice(looks=2), DeferredDevice(looks=2)
    bench = new_bench(*devices, seed=5)
    stage = bench.stages[side]
    launch, calls = stage._precision.launch, []

    def full_once(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise CapacityExceeded("no memory is left for a launch")
        launch(*args)

    monkeypatch.setattr(stage._precision, "launch", full_once)
    answers = converse(bench, [Talk(0, (1, 2, 3)), Talk(1, (4, 5), begins=3)], 16)
    errors = [token for answer in answers for token in answer.tokens if token.finish is FinishReason.ERROR]
    assert [error.seq for error in errors] == [0]
    assert len(tokens_of(answers, 1)) >= 8


@pytest.mark.gpu
@KINDS
@GROUPS
@pytest.mark.parametrize("cuts", [(1,), (1, 2)], ids=["two stages", "three stages"])
def test_two_cards(new_bench: NewBench, kind: str, groups: int, cuts: tuple[int, ...]) -> None:
    """Real ones: bit for bit what one card answers when it waits for every step."""
    if len(present_devices()) < 3:
        pytest.skip("needs two GPUs")
    waiting = new_bench(open_device(0), cuts=(), waits=True)
    split = new_bench(open_device(0), open_device(1), cuts=cuts)
    assert split.stages[1].reaches(split.stages[0])
    assert converse(split, scenes(kind), 30, groups) == converse(waiting, scenes(kind), 30, groups)
    assert host_buffers(split)[:-1] == [set()] * len(cuts)
