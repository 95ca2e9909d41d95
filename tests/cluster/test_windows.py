"""A model with a sliding window over live workers: a prompt longer than the pool of its windowed layers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lamina.coordinator.engine.sequence import SequenceRequest
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.session import SessionSettings, SplitChoice, open_session
from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from support.loopback import DEADLINE_S, run_scene, running_worker
from support.tiny_forward import TinyModel

PATH = Path(__file__).parents[1] / "data/tiny_gpt_oss.gguf"
PROMPTS = [[3 + (seed * i * i) % 240 for i in range(length)] for seed, length in ((1, 180), (5, 150))]
NUM_TOKENS = 6


def model_file() -> ModelFile:
    """The tiny model without its tokenizer, which nothing here asks for."""
    file = read_gguf(PATH)
    parts = SimpleNamespace(path=PATH, spec=model_spec(file, model_digest(file)), tensors=file.tensors)
    return cast("ModelFile", parts)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_prompts_longer_than_the_pool(num_workers: int) -> None:
    """8 tokens of window, chunks of 24: the windowed layers have 144 positions, the prompts more."""
    texts: list[list[int]] = []

    async def scene() -> None:
        async with running_worker("a") as a, running_worker("b") as b:
            workers = (a, b)[:num_workers]
            middle = model_file().spec.num_layers // 2
            ranges = (LayerRange(0, middle), LayerRange(middle, model_file().spec.num_layers))
            settings = SessionSettings(
                workers=tuple(worker.settings.listen for worker in workers),
                split=SplitChoice(ranges=ranges if num_workers == 2 else None),
                stage=StageSettings(max_rows=24, max_seqs=1, max_logit_rows=1, max_context=512, kv_dtype="f32"),
                num_tokens=512,
            )
            async with open_session(model_file(), settings, lambda _: None, lambda _: None) as session:
                assert sorted(session.pipeline.num_blocks) == [9, 32]
                async with asyncio.timeout(DEADLINE_S):
                    for prompt in PROMPTS:
                        request = SequenceRequest(tuple(prompt), SamplingParams(), frozenset(), NUM_TOKENS)
                        texts.append([event.token async for event in session.engine.submit(request)])
                    assert session.engine.scheduler.num_preemptions == 0

    run_scene(scene)
    oracle = TinyModel(PATH)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert oracle.logits(prompt + text)[len(prompt) - 1 : -1].argmax(axis=1).tolist() == text
