"""The bounded byte cursor under gguf.py: scalars, strings and arrays of a GGUF header.

Every length is compared with what the file still holds before anything of that size is allocated. Knows the encoding
of values only, neither what a header consists of nor what a key means.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from lamina.spec.errors import InvalidCheckpoint

MetadataValue: TypeAlias = "bool | int | float | str | tuple[MetadataValue, ...]"
"""Strings are UTF-8 decoded with `surrogateescape`, so bytes that are not valid UTF-8 (tokens) survive:
`value.encode("utf-8", "surrogateescape")` gives them back."""

_SCALARS = {
    type_id: struct.Struct("<" + code)
    for type_id, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_STRING, _ARRAY = 8, 9
_U32, _U64, _ARRAY_HEAD = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")
_COMPOUND_MIN_BYTES = {_STRING: _U64.size, _ARRAY: _ARRAY_HEAD.size}
_FIRST_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What a header may cost. 262k tokens, scores and types with 515k merges, a large vocabulary, are 1.3M values."""

    max_header_bytes: int = 256 << 20
    max_table_entries: int = 1 << 17  # of the metadata and of the tensor table, each
    max_array_values: int = 4 << 20  # over all arrays of a file
    max_array_depth: int = 4


class HeaderCursor:
    """Reads a header front to back. Owned by one read_gguf call; raises InvalidCheckpoint on any bound."""

    def __init__(self, file: BinaryIO, path: Path, file_bytes: int, limits: ReadLimits) -> None:
        self.position = 0
        self._file = file
        self._path = path
        self._file_bytes = file_bytes
        self._limits = limits
        self._values_left = limits.max_array_values
        self._buffer = bytearray()

    def fail(self, problem: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self._path}: {problem}")

    def expect(self, count: int, min_bytes: int, what: str) -> None:
        """Refuse a claim of `count` things of at least `min_bytes` each that the rest of the file cannot hold."""
        left = self._file_bytes - self.position
        if count * min_bytes > left:
            raise self.fail(
                f"truncated or corrupt: {what} at byte {self.position} needs at least {count * min_bytes} bytes, "
                f"{left} are left"
            )

    def table_size(self, count: int, min_bytes: int, what: str) -> int:
        """`count`, if a table of so many entries is within the limits."""
        if count > self._limits.max_table_entries:
            raise self.fail(f"claims {count} entries in {what}, the limit is {self._limits.max_table_entries}")
        self.expect(count, min_bytes, f"{what} ({count} entries)")
        return count

    def _take(self, num_bytes: int, what: str) -> int:
        """Advance over `num_bytes`, buffered; returns where they start."""
        start, end = self.position, self.position + num_bytes
        if end > len(self._buffer):
            self._fill(end, what)
        self.position = end
        return start

    def _fill(self, end: int, what: str) -> None:
        self.expect(1, end - self.position, what)
        if end > self._limits.max_header_bytes:
            raise self.fail(f"header exceeds the limit of {self._limits.max_header_bytes} bytes at {what}")
        target = max(end, min(2 * len(self._buffer), self._limits.max_header_bytes), _FIRST_READ_BYTES)
        self._buffer += self._file.read(target - len(self._buffer))
        if end > len(self._buffer):
            raise self.fail(f"truncated while it was read: {len(self._buffer)} bytes, {end} needed for {what}")

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._buffer, self._take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._buffer, self._take(8, what))[0]
        return value

    def u64s(self, count: int, what: str) -> tuple[int, ...]:
        start = self._take(8 * count, what)
        return struct.unpack_from(f"<{count}Q", self._buffer, start)

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self._take(length, what)
        return self._buffer[start : start + length].decode("utf-8", "surrogateescape")

    def name(self, what: str, max_length: int) -> str:
        """A key or tensor name: printable, so that it can stand in any message."""
        name = self.string(what)
        if not name or not name.isprintable() or len(name) > max_length:
            raise self.fail(f"{what} {name[:64]!a} is not 1 to {max_length} printable characters")
        return name

    def value(self, what: str) -> MetadataValue:
        type_id = self.u32(what)
        if type_id == _STRING:
            return self.string(what)
        if type_id == _ARRAY:
            return self._array(what, depth=1)
        scalar = _SCALARS.get(type_id)
        if scalar is None:
            raise self.fail(f"{what} has value type {type_id}, which GGUF does not define")
        value: bool | int | float = scalar.unpack_from(self._buffer, self._take(scalar.size, what))[0]
        return value

    def _array(self, what: str, depth: int) -> tuple[MetadataValue, ...]:
        if depth > self._limits.max_array_depth:
            raise self.fail(f"{what} nests arrays deeper than {self._limits.max_array_depth}")
        type_id, count = _ARRAY_HEAD.unpack_from(self._buffer, self._take(_ARRAY_HEAD.size, what))
        scalar = _SCALARS.get(type_id)
        min_bytes = scalar.size if scalar else _COMPOUND_MIN_BYTES.get(type_id)
        if min_bytes is None:
            raise self.fail(f"{what} has element type {type_id}, which GGUF does not define")
        self.expect(count, min_bytes, f"{what} ({count} values)")
        self._values_left -= count
        if self._values_left < 0:
            raise self.fail(f"arrays hold more than {self._limits.max_array_values} values, at {what}")
        if scalar:
            start = self._take(count * scalar.size, what)
            return struct.unpack_from(f"<{count}{scalar.format[1:]}", self._buffer, start)
        if type_id == _STRING:
            return tuple([self.string(what) for _ in range(count)])
        return tuple([self._array(what, depth + 1) for _ in range(count)])
