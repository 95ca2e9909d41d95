"""A tiny model for the cluster tests, made once per test process, and what it says on one machine."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.registry import create_backend
from support.inprocess import InProcessModel
from support.loopback import SETTINGS, TinyModel
from support.tiny import write_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("cluster") / "tiny.gguf"
    write_tiny_llama(path, matrix_type=GGMLQuantizationType.F32, hidden=64, ff=96, layers=4, seed=3)
    return TinyModel.open(path)


@pytest.fixture(scope="session")
def whole_model_says(model: TinyModel) -> Callable[[Sequence[int], int], list[int]]:
    """Greedy continuation of a prompt by the undivided model in this process."""
    whole = InProcessModel(Path(model.path), create_backend("reference"), settings=SETTINGS)

    def say(prompt: Sequence[int], num_tokens: int) -> list[int]:
        return whole.greedy([prompt], num_tokens)[0]

    return say
