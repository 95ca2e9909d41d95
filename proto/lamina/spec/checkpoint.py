"""Where the tensors of a checkpoint lie: name -> file, offset, type, shape, from headers only.

Owns no file handle and reads no weights; it does not know what the tensors are for.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, overload

from lamina.spec.errors import InvalidCheckpoint
from lamina.spec.quant import GgmlType

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` is in GGUF order, the reverse of torch's: shape[0] = in_features varies fastest."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    file: Path
    offset_bytes: int  # absolute, from the start of `file`
    num_bytes: int

    @property
    def cols(self) -> int:
        """Values in a row (in_features)."""
        return self.shape[0]

    @property
    def rows(self) -> int:
        """Number of rows; 1 for a vector, out_features x experts for a stack of matrices."""
        return math.prod(self.shape[1:])

    def __str__(self) -> str:
        return f"{self.name} {self.type.name} {list(self.shape)}"


class TensorIndex(Mapping[str, TensorInfo]):
    """All tensors of a model by name, in file order; immutable."""

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        """Raises InvalidCheckpoint if two tensors share a name."""
        self._by_name: dict[str, TensorInfo] = {}
        for tensor in tensors:
            first = self._by_name.get(tensor.name)
            if first is not None:
                elsewhere = "" if first.file == tensor.file else f", first in {first.file}"
                raise InvalidCheckpoint(f"{tensor.file}: tensor {tensor.name} occurs twice{elsewhere}")
            self._by_name[tensor.name] = tensor

    def __getitem__(self, name: str) -> TensorInfo:
        """Raises InvalidCheckpoint for a name that is not there."""
        try:
            return self._by_name[name]
        except KeyError:
            raise InvalidCheckpoint(f"the checkpoint has no tensor {name}") from None

    @overload
    def get(self, name: str, /) -> TensorInfo | None: ...
    @overload
    def get(self, name: str, /, default: TensorInfo | T) -> TensorInfo | T: ...
    def get(self, name: str, /, default: object = None) -> object:
        return self._by_name.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)
