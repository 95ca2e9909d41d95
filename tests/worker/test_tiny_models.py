"""The model code against transformers: tiny models of every family, logits and greedy text (goldens, no torch)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.kernels.registry import create_backend
from lamina.spec.gguf import read_gguf
from support.inprocess import InProcessModel

TESTS = Path(__file__).parents[1]
GOLDENS: dict[str, Any] = json.loads((TESTS / "goldens/tiny_models.json").read_text())["models"]


@pytest.fixture(params=sorted(GOLDENS))
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    return GOLDENS[request.param]


@pytest.fixture(params=[0, 1, 2], ids=["whole", "one cut", "two cuts"])
def model(request: pytest.FixtureRequest, golden: dict[str, Any]) -> Iterator[InProcessModel]:
    path = TESTS / "data" / golden["file"]
    metadata = read_gguf(path).metadata
    num_layers = metadata[f"{metadata['general.architecture']}.block_count"]
    assert isinstance(num_layers, int)
    cuts = sorted({1, num_layers - 1})[: request.param]
    backend = create_backend("reference")
    model = InProcessModel(path, backend, cuts)
    yield model
    model.free()
    backend.close()


def test_logits_equal_transformers(model: InProcessModel, golden: dict[str, Any]) -> None:
    """Fed token by token and all at once, the logits at each recorded position are transformers' (float32 rounding)."""
    for prompt in golden["prompts"]:
        model.reset()
        for position, token in enumerate(prompt["tokens"]):
            logits = model.step({0: [token]})[0]
            expected = prompt["logits"].get(str(position))
            if expected is not None:
                error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
                assert error < 2e-5, (position, error)
        model.reset()
        at_once = model.step({0: prompt["tokens"]})[0]
        assert np.linalg.norm(at_once - logits) / np.linalg.norm(logits) < 2e-5


def test_greedy_text_equals_transformers(model: InProcessModel, golden: dict[str, Any]) -> None:
    """All prompts decoded in company give the continuations that transformers gives one by one."""
    prompts = [prompt["tokens"] for prompt in golden["prompts"]]
    made = model.greedy(prompts, len(golden["prompts"][0]["greedy"]))
    assert made == [prompt["greedy"] for prompt in golden["prompts"]]
