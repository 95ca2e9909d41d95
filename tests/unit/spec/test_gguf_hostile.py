"""Files that lie: each is refused with one typed line, before anything of the claimed size is allocated (P-15)."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel
from lamina.spec.gguf import read_gguf
from support.raw_gguf import ARRAY, STRING, RawGguf, array, scalar, strings, tensor_row, text

HUGE = 2**63
F32_8 = tensor_row("t", (8,))


def array_head(element: int, count: int) -> bytes:
    return struct.pack("<IIQ", ARRAY, element, count)


def nested(depth: int) -> bytes:
    """A metadata value: `depth` arrays in one another."""
    return struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * (depth - 1) + struct.pack("<IQ", 0, 0)


def aligned(value: bytes) -> RawGguf:
    return RawGguf([("general.alignment", value)], [F32_8], data_bytes=32)


def tensors(*rows: bytes, data_bytes: int = 64) -> RawGguf:
    return RawGguf(rows=list(rows), data_bytes=data_bytes)


MALFORMED = {
    "tensor count": (RawGguf(num_tensors=HUGE), r"claims 9223372036854775808 entries in the tensor table"),
    "metadata count": (RawGguf(num_entries=HUGE), r"claims 9223372036854775808 entries in the metadata"),
    "tensor count within the limit": (RawGguf(num_tensors=10), r"the tensor table \(10 entries\) .* 330 bytes, 16 are"),
    "metadata count within the limit": (RawGguf(num_entries=10), r"the metadata \(10 entries\) .* at least 140"),
    "string length": (RawGguf([("k", struct.pack("<IQ", STRING, HUGE))]), r"metadata k at byte .* needs at least"),
    "key length": (RawGguf([(b"", struct.pack("<QQ", HUGE, 0))]), r"metadata key '' is not 1 to 65535 printable"),
    "array of numbers": (RawGguf([("k", array_head(4, HUGE))]), r"metadata k \(9223372036854775808 values\)"),
    "array of strings": (RawGguf([("k", array_head(STRING, 1000))]), r"metadata k \(1000 values\) .* 8000 bytes"),
    "array of arrays": (RawGguf([("k", array_head(ARRAY, 2**40))]), r"metadata k \(1099511627776 values\)"),
    "nesting": (RawGguf([("k", nested(5))]), r"metadata k nests arrays deeper than 4"),
    "deep nesting": (RawGguf([("k", nested(100_000))]), r"metadata k nests arrays deeper than 4"),
    "value type": (RawGguf([("k", struct.pack("<IQ", 13, 0))]), r"metadata k has value type 13"),
    "element type": (RawGguf([("k", array_head(99, 0))]), r"metadata k has element type 99"),
    "duplicate key": (RawGguf([("k", text("a")), ("k", text("b"))]), r"metadata key k occurs twice"),
    "key with a newline": (RawGguf([("a\nb", text("x"))]), r"metadata key 'a\\nb' is not 1 to 65535 printable"),
    "key that is not UTF-8": (RawGguf([(b"\xff", text("x"))]), r"metadata key '\\udcff' is not"),
    "no dimension": (tensors(tensor_row("t", ())  + bytes(8)), r"tensor t has 0 dimensions"),
    "five dimensions": (tensors(tensor_row("t", (1,) * 5)), r"tensor t has 5 dimensions, not 1 to 4"),
    "2**32-1 dimensions": (tensors(tensor_row("t", (1,))[:9] + b"\xff" * 28), r"tensor t has 4294967295 dimensions"),
    "empty dimension": (tensors(tensor_row("t", (8, 0))), r"tensor t has shape \[8, 0\], with an empty dimension"),
    "overflow of the product": (tensors(tensor_row("t", (2**32, 2**32))), r"truncated: tensor t ends at byte 737869"),
    "overflow of one row": (tensors(tensor_row("t", (HUGE,))), r"truncated: tensor t ends at byte"),
    "offset beyond the end": (tensors(tensor_row("t", (8,), offset=64)), r"ends at byte \d+, the file has \d+"),
    "offset near 2**64": (tensors(tensor_row("t", (8,), offset=2**64 - 32)), r"truncated: tensor t"),
    "offset not aligned": (tensors(tensor_row("t", (8,), offset=4)), r"tensor t lies at offset 4, no multiple of 32"),
    "overlap": (tensors(tensor_row("a", (12,)), tensor_row("b", (8,), offset=32)), r"tensors a and b overlap"),
    "one range twice": (tensors(F32_8, tensor_row("u", (8,))), r"tensors t and u overlap"),
    "duplicate name": (tensors(F32_8, tensor_row("t", (8,), offset=32)), r"tensor t occurs twice"),
    "partial block": (tensors(tensor_row("t", (48,), 2)), r"tensor t: a Q4_0 row of 48 values"),
    "long name": (tensors(tensor_row("n" * 65, (8,))), r"tensor name 'n+' is not 1 to 64 printable characters"),
    "empty name": (tensors(tensor_row("", (8,)) + b" "), r"tensor name '' is not 1 to 64"),
    "alignment 0": (aligned(scalar("u32", 0)), r"general.alignment is not a power of two"),
    "alignment 48": (aligned(scalar("u32", 48)), r"general.alignment is not a power of two"),
    "alignment of a string": (aligned(text("32")), r"general.alignment is not a power of two"),
    "alignment beyond the file": (aligned(scalar("u64", HUGE)), r"truncated: tensor t ends at byte 92233720368547758"),
    "split.count of a string": (RawGguf([("split.count", text("2"))]), r"split.count is not a number"),
}  # fmt: skip

UNSUPPORTED = {
    "version 1": (RawGguf(version=1), r"is GGUF version 1; lamina reads versions 2 and 3"),
    "version 4": (RawGguf(version=4), r"is GGUF version 4"),
    "version 0": (RawGguf(version=0), r"is GGUF version 0"),
    "big-endian": (RawGguf(version=3 << 24), r"is big-endian GGUF"),
    "tensor type": (tensors(tensor_row("t", (8,), 9)), r"tensor t has tensor type id 9, which lamina does not know"),
}


@pytest.fixture
def save(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize(("raw", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_is_refused_cheaply(raw: RawGguf, message: str, save: Callable[[bytes], Path]) -> None:
    """P-15"""
    path = save(raw.to_bytes())
    tracemalloc.start()
    try:
        with pytest.raises(InvalidCheckpoint, match=message) as caught:
            read_gguf(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("raw", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_is_refused_by_name(raw: RawGguf, message: str, save: Callable[[bytes], Path]) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_gguf(save(raw.to_bytes()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGUF", "truncated: 4 bytes"),
        (b"GGUF\x03\0\0\0", "truncated .* tensor count .* 0 are left"),
        (b"\x89PNG\r\n", r"not a GGUF file \(it starts with b'\\x89PNG'\)"),
        (b"x", r"it starts with b'x'"),
        (struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}}', "looks like safetensors"),
        (b"PK\x03\x04" + bytes(30), "zip file, like a PyTorch checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"tjgg" + bytes(30), "format before GGUF"),
    ],
)
def test_what_is_not_gguf_is_named(content: bytes, message: str, save: Callable[[bytes], Path]) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        read_gguf(save(content))


def test_paths_that_hold_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "absent.gguf", "no such file"),
        (tmp_path, "is a directory"),
        (tmp_path / "pipe", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (Path("a\0b"), "NUL"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ):
        with pytest.raises(InvalidCheckpoint, match=message):
            read_gguf(path)


def test_many_small_values_are_bounded(save: Callable[[bytes], Path]) -> None:
    """P-15: 5 million one-byte values would cost 8 bytes each; the fifth million is refused."""
    million = array("u8", [0] * 1_000_000)
    path = save(RawGguf([(f"k{i}", million) for i in range(5)]).to_bytes())
    with pytest.raises(InvalidCheckpoint, match="arrays hold more than 4194304 values, at metadata k4"):
        read_gguf(path)


def test_truncation_at_every_byte_of_a_header(save: Callable[[bytes], Path]) -> None:
    raw = RawGguf(
        [("general.architecture", text("llama")), ("t", strings(["a", "bc"])), ("n", array("f32", [1, 2]))],
        [tensor_row("t", (8, 2)), tensor_row("u", (32,), 2, 64)],
        data_bytes=64 + 18,
    )
    content = raw.to_bytes()
    assert len(read_gguf(save(content)).tensors) == 2
    for length in range(len(content)):
        with pytest.raises(InvalidCheckpoint, match=r"truncated|is empty|not a GGUF file"):
            read_gguf(save(content[:length]))
