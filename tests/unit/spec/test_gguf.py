"""The GGUF reader against the gguf package, on the real model and on generated files."""

import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from lamina.spec.errors import InvalidCheckpoint
from lamina.spec.gguf import ReadLimits, read_gguf
from lamina.spec.quant import GgmlType
from support.models import smollm2_path
from support.raw_gguf import RawGguf, array, scalar, strings, tensor_row, text
from support.tiny import ALL_TYPES, write_tiny_llama


def plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def assert_same_as_gguf_package(path: Path) -> None:
    ours, oracle = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: field for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        assert ours.metadata[key] == plain(field.contents()), key
    assert ours.version == oracle.fields["GGUF.version"].contents()
    assert tuple(ours.tensors) == tuple(tensor.name for tensor in oracle.tensors)
    for tensor in oracle.tensors:
        info = ours.tensors[tensor.name]
        assert (info.type.value, info.shape) == (tensor.tensor_type.value, tuple(tensor.shape))
        assert (info.offset_bytes, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.file == path


def test_smollm2_reads_as_the_gguf_package_reads_it() -> None:
    assert_same_as_gguf_package(smollm2_path())


def test_smollm2_figures() -> None:
    model = read_gguf(smollm2_path())
    assert (model.version, model.file_bytes, len(model.tensors)) == (3, 98_362_432, 272)
    assert model.header_bytes <= model.tensors["token_embd.weight"].offset_bytes < model.header_bytes + 32
    last = max(model.tensors.values(), key=lambda tensor: tensor.offset_bytes)
    assert last.offset_bytes + last.num_bytes == model.file_bytes
    embedding = model.tensors["token_embd.weight"]
    assert (embedding.cols, embedding.rows, embedding.type) == (576, 49152, GgmlType.Q8_0)
    assert embedding.num_bytes == 49152 * (576 // 32) * 34


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_tiny_models_of_every_type(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    assert_same_as_gguf_package(write_tiny_llama(tmp_path / "m.gguf", matrix_type=kind, layers=1))


def test_every_kind_of_metadata_value(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.1, "float64": 0.1, "bool": True, "string": "Ġé\n",
    }.items():  # fmt: skip
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.floats", [0.5, -1e30])
    writer.add_array("x.bools", [True, False])
    writer.add_array("x.strings", ["a", "", "ü" * 100])
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_as_gguf_package(path)
    metadata = read_gguf(path).metadata
    assert metadata["x.float32"] == float(np.float32(0.1))
    assert metadata["x.uint64"] == 2**64 - 1
    assert metadata["x.bools"] == (True, False)
    assert type(metadata["x.bool"]) is bool


@pytest.fixture
def save(tmp_path: Path) -> Callable[[RawGguf], Path]:
    def write(raw: RawGguf) -> Path:
        path = tmp_path / "m.gguf"
        path.write_bytes(raw.to_bytes())
        return path

    return write


def test_strings_that_are_not_utf8_survive(save: Callable[[RawGguf], Path]) -> None:
    tokens = [b"ok", b"\xff\xfe", b"\xe2\x82", b"\xed\xa0\x80", "€".encode(), bytes(range(256))]
    model = read_gguf(save(RawGguf([("tokenizer.ggml.tokens", strings(tokens))])))
    found = model.metadata["tokenizer.ggml.tokens"]
    assert isinstance(found, tuple)
    assert [str(token).encode("utf-8", "surrogateescape") for token in found] == tokens


def test_version_2_empty_arrays_and_nested_arrays(save: Callable[[RawGguf], Path]) -> None:
    nested = array("u8", [1, 2])[4:] + array("i16", [-3])[4:]
    outer = b"\x09\0\0\0" + b"\x09\0\0\0" + (2).to_bytes(8, "little") + nested
    model = read_gguf(save(RawGguf([("e", array("u32", [])), ("s", strings([])), ("n", outer)], version=2)))
    assert model.version == 2
    assert dict(model.metadata) == {"e": (), "s": (), "n": ((1, 2), (-3,))}


def test_a_custom_alignment_moves_the_data(save: Callable[[RawGguf], Path]) -> None:
    raw = RawGguf(
        [("general.alignment", scalar("u32", 4096))],
        [tensor_row("a", (8,)), tensor_row("b", (2, 3, 4, 5), 1, 4096)],
        data_bytes=4096 + 240,
        alignment=4096,
    )
    tensors = read_gguf(save(raw)).tensors
    assert (tensors["a"].offset_bytes, tensors["a"].num_bytes) == (4096, 32)
    assert (tensors["b"].offset_bytes, tensors["b"].num_bytes) == (8192, 2 * 120)
    assert (tensors["b"].cols, tensors["b"].rows) == (2, 60)
    assert sum(tensors[name].num_bytes for name in tensors) == 272
    assert str(tensors["b"]) == "b F16 [2, 3, 4, 5]"


def test_the_tensor_index_is_a_mapping(save: Callable[[RawGguf], Path]) -> None:
    tensors = read_gguf(save(RawGguf(rows=[tensor_row("a", (8,))], data_bytes=32))).tensors
    assert "a" in tensors
    assert "b" not in tensors
    assert tensors.get("b") is None
    assert tensors.get("a") is tensors["a"]
    with pytest.raises(InvalidCheckpoint, match="no tensor b"):
        tensors["b"]


def test_reading_reads_the_header_only(save: Callable[[RawGguf], Path]) -> None:
    """B-43: a file of 1 TiB (sparse) costs what its header costs."""
    size = 1 << 40
    path = save(RawGguf(rows=[tensor_row("t", (size // 4,))]))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size)
    start = time.perf_counter()
    assert read_gguf(path).tensors["t"].num_bytes == size
    assert time.perf_counter() - start < 1


def test_a_large_vocabulary_is_read_fast(save: Callable[[RawGguf], Path]) -> None:
    tokens = [f"token{i}" for i in range(150_000)]
    raw = RawGguf([
        ("tokenizer.ggml.tokens", strings(tokens)),
        ("tokenizer.ggml.scores", array("f32", range(150_000))),
        ("tokenizer.ggml.token_type", array("i32", [1] * 150_000)),
        ("tokenizer.ggml.merges", strings([f"a b{i}" for i in range(280_000)])),
    ])  # fmt: skip
    path = save(raw)
    start = time.process_time()
    metadata = read_gguf(path).metadata
    elapsed_s = time.process_time() - start
    assert metadata["tokenizer.ggml.tokens"] == tuple(tokens)
    assert elapsed_s < 2


def test_limits_are_configurable(save: Callable[[RawGguf], Path]) -> None:
    """P-15: what a header may cost is bounded by numbers that a caller can lower."""
    path = save(RawGguf([("a", text("x" * (3 << 20))), ("b", array("u8", [1] * 100))]))
    assert read_gguf(path).header_bytes > 3 << 20
    with pytest.raises(InvalidCheckpoint, match=r"exceeds the limit of 2097152 bytes at metadata a"):
        read_gguf(path, ReadLimits(max_header_bytes=2 << 20))
    with pytest.raises(InvalidCheckpoint, match=r"more than 99 values, at metadata b"):
        read_gguf(path, ReadLimits(max_array_values=99))
    with pytest.raises(InvalidCheckpoint, match=r"claims 2 entries in the metadata, the limit is 1"):
        read_gguf(path, ReadLimits(max_table_entries=1))
