"""The main promise over real sockets: the same text at every split, with 1, 2, 3 and 4 worker processes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from goldens.golden_reader import load_logit_goldens

from lamina.coordinator.engine.sequence import SequenceRequest
from lamina.coordinator.model_file import ModelFile, open_model_file
from lamina.coordinator.planner.split_file import parse_split
from lamina.coordinator.session import Session, SessionSettings, SplitChoice, open_session
from lamina.spec.address import parse_address
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from support.cluster import WorkerProcess, running_workers
from support.models import smollm2_path

pytestmark = pytest.mark.e2e

PROMPT_LENGTHS = (1, 15, 16, 17, 600)
NUM_TOKENS = 32
SETTINGS = StageSettings(max_rows=128, max_seqs=8, max_logit_rows=8, max_context=704)
SPLITS = ["0-6,7-29", "0-14,15-29", "0-22,23-29", "0-9,10-19,20-29", "0-4,5-20,21-29", "0-6,7-14,15-22,23-29"]

Texts = list[list[int]]


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerProcess]]:
    with running_workers(4) as started:
        yield started


@pytest.fixture(scope="module")
def model() -> ModelFile:
    return open_model_file(smollm2_path())


@pytest.fixture(scope="module")
def prompts() -> Texts:
    goldens = load_logit_goldens(Path(__file__).parents[1] / "goldens" / "smollm2_logits.json")
    text = max((golden.forced_ids for golden in goldens.values()), key=len)
    repeated = (*text, *text)
    return [list(repeated[start : start + length]) for start, length in enumerate(PROMPT_LENGTHS)]


async def continuation(session: Session, prompt: list[int], sampling: SamplingParams) -> list[int]:
    request = SequenceRequest(tuple(prompt), sampling, frozenset(), NUM_TOKENS)
    return [event.token async for event in session.engine.submit(request)]


def generate(
    workers: list[WorkerProcess], model: ModelFile, prompts: Texts, split: str, sampling: SamplingParams
) -> Texts:
    """All prompts at once over this split."""
    ranges = parse_split(split)
    used = tuple(parse_address(worker.address) for worker in workers[: len(ranges)])
    settings = SessionSettings(used, SplitChoice(ranges), SETTINGS, num_tokens=8 * 704)

    async def run() -> Texts:
        async with open_session(model, settings, lambda _: None, lambda _: None) as session:
            return list(await asyncio.gather(*(continuation(session, prompt, sampling) for prompt in prompts)))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def unsplit(workers: list[WorkerProcess], model: ModelFile, prompts: Texts) -> Texts:
    return generate(workers, model, prompts, "0-29", SamplingParams())


@pytest.mark.parametrize("split", SPLITS)
def test_greedy_text_is_the_same_at_every_split(
    workers: list[WorkerProcess], model: ModelFile, prompts: Texts, unsplit: Texts, split: str
) -> None:
    """Token for token, chunked prefill included (600 tokens in steps of 128)."""
    assert generate(workers, model, prompts, split, SamplingParams()) == unsplit


def test_sampled_text_is_the_same_at_every_split(
    workers: list[WorkerProcess], model: ModelFile, prompts: Texts, unsplit: Texts
) -> None:
    """Same seed, same text: random numbers depend on seed, choice and position only."""
    sampling = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=7)
    whole = generate(workers, model, prompts, "0-29", sampling)
    assert whole != unsplit
    assert generate(workers, model, prompts, "0-11,12-29", sampling) == whole
