"""GGUF headers, read with bounds on everything, since the file may be a stranger's (P-15, B-43).

Owns the container format: metadata, the tensor table and split files. Knows no architecture and reads no weights.
"""

import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from lamina.spec.checkpoint import TensorIndex, TensorInfo
from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel
from lamina.spec.gguf_header import HeaderCursor, MetadataValue, ReadLimits
from lamina.spec.quant import quant_format, row_bytes

__all__ = ["GgufFile", "GgufPart", "MetadataValue", "NotGguf", "ReadLimits", "read_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_KEY_LENGTH = 65535  # this and the next are GGUF's own limits
_MAX_TENSOR_NAME_LENGTH = 64
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1  # key, value type, value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name, number of dims, one dim, type, offset
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_FOREIGN_MAGICS = {
    b"PK\x03\x04": "a zip file, like a PyTorch checkpoint",
    b"vers": "a Git LFS pointer: the model itself was not downloaded",
    b"lmgg": "GGML, the format before GGUF",
    b"tjgg": "GGJT, the format before GGUF",
    b"fmgg": "GGMF, the format before GGUF",
}


class NotGguf(InvalidCheckpoint):
    """A file of another kind. The message shows how it begins, so it is for those who may read the file themselves."""


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


def read_gguf(path: Path, limits: ReadLimits = ReadLimits()) -> GgufFile:  # noqa: B008 (frozen)
    """Read the header of a GGUF file (any part of a split one); no weight is read.

    Raises InvalidCheckpoint (missing, truncated, malformed) or UnsupportedModel (version, byte order, tensor type).
    """
    part = _read_part(path, limits)
    count = _split_number(part, "split.count", 1)
    if count <= 1:
        return part
    parts = [part if sibling == path else _read_part(sibling, limits) for sibling in _sibling_paths(part, count)]
    return _merge(path, parts)


def _split_number(part: GgufFile, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidCheckpoint(f"{part.path}: {key} is not a number")
    return value


def _sibling_paths(part: GgufFile, count: int) -> tuple[Path, ...]:
    number, path = _split_number(part, "split.no", 0) + 1, part.path
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number, count):
        raise InvalidCheckpoint(
            f"{path}: holds part {number} of {count} of a split model; rename it to "
            f"NAME-{number:05d}-of-{count:05d}.gguf so that the others can be found beside it"
        )
    paths = tuple(path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1))
    missing = next((sibling for sibling in paths if not sibling.exists()), None)
    if missing is not None:
        raise InvalidCheckpoint(f"{missing}: this part of a model split into {count} files is missing; fetch it")
    return paths


