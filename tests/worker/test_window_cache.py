"""Layers with a sliding window over a pool that is far too small for the context: the float64 oracle's text and logits.

The caches are NaN where nobody has written, so a stale or foreign block that is read shows.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.memory import sliding_windows, window_blocks
from support.scheduled import ScheduledModel
from support.tiny_forward import TinyModel

PATH = Path(__file__).parents[1] / "data/tiny_gpt_oss.gguf"
CHUNK = 24
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def oracle() -> TinyModel:
    return TinyModel(PATH)


def config(num_window_blocks: int, num_blocks: int = 40, **changes: object) -> SchedulerConfig:
    """Of the tiny model with a window of 8; `num_blocks` in the groups that keep all positions."""
    file = read_gguf(PATH)
    windows = sliding_windows(model_spec(file, model_digest(file)))
    assert sorted(windows, key=str) == [8, None]
    return SchedulerConfig(
        num_stages=2,
        max_rows=32,
        max_seqs=4,
        max_logit_rows=4,
        max_context=512,
        num_blocks=tuple(num_blocks if window is None else num_window_blocks for window in windows),
        windows=windows,
        prefill_chunk_tokens=CHUNK,
        min_prefill_rows=8,
        **changes,  # type: ignore[arg-type]
    )


def prompt(length: int, seed: int) -> list[int]:
    """Tokens of the vocabulary, at random."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, length)]


def check(model: ScheduledModel, oracle: TinyModel, prompts: Sequence[list[int]], texts: list[list[int]]) -> None:
    """Text and the logits behind each of its tokens are the oracle's, whose passes see the whole text at once."""
    for record, tokens, text in zip(model.records[-len(prompts) :], prompts, texts, strict=True):
        logits = oracle.logits(tokens + text)
        for offset, token in enumerate(text):
            wanted = logits[len(tokens) + offset - 1]
            found = model.logits[record.request_id, len(tokens) + offset]
            assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 2e-4
            assert token == int(wanted.argmax())


@pytest.mark.parametrize("cuts", [(), (1,)])
def test_a_context_of_many_windows(oracle: TinyModel, cuts: tuple[int, ...]) -> None:
    """4 blocks are 64 positions; the context has 260, in chunks and token by token. And again, in other blocks."""
    smallest = window_blocks(8, CHUNK)
    assert smallest == 3
    model = ScheduledModel(PATH, "reference", cuts, config(smallest + 1))
    for seed in (1, 2):
        prompts = [prompt(240, seed)]
        check(model, oracle, prompts, model.serve(prompts, NUM_TOKENS))
    assert model.scheduler.num_preemptions == 0
    model.free()


def test_the_cpu_computes_the_same_whatever_the_pool() -> None:
    """To the bit: where blocks lie and what else is in the pool does not matter."""
    small = config(window_blocks(8, CHUNK) + 2)
    made = []
    for limits in (small, replace(small, windows=(), num_blocks=(40, 40))):
        model = ScheduledModel(PATH, "cpu", (1,), limits)
        made.append((model.serve([prompt(240, 3), prompt(90, 4)], NUM_TOKENS), model.logits))
        model.free()
    (texts, logits), (all_texts, all_logits) = made
    assert texts == all_texts
    assert logits.keys() == all_logits.keys()
    assert all(np.array_equal(logits[at], all_logits[at]) for at in logits)


@pytest.mark.parametrize("admission", ["optimistic", "reserve"])
def test_several_sequences_share_the_smallest_pool(oracle: TinyModel, admission: str) -> None:
    """They take turns, are preempted and computed again, whatever it takes."""
    model = ScheduledModel(PATH, "reference", (1,), config(window_blocks(8, CHUNK), admission=admission))
    prompts = [prompt(length, length) for length in (3, 130, 17, 64, 90)]
    check(model, oracle, prompts, model.serve(prompts, NUM_TOKENS))
    model.free()


def test_a_hit_needs_the_last_window_only(oracle: TinyModel) -> None:
    """The prefix is found while the window before its end is cached; once it is gone it is computed anew, and found."""
    model = ScheduledModel(PATH, "reference", (), config(9, num_blocks=64))
    first = prompt(160, 5)
    longer = [*first, *prompt(40, 6)]
    others = [prompt(150, seed) for seed in (7, 8)]
    for tokens in ([*first, 9], longer, *others, longer, longer):
        check(model, oracle, [tokens], model.serve([tokens], 4))
    assert [record.num_cached_tokens for record in model.records] == [0, 160, 0, 0, 0, 192]
    model.free()
