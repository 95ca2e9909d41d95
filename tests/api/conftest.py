"""The real tokenizer and chat template of the default model; no weights are read."""

import pytest

from lamina.coordinator.model_file import ModelFile, open_model_file
from support.models import smollm2_path


@pytest.fixture(scope="session")
def model() -> ModelFile:
    return open_model_file(smollm2_path())
