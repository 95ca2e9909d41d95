"""GGUF headers, read with bounds on everything, since the file may be a stranger's (P-15, B-43).

Owns the container format: metadata and the tensor table. Knows no architecture and reads no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lamina.spec.checkpoint import TensorIndex

MetadataValue: TypeAlias = "bool | int | float | str | tuple[MetadataValue, ...]"
"""Strings are UTF-8 decoded with `surrogateescape`, so bytes that are not valid UTF-8 (tokens) survive:
`value.encode("utf-8", "surrogateescape")` gives them back."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What a header may cost; real models stay below a tenth of each default."""

    max_header_bytes: int = 512 << 20
    max_metadata_values: int = 16 << 20
    max_array_depth: int = 4


@dataclass(frozen=True, slots=True)
class GgufPart:
    """One file of a model. `header_bytes` counts up to the end of the tensor table, before the padding."""

    path: Path
    header_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a model: of one file, or of all parts of a split one (metadata is the first part's)."""

    path: Path
    version: int
    metadata: Mapping[str, MetadataValue]
    tensors: TensorIndex
    parts: tuple[GgufPart, ...]

    @property
    def header_bytes(self) -> int:
        return sum(part.header_bytes for part in self.parts)

    @property
    def file_bytes(self) -> int:
        return sum(part.file_bytes for part in self.parts)


def read_gguf(path: Path, limits: ReadLimits = ReadLimits()) -> GgufFile:
    """Read the header of a GGUF file (any part of a split one); no weight is read.

    Raises InvalidCheckpoint (missing, truncated, malformed) or UnsupportedModel (version, byte order, tensor type).
    """
    raise NotImplementedError
