"""Splitting changes no result: SmolLM2 in process at every cut, greedy text equal to the unsplit model's.

Weights are loaded once; each cut gets its own two StageModels over them, and the hidden state passes between the two as
a frame does, through host memory.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from goldens.golden_reader import load_logit_goldens
from numpy.typing import NDArray

from lamina.kernels.backend import Backend
from lamina.kernels.buffer import KvCache
from lamina.kernels.registry import create_backend
from lamina.rpc_worker.arena import Arena
from lamina.rpc_worker.graph_cache import GraphCache
from lamina.rpc_worker.loader import StageLoader, TensorReader
from lamina.rpc_worker.stage_model import StageModel, StepArrays
from lamina.rpc_worker.weights import StageWeights
from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.memory import arena_layout
from lamina.spec.model import LayerRange, ModelSpec
from lamina.spec.placement import StageSettings
from support.models import smollm2_path

PROMPT_LENGTHS = (1, 15, 16, 17, 600)
NUM_TOKENS = 32
SETTINGS = StageSettings(max_rows=704, max_seqs=5, max_logit_rows=5, max_context=640, kv_dtype="f32")
BLOCKS = np.arange(5 * 40, dtype=np.int32).reshape(5, 40)  # block table: 40 blocks for each sequence


class WholeModel:
    """Weights, caches and arena of all layers, from which stages of any cut are made."""

    def __init__(self, path: Path, backend: Backend) -> None:
        file = read_gguf(path)
        self.spec: ModelSpec = model_spec(file, model_digest(file))
        self.backend = backend
        layers = self.spec.all_layers
        with TensorReader(lambda _: None) as reader:
            self.weights = StageLoader(backend, self.spec, file.tensors, reader).load(layers)
        self.arena = Arena(backend, arena_layout(self.spec, layers, SETTINGS))
        self.caches: list[KvCache] = []
        for layer in self.spec.layers:
            shape = layer.attention
            dtype = next(d for d in backend.capabilities.kv_dtypes if d.value == "f32")
            self.caches.append(backend.alloc_kv(BLOCKS.size, shape.num_kv_heads, shape.key_dim, shape.value_dim, dtype))

    def stages(self, bounds: list[int]) -> list[StageModel]:
        """StageModels of the layer ranges between `bounds`."""
        made = []
        for start, stop in pairwise(bounds):
            part = StageWeights(self.backend, self.weights.layers[start:stop])
            part.embedding = self.weights.embedding if start == 0 else None
            if stop == self.spec.num_layers:
                part.output_norm, part.head = self.weights.output_norm, self.weights.head
            layers = LayerRange(start, stop)
            graphs = GraphCache(self.backend)
            caches = self.caches[start:stop]
            made.append(StageModel(self.backend, self.spec, layers, part, self.arena, caches, graphs))
        return made


def arrays(positions: list[range]) -> StepArrays:
    """Step arrays of sequences 0, 1, … at these positions; every sequence's last row wants logits."""
    rows = np.concatenate([np.array(span, np.int32) for span in positions])
    starts = np.cumsum([0, *(len(span) for span in positions)]).astype(np.int32)
    owner = np.repeat(np.arange(len(positions)), [len(span) for span in positions])
    slots = BLOCKS[owner, rows // 16] * 16 + rows % 16
    return StepArrays(rows, starts, (slots.astype(np.int32),), (BLOCKS,), starts[1:] - 1)


def greedy(stages: list[StageModel], prompts: list[list[int]]) -> list[list[int]]:
    """Continuations of all prompts, decoded together."""
    spans = [range(len(prompt)) for prompt in prompts]
    tokens = [token for prompt in prompts for token in prompt]
    made: list[list[int]] = [[] for _ in prompts]
    for _ in range(NUM_TOKENS):
        step = arrays(spans)
        output: NDArray[np.float32] | None = None
        for index, stage in enumerate(stages):
            ids = np.array(tokens, np.int32) if index == 0 else None
            shape = (step.positions, step.row_starts, step.slots, step.blocks, step.logit_rows)
            output = stage.run(StepArrays(*shape, tokens=ids, hidden=output))
        assert output is not None
        tokens = [int(token) for token in output.argmax(axis=1)]
        for seq, token in enumerate(tokens):
            made[seq].append(token)
        spans = [range(span.stop, span.stop + 1) for span in spans]
    return made


@pytest.fixture(scope="module")
def model() -> Iterator[WholeModel]:
    backend = create_backend("cpu", threads=1)
    yield WholeModel(smollm2_path(), backend)
    backend.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    goldens = load_logit_goldens(Path(__file__).parents[1] / "goldens" / "smollm2_logits.json")
    text = max((golden.forced_ids for golden in goldens.values()), key=len)
    repeated = (*text, *text)
    return [list(repeated[start : start + length]) for start, length in enumerate(PROMPT_LENGTHS)]


@pytest.fixture(scope="module")
def unsplit(model: WholeModel, prompts: list[list[int]]) -> list[list[int]]:
    return greedy(model.stages([0, 30]), prompts)


@pytest.mark.parametrize("cut", range(1, 30))
def test_every_cut_gives_the_unsplit_text(
    model: WholeModel, prompts: list[list[int]], unsplit: list[list[int]], cut: int
) -> None:
    """Prompts of 1, 15, 16, 17 and 600 tokens, 32 tokens each (P-08)."""
    assert greedy(model.stages([0, cut, 30]), prompts) == unsplit


def test_many_stages_give_the_unsplit_text(
    model: WholeModel, prompts: list[list[int]], unsplit: list[list[int]]
) -> None:
    """A stage for every layer."""
    assert greedy(model.stages(list(range(31))), prompts) == unsplit


def test_the_unsplit_text_is_worth_comparing(unsplit: list[list[int]]) -> None:
    """Different prompts are continued differently, so equality above is no accident."""
    assert len({tuple(text) for text in unsplit}) == len(unsplit)
