"""Whole models on a GPU: tiny models of every family against transformers' goldens, whole, split and mixed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.backend import Backend
from lamina.kernels.registry import create_backend
from lamina.spec.placement import StageSettings
from support.inprocess import InProcessModel
from support.tiny import write_tiny_llama
from support.tiny_forward import TinyModel

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]
GOLDENS: dict[str, Any] = json.loads((TESTS / "goldens/tiny_models.json").read_text())["models"]
SETTINGS = StageSettings(max_rows=256, max_seqs=8, max_logit_rows=8, max_context=256, kv_dtype="f16")
# Their routers have near ties (0.405 and 0.401): where activations are rounded, now and then another expert wins.
CLOSE_ROUTERS = ("gpt_oss", "mixtral")
LOGIT_ERROR = 0.1  # activations are rounded to 8 bits; tests/goldens/TINY_MODELS.md


@pytest.fixture(scope="module")
def cuda() -> Iterator[Backend]:
    backend = create_backend("cuda:0")
    yield backend
    backend.close()


@pytest.mark.parametrize("cuts", [(), (1,)], ids=["whole", "split"])
@pytest.mark.parametrize("family", [family for family in GOLDENS if family not in CLOSE_ROUTERS])
def test_greedy_text_and_logits(cuda: Backend, family: str, cuts: tuple[int, ...]) -> None:
    """Prompts in company, decoded by replayed graphs: the goldens' text, logits within the rounding of activations."""
    golden = GOLDENS[family]
    model = InProcessModel(TESTS / "data" / golden["file"], cuda, cuts, SETTINGS)
    prompts = [prompt["tokens"] for prompt in golden["prompts"]]
    made = model.greedy(prompts, len(golden["prompts"][0]["greedy"]))
    assert made == [prompt["greedy"] for prompt in golden["prompts"]]
    for prompt in golden["prompts"]:
        model.reset()
        logits = model.step({0: prompt["tokens"]})[0]
        expected = np.array(prompt["logits"][str(len(prompt["tokens"]) - 1)])
        assert np.linalg.norm(logits - expected) / np.linalg.norm(expected) < LOGIT_ERROR
    model.free()


@pytest.mark.parametrize("family", CLOSE_ROUTERS)
def test_a_router_that_sees_rounded_activations(cuda: Backend, family: str) -> None:
    """Along the goldens' texts: logits near the float32 reference's at most steps, another expert's share at few."""
    golden = GOLDENS[family]
    path = TESTS / "data" / golden["file"]
    models = [InProcessModel(path, backend, (1,), SETTINGS) for backend in (cuda, create_backend("reference"))]
    errors = []
    for prompt in golden["prompts"]:
        for model in models:
            model.reset()
        for tokens in (prompt["tokens"], *([token] for token in prompt["greedy"])):
            found, expected = (model.step({0: tokens})[0] for model in models)
            errors.append(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    assert np.median(errors) < LOGIT_ERROR
    assert np.mean(np.array(errors) > LOGIT_ERROR) < 0.2
    for model in models:
        model.free()


@pytest.mark.parametrize(
    "matrix_type", [GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.Q8_0]
)
def test_quantised_llama_against_float64(cuda: Backend, tmp_path: Path, matrix_type: GGMLQuantizationType) -> None:
    """Heads of 64 values, adjacent-pair rope: last-row logits of prefills of 1 to 100 tokens against numpy float64."""
    path = write_tiny_llama(tmp_path / "model.gguf", matrix_type=matrix_type)
    oracle = TinyModel(path)
    model = InProcessModel(path, cuda, (1,), SETTINGS)
    rng = np.random.default_rng(3)
    for length in (1, 5, 17, 100):
        tokens = [int(token) for token in rng.integers(0, 300, length)]
        model.reset()
        logits = model.step({0: tokens})[0]
        expected = oracle.logits(tokens)[-1]
        assert np.linalg.norm(logits - expected) / np.linalg.norm(expected) < LOGIT_ERROR
    model.free()


def test_split_between_gpu_and_reference(cuda: Backend) -> None:
    """A mixed pair exchanges float32 frames (C-12): the same text as either alone."""
    golden = GOLDENS["qwen3"]
    path = TESTS / "data" / golden["file"]
    reference = create_backend("reference")
    gpu_half = InProcessModel(path, cuda, (1,), SETTINGS)
    cpu_half = InProcessModel(path, reference, (1,), SETTINGS)
    mixed = InProcessModel(path, reference, (1,), SETTINGS)
    mixed.stages = [gpu_half.stages[0], cpu_half.stages[1]]
    prompts = [prompt["tokens"] for prompt in golden["prompts"]]
    assert mixed.greedy(prompts, 12) == [prompt["greedy"] for prompt in golden["prompts"]]
    for model in (gpu_half, cpu_half):
        model.free()
