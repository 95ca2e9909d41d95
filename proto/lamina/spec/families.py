"""Model families: one table row each, and how GGUF metadata becomes a ModelSpec.

Knows metadata keys and tensor names; knows no backend, and reads nothing but the header it is given.
"""

from lamina.spec.checkpoint import TensorIndex
from lamina.spec.gguf import GgufFile
from lamina.spec.model import ModelSpec


def model_spec(gguf: GgufFile, digest: str) -> ModelSpec:
    """The model that a GGUF header describes, with its tensors checked (see check_tensors).

    Raises UnsupportedModel (architecture or feature) or InvalidCheckpoint (a key or tensor missing or odd).
    """
    raise NotImplementedError


def check_tensors(spec: ModelSpec, tensors: TensorIndex) -> None:
    """Check name, shape and type of every tensor that `spec` needs, before anything is loaded.

    Raises InvalidCheckpoint or UnsupportedModel naming the tensor, what was expected and what was found.
    """
    raise NotImplementedError
