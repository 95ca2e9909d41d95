"""Perplexity of the default model per KV dtype against llama.cpp's on the same chunks (goldens, see their README.md).

Here the first chunks; the whole text is measured by `coordinator bench perplexity`, benchmarks/results/perplexity.json.
"""

import asyncio
import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.coordinator.model_file import open_model_file
from lamina.coordinator.perplexity import WindowScorer, cut_windows
from lamina.kernels.registry import create_backend
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.spec.ids import Epoch
from lamina.spec.placement import StageSettings
from lamina.spec.step import AddSequence, RemoveSequence, StepDone, StepPlan, Tokens
from support.inprocess import InProcessModel
from support.models import smollm2_path

TESTS = Path(__file__).parents[1]
GOLDENS: dict[str, Any] = json.loads((TESTS / "goldens" / "smollm2_perplexity.json").read_text())
TEXT = TESTS / "data" / "persuasion.txt"
NUM_CHUNKS = 4
MAX_RATIO = 1.005


class StagePipeline:
    """What WindowScorer needs of a Pipeline, over one stage without sockets; steps run when they are issued."""

    def __init__(self, stage: Stage, settings: StageSettings, num_lanes: int) -> None:
        self.settings = settings
        self.num_blocks = (num_lanes * settings.max_blocks_per_seq,)
        self.placement = self
        self.epoch = Epoch(1)
        self._stage = stage
        self._answers: deque[StepDone] = deque()

    def add_sequence(self, add: AddSequence) -> None:
        self._stage.add_sequence(add)

    def remove_sequence(self, remove: RemoveSequence) -> None:
        self._stage.remove_sequence(remove.seq)

    def issue(self, plan: StepPlan) -> None:
        ids = [token for piece in plan.slices if isinstance(piece.input, Tokens) for token in piece.input.ids]
        done = self._stage.run(ReadyStep(plan, np.array(ids, np.int32), None)).done
        assert done is not None
        self._answers.append(done)

    async def next_done(self) -> StepDone:
        return self._answers.popleft()


@pytest.mark.parametrize("kv_dtype", sorted(GOLDENS["by_kv_dtype"]))
def test_perplexity_is_llama_cpps(kv_dtype: str) -> None:
    """Within 0.5 % on the same chunks; rounding activations to 8 bits alone makes as much on a single chunk."""
    length = GOLDENS["chunk"]
    windows = cut_windows(
        open_model_file(smollm2_path()).tokenizer.encode(TEXT.read_text(), add_special=True, parse_special=False),
        length,
        limit=NUM_CHUNKS,
    )
    settings = StageSettings(max_rows=512, max_seqs=2, max_logit_rows=256, max_context=length, kv_dtype=kv_dtype)
    backend = create_backend("cpu")
    model = InProcessModel(smollm2_path(), backend, settings=settings)
    pipeline: Any = StagePipeline(model.stages[0], settings, num_lanes=2)
    scorer = WindowScorer(pipeline, windows, lambda _: None)
    asyncio.run(scorer.run())
    model.free()
    backend.close()
    assert len(scorer.scores) == NUM_CHUNKS * (length // 2 - 1)
    expected = sum(GOLDENS["by_kv_dtype"][kv_dtype]["loss_by_chunk"][:NUM_CHUNKS])
    assert abs(math.fsum(scorer.scores) + expected) / len(scorer.scores) < math.log(MAX_RATIO)


def test_the_goldens_are_of_this_text_and_model() -> None:
    """Of every byte of the text, and of the model file that the test suite fetches."""
    assert GOLDENS["text"]["num_bytes"] == TEXT.stat().st_size
    assert GOLDENS["model"]["num_bytes"] == smollm2_path().stat().st_size
    for figures in GOLDENS["by_kv_dtype"].values():
        mean = sum(figures["loss_by_chunk"]) / figures["num_scored"]
        assert len(figures["loss_by_chunk"]) * (GOLDENS["chunk"] // 2 - 1) == figures["num_scored"]
        assert math.exp(mean) == pytest.approx(figures["perplexity"], rel=1e-5)
