"""Values that are not finite on the edge between two stages: whom they end, and whom not."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from lamina.kernels.buffer import StepShape
from lamina.rpc_worker.daemon import Daemon
from lamina.rpc_worker.stage_model import Outcome
from lamina.spec.errors import CapacityExceeded
from lamina.spec.step import FinishReason
from support.loopback import SETTINGS, Cluster, Talk, TinyModel, next_done, run_scene, running_worker

PROMPT = [1, 40, 7, 99, 250, 3, 17]
Says = Callable[[Sequence[int], int], list[int]]


def spoil_next_step(daemon: Daemon, row: int, value: float) -> None:
    """One row of the next hidden state that leaves the worker's stage is this value throughout."""
    (runtime,) = daemon.registry
    model = runtime.stage._model
    assert model is not None
    real = model.collect

    def spoilt(shape: StepShape) -> Outcome:
        del model.collect  # type: ignore[attr-defined]
        outcome = real(shape)
        hidden = outcome.values.copy()
        hidden[row] = value
        return outcome._replace(values=hidden)

    model.collect = spoilt  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("wire_dtype", "value"), [("f32", np.nan), ("f32", np.inf), ("bf16", np.nan), ("f16", np.nan), ("f16", 1e30)]
)
@pytest.mark.parametrize("row", [0, len(PROMPT) - 1], ids=["first row", "last row"])
def test_a_spoilt_row_ends_its_own_sequence(
    model: TinyModel, whole_model_says: Says, wire_dtype: str, value: float, row: int
) -> None:
    """A-05: a row that attention reads, or that is sampled from, is an error of its sequence; the epoch lasts."""
    settings = replace(SETTINGS, wire_dtype=wire_dtype)

    async def scene() -> None:
        async with (
            running_worker("a") as a,
            running_worker("b") as b,
            Cluster.over(model, a, b, settings=settings) as cluster,
        ):
            pipeline = await cluster.deploy((2,), ("a", "b"))
            spoil_next_step(a, row, value)
            bad = Talk(pipeline, PROMPT)
            bad.add()
            bad.issue()
            (answer,) = (await next_done(pipeline)).tokens
            assert answer.finish is FinishReason.ERROR
            assert answer.error == f"NumericalError: the logits for position {len(PROMPT)} are not finite"
            good = Talk(pipeline, PROMPT, seq=1, first_step=1)
            tokens = await good.run(6)
            if wire_dtype == "f32":
                assert tokens == whole_model_says(PROMPT, 6)

    run_scene(scene)


def fill_card_at_step(daemon: Daemon, stage: int, step: int) -> None:
    """Somebody takes what is left of the device's memory just when that step of a stage runs, and gives it back."""
    runtime = next(each for each in daemon.registry if each.key.index == stage)
    real, seen = runtime.stage._precision.launch, 0

    def launch(*args: object) -> None:
        nonlocal seen
        seen += 1
        if seen == step:
            raise CapacityExceeded("no room for a matrix product")
        real(*args)  # type: ignore[arg-type]

    runtime.stage._precision.launch = launch  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("stage", [0, 1], ids=["first stage", "last stage"])
@pytest.mark.parametrize("step", [1, 3], ids=["prompt", "decode"])
def test_a_card_that_others_fill_fails_the_step_not_the_stage(
    model: TinyModel, whole_model_says: Says, stage: int, step: int
) -> None:
    """C-04: the sequences of the step end, with the numbers where the last stage knows them; the epoch goes on."""

    async def scene() -> None:
        async with (
            running_worker("a") as a,
            Cluster.over(model, a) as cluster,
        ):
            pipeline = await cluster.deploy((2,), ("a/0", "a/0"))
            fill_card_at_step(a, stage, step)
            bad = Talk(pipeline, PROMPT)
            bad.add()
            for _ in range(step):
                bad.issue()
            answers = [(await next_done(pipeline)).tokens[0] for _ in range(step)]
            assert [answer.finish for answer in answers[:-1]] == [None] * (step - 1)
            assert answers[-1].finish is FinishReason.ERROR
            if stage == 1:
                assert re.fullmatch(
                    r"CapacityExceeded: no room for a matrix product \([\d.]+ of [\d.]+ MiB are free there now\)",
                    answers[-1].error,
                )
            else:
                assert answers[-1].error.startswith("NumericalError")
            good = Talk(pipeline, PROMPT, seq=1, first_step=step)
            assert await good.run(6) == whole_model_says(PROMPT, 6)

    run_scene(scene)
