"""GGUF files written byte by byte, so that a test can make what no proper writer would.

Independent of lamina and of the gguf package; the encoding follows the GGUF specification.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

TYPE_CODES = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "u64": 10,
    "i64": 11,
    "f64": 12,
}
STRUCT_CODES = dict(zip(TYPE_CODES, "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: str, value: float) -> bytes:
    """A typed metadata value."""
    return struct.pack("<I" + STRUCT_CODES[kind], TYPE_CODES[kind], value)


def text(value: str | bytes) -> bytes:
    return struct.pack("<I", STRING) + string(value)


def array(kind: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}{STRUCT_CODES[kind]}", ARRAY, TYPE_CODES[kind], len(values), *values)


def strings(values: Sequence[str | bytes]) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(string, values))


def tensor_row(name: str | bytes, shape: Sequence[int], type_id: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


@dataclass
class RawGguf:
    """The pieces of a file; counts default to the true ones. `data_bytes` zeros follow the padded header."""

    entries: Sequence[tuple[str | bytes, bytes]] = field(default_factory=list)
    rows: Sequence[bytes] = field(default_factory=list)
    data_bytes: int = 0
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_entries: int | None = None
    alignment: int = 32

    def header(self) -> bytes:
        num_tensors = len(self.rows) if self.num_tensors is None else self.num_tensors
        num_entries = len(self.entries) if self.num_entries is None else self.num_entries
        start = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_entries)
        return start + b"".join(string(key) + value for key, value in self.entries) + b"".join(self.rows)

    def to_bytes(self) -> bytes:
        header = self.header()
        return header + bytes(-len(header) % self.alignment) + bytes(self.data_bytes)
