"""Models split over several files (B-43)."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from lamina.spec.digest import model_digest
from lamina.spec.errors import InvalidCheckpoint
from lamina.spec.gguf import read_gguf
from support.raw_gguf import RawGguf, scalar, tensor_row, text


def write_split(folder: Path, num_tensors: int = 5) -> list[Path]:
    """A model of `num_tensors` tensors, two per file, split by the gguf package."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=2)
    writer.add_name("whole")
    for index in range(num_tensors):
        writer.add_tensor(f"t{index}", np.full((2, 8 + index), index, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def write_part(path: Path, number: int, count: int, name: str, total: int = 2) -> None:
    entries = [
        ("general.architecture", text("llama")),
        ("split.no", scalar("u16", number)),
        ("split.count", scalar("u16", count)),
        ("split.tensors.count", scalar("i32", total)),
    ]
    path.write_bytes(RawGguf(entries, [tensor_row(name, (8,))], data_bytes=32).to_bytes())


def test_any_part_gives_the_whole(tmp_path: Path) -> None:
    """B-43"""
    paths = write_split(tmp_path)
    assert [path.name for path in paths] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    whole = read_gguf(paths[0])
    assert tuple(whole.tensors) == ("t0", "t1", "t2", "t3", "t4")
    assert [whole.tensors[f"t{n}"].file for n in range(5)] == [paths[n // 2] for n in range(5)]
    assert whole.metadata["general.name"] == "whole"
    assert whole.file_bytes == sum(path.stat().st_size for path in paths)
    assert [part.path for part in whole.parts] == paths
    for path in paths[1:]:
        other = read_gguf(path)
        assert dict(other.tensors) == dict(whole.tensors)
        assert (other.metadata, other.parts) == (whole.metadata, whole.parts)
        assert model_digest(other) == model_digest(whole)


def test_tensor_bytes_are_where_the_index_says(tmp_path: Path) -> None:
    """B-43"""
    for index, tensor in enumerate(read_gguf(write_split(tmp_path)[0]).tensors.values()):
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset_bytes)
            values = np.frombuffer(file.read(tensor.num_bytes), np.float32)
        assert values.tolist() == [index] * 2 * (8 + index)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    with pytest.raises(InvalidCheckpoint, match=r"m-00002-of-00003.gguf: this part of a model split into 3 files"):
        read_gguf(paths[2])


def test_a_renamed_part_says_what_its_name_should_be(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    renamed = paths[1].rename(tmp_path / "other.gguf")
    with pytest.raises(InvalidCheckpoint, match=r"part 2 of 3 .* rename it to NAME-00002-of-00003.gguf"):
        read_gguf(renamed)


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    shutil.copy(paths[0], paths[2])
    with pytest.raises(InvalidCheckpoint, match=r"00003.gguf: says it is part 1 of 3, expected 3 of 3"):
        read_gguf(paths[0])


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    for number in range(2):
        write_part(tmp_path / f"m-0000{number + 1}-of-00002.gguf", number, 2, "same")
    with pytest.raises(InvalidCheckpoint, match="tensor same occurs twice"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_a_wrong_total(tmp_path: Path) -> None:
    for number in range(2):
        write_part(tmp_path / f"m-0000{number + 1}-of-00002.gguf", number, 2, f"t{number}", total=3)
    with pytest.raises(InvalidCheckpoint, match="2 parts hold 2 tensors, expected 3"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_a_count_of_one_is_no_split(tmp_path: Path) -> None:
    write_part(tmp_path / "any-name.gguf", 0, 1, "t", total=1)
    assert tuple(read_gguf(tmp_path / "any-name.gguf").tensors) == ("t",)
