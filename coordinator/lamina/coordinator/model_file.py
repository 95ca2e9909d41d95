"""The model as the coordinator sees it: description and text handling, never weights."""

from dataclasses import dataclass
from pathlib import Path

from lamina.coordinator.text.chat import ChatEncoder
from lamina.coordinator.text.template import ChatTemplate
from lamina.coordinator.text.tokenizer import Tokenizer
from lamina.spec.checkpoint import TensorIndex
from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A checked model file."""

    path: Path
    spec: ModelSpec
    tensors: TensorIndex
    tokenizer: Tokenizer
    chat: ChatEncoder


def open_model_file(path: Path) -> ModelFile:
    """Read the header and build the tokenizer. Raises InvalidCheckpoint or UnsupportedModel."""
    file = read_gguf(path)
    spec = model_spec(file, model_digest(file))
    tokenizer = Tokenizer.from_metadata(file.metadata, str(path))
    template = ChatTemplate.from_metadata(file.metadata, tokenizer, str(path))
    return ModelFile(path.resolve(), spec, file.tensors, tokenizer, ChatEncoder(tokenizer, template))
