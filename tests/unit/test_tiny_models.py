"""The committed tiny models and their goldens are whole, and the goldens notice the usual mistakes."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tiny_forward import Array, TinyModel

TESTS = Path(__file__).resolve().parents[1]
MODELS: dict[str, Any] = json.loads((TESTS / "goldens" / "tiny_models.json").read_text())["models"]


class HalvesRotated(TinyModel):
    """The classic mistake with llama files: rotating (i, i + half), as if the converter had not reordered q and k."""

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class KvHeadsTiled(TinyModel):
    """Grouped queries the wrong way round: query head h reads kv head h mod num_kv_heads."""

    def _attention(self, prefix: str, x: Array, cos: Array, sin: Array) -> Array:
        order = np.arange(self.num_heads).reshape(self.num_kv_heads, -1).T.ravel()
        rows = (order[:, None] * self.head_dim + np.arange(self.head_dim)).ravel()
        saved = dict(self.weights)
        self.weights[prefix + "attn_q.weight"] = saved[prefix + "attn_q.weight"][rows]
        self.weights[prefix + "attn_output.weight"] = saved[prefix + "attn_output.weight"][:, rows]
        result = super()._attention(prefix, x, cos, sin)
        self.weights = saved
        return result


class SinksIgnored(TinyModel):
    """Attention shares that sum to 1."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.weights = {name: value for name, value in self.weights.items() if "attn_sinks" not in name}


class GptOssLikeAnyOther(TinyModel):
    """gpt-oss's experts with the usual SwiGLU."""

    def _join(self, gate: Array, up: Array) -> Array:
        return gate / (1 + np.exp(-gate)) * up


class ExpertsShifted(TinyModel):
    """Each token computed by the neighbours of its experts."""

    def _expert_linear(self, x: Array, name: str, expert: int) -> Array:
        return super()._expert_linear(x, name, (expert + 1) % int(self._get("expert_count")))


def without_weights(part: str) -> Callable[[Path], TinyModel]:
    """A model in which every tensor whose name contains `part` has no effect."""

    def load(path: Path) -> TinyModel:
        model = TinyModel(path)
        for name in [name for name in model.weights if part in name]:
            neutral = 0.0 if name.endswith(".bias") else 1.0
            model.weights[name] = np.full_like(model.weights[name], neutral)
        return model

    return load


def with_metadata(key: str, value: str | float) -> Callable[[Path], TinyModel]:
    """A model that reads `value` where the file says something else."""

    def load(path: Path) -> TinyModel:
        model = TinyModel(path)
        model.metadata[f"{model.arch}.{key}"] = value
        return model

    return load


MISTAKES: dict[str, tuple[str, Callable[[Path], TinyModel]]] = {
    "rope_freqs ignored": ("llama3", without_weights("rope_freqs")),
    "halves rotated": ("llama_tied", HalvesRotated),
    "kv heads tiled": ("llama_mixed", KvHeadsTiled),
    "linear scaling ignored": ("llama_linear", with_metadata("rope.scaling.type", "none")),
    "yarn ignored": ("qwen2_yarn", with_metadata("rope.scaling.type", "none")),
    "yarn taken for linear": ("qwen2_yarn", with_metadata("rope.scaling.type", "linear")),
    "biases ignored": ("qwen2", without_weights(".bias")),
    "q norm ignored": ("qwen3", without_weights("attn_q_norm")),
    "sinks ignored": ("gpt_oss", SinksIgnored),
    "window ignored": ("gpt_oss", with_metadata("attention.sliding_window", 4096)),
    "biases of router and experts ignored": ("gpt_oss", without_weights(".bias")),
    "swiglu not clamped": ("gpt_oss", GptOssLikeAnyOther),
    "one expert too few": ("qwen3moe", with_metadata("expert_used_count", 2)),
    "experts shifted": ("mixtral", ExpertsShifted),
    "freq_base ignored": ("qwen2_yarn", with_metadata("rope.freq_base", 10000.0)),
}


def last_error(model: TinyModel, prompt: dict[str, Any]) -> float:
    """Relative error of the last position's logits."""
    golden = np.array(prompt["logits"][str(len(prompt["tokens"]) - 1)])
    return float(np.linalg.norm(model.logits(prompt["tokens"])[-1] - golden) / np.linalg.norm(golden))


@pytest.mark.parametrize("name", MODELS)
def test_the_files_are_those_that_transformers_saw(name: str) -> None:
    """A model file changed without its goldens, or the reverse, is found here and not in a kernel."""
    content = (TESTS / "data" / MODELS[name]["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == MODELS[name]["sha256"]


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_forward_pass_agrees_with_transformers(name: str) -> None:
    """Two readings of each architecture, one of them from the GGUF file alone, give the same logits and text."""
    model = TinyModel(TESTS / "data" / MODELS[name]["file"])
    for prompt in MODELS[name]["prompts"]:
        logits = model.logits(prompt["tokens"])
        for position, golden in prompt["logits"].items():
            error = np.linalg.norm(logits[int(position)] - golden) / np.linalg.norm(golden)
            assert error < 1e-5
    shortest = MODELS[name]["prompts"][0]
    assert model.greedy(shortest["tokens"], len(shortest["greedy"])) == shortest["greedy"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_goldens_notice_a_mistake(mistake: str) -> None:
    """Each mistake moves the logits by far more than any rounding does."""
    name, load = MISTAKES[mistake]
    model = load(TESTS / "data" / MODELS[name]["file"])
    assert last_error(model, MODELS[name]["prompts"][-1]) > 0.2