def _merge(path: Path, parts: Sequence[GgufFile]) -> GgufFile:
    for number, part in enumerate(parts):
        found = (_split_number(part, "split.no", 0), _split_number(part, "split.count", 1))
        if found != (number, len(parts)):
            raise InvalidCheckpoint(
                f"{part.path}: says it is part {found[0] + 1} of {found[1]}, expected {number + 1} of {len(parts)}"
            )
    tensors = TensorIndex(tensor for part in parts for tensor in part.tensors.values())
    expected = _split_number(parts[0], "split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise InvalidCheckpoint(f"{path}: its {len(parts)} parts hold {len(tensors)} tensors, expected {expected}")
    return GgufFile(path, parts[0].version, parts[0].metadata, tensors, tuple(p for part in parts for p in part.parts))


def _read_part(path: Path, limits: ReadLimits) -> GgufFile:
    try:
        file_bytes = _regular_file_bytes(path)
        with path.open("rb") as file:
            return _parse(file, path, file_bytes, limits)
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise InvalidCheckpoint(f"{path}: cannot be read: {error.strerror}") from error


def _regular_file_bytes(path: Path) -> int:
    if "\0" in str(path):
        raise InvalidCheckpoint(f"{str(path)!r}: a path cannot hold a NUL character")
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise InvalidCheckpoint(f"{path}: is a directory; give the path of a .gguf file in it")
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
        raise InvalidCheckpoint(f"{path}: is not a regular file; give the path of a .gguf file")
    return status.st_size


def _parse(file: BinaryIO, path: Path, file_bytes: int, limits: ReadLimits) -> GgufFile:
    start = file.read(16)
    file.seek(0)
    version = _check_start(start, path, file_bytes)
    cursor = HeaderCursor(file, path, file_bytes, limits)
    cursor.u64("magic and version")
    num_tensors = cursor.table_size(cursor.u64("tensor count"), _MIN_TENSOR_BYTES, "the tensor table")
    num_entries = cursor.table_size(cursor.u64("metadata count"), _MIN_ENTRY_BYTES, "the metadata")
    metadata = _read_metadata(cursor, num_entries)
    rows = [_read_tensor_row(cursor) for _ in range(num_tensors)]
    header_bytes = cursor.position
    alignment = _alignment(cursor, metadata)
    data_start = -(-header_bytes // alignment) * alignment
    tensors = [_locate(row, path, data_start, alignment) for row in rows]
    _check_ranges(tensors, path, file_bytes)
    part = GgufPart(path, header_bytes, file_bytes)
    return GgufFile(path, version, MappingProxyType(metadata), TensorIndex(tensors), (part,))


def _check_start(start: bytes, path: Path, file_bytes: int) -> int:
    """The version, from the first 16 bytes of a file."""
    if not file_bytes:
        raise InvalidCheckpoint(f"{path}: is empty; fetch it again")
    magic = start[:4]
    if magic != _MAGIC:
        kind = _FOREIGN_MAGICS.get(magic, f"it starts with {magic!a}")
        if start[8:9] == b"{":  # an 8-byte length, then JSON
            kind = "it looks like safetensors, which needs converting to GGUF"
        raise NotGguf(f"{path}: is not a GGUF file ({kind})")
    if len(start) < 8:
        raise InvalidCheckpoint(f"{path}: truncated: {file_bytes} bytes, a GGUF header needs at least 24")
    version = int.from_bytes(start[4:8], "little")
    if version not in _VERSIONS:
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModel(f"{path}: is big-endian GGUF; convert it to little-endian")
        raise UnsupportedModel(f"{path}: is GGUF version {version}; lamina reads versions 2 and 3")
    return version


def _read_metadata(cursor: HeaderCursor, num_entries: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_entries):
        key = cursor.name("metadata key", _MAX_KEY_LENGTH)
        if key in metadata:
            raise cursor.fail(f"metadata key {key[:64]} occurs twice")
        metadata[key] = cursor.value(f"metadata {key[:64]}")
    return metadata


def _alignment(cursor: HeaderCursor, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail("general.alignment is not a power of two")
    return alignment


@dataclass(frozen=True, slots=True)
class _TensorRow:
    """A line of the tensor table; the offset counts from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int


def _read_tensor_row(cursor: HeaderCursor) -> _TensorRow:
    name = cursor.name("tensor name", _MAX_TENSOR_NAME_LENGTH)
    num_dims = cursor.u32(f"tensor {name}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
    shape = cursor.u64s(num_dims, f"tensor {name}")
    if 0 in shape:
        raise cursor.fail(f"tensor {name} has shape {list(shape)}, with an empty dimension")
    return _TensorRow(name, shape, cursor.u32(f"tensor {name}"), cursor.u64(f"tensor {name}"))


def _locate(row: _TensorRow, path: Path, data_start: int, alignment: int) -> TensorInfo:
    where = f"{path}: tensor {row.name}"
    kind = quant_format(row.type_id, where).type
    if row.offset_bytes % alignment:
        raise InvalidCheckpoint(f"{where} lies at offset {row.offset_bytes}, no multiple of {alignment}")
    try:
        num_bytes = row_bytes(kind, row.shape[0])
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{where}: {error}") from None
    for size in row.shape[1:]:
        num_bytes *= size
    return TensorInfo(row.name, kind, row.shape, path, data_start + row.offset_bytes, num_bytes)


def _check_ranges(tensors: Sequence[TensorInfo], path: Path, file_bytes: int) -> None:
    """Every tensor lies inside the file, and no two share a byte."""
    end = 0
    previous = ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset_bytes):
        if tensor.offset_bytes < end:
            raise InvalidCheckpoint(f"{path}: tensors {previous} and {tensor.name} overlap")
        previous, end = tensor.name, tensor.offset_bytes + tensor.num_bytes
    if end > file_bytes:
        raise InvalidCheckpoint(
            f"{path}: truncated: tensor {previous} ends at byte {end}, the file has {file_bytes}; fetch it again"
        )
