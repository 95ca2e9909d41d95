"""The real tokenizer and chat template of the default model, and a tiny byte tokenizer; no weights are read."""

import pytest

from lamina.coordinator.model_file import ModelFile, open_model_file
from support.cluster import ROOT
from support.models import smollm2_path


@pytest.fixture(scope="session")
def model() -> ModelFile:
    return open_model_file(smollm2_path())


@pytest.fixture(scope="session")
def bytes_model() -> ModelFile:
    """288 tokens, nearly all of them bytes: for random logits, which sorting 49,152 of would make slow."""
    return open_model_file(ROOT / "tests/data/tiny_llama3.gguf")
