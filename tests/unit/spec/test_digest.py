"""The model digest: what enters it, against an independent computation of its definition."""

import hashlib
from pathlib import Path

import pytest

from lamina.spec.digest import model_digest
from lamina.spec.errors import InvalidCheckpoint
from lamina.spec.gguf import read_gguf
from support.models import smollm2_path
from support.raw_gguf import RawGguf, tensor_row, text

LARGE_BYTES = 12 << 20


def write_model(path: Path, name: str = "a", data_bytes: int = LARGE_BYTES) -> Path:
    raw = RawGguf([("general.name", text(name))], [tensor_row("t", (data_bytes // 4,))], data_bytes=data_bytes)
    path.write_bytes(raw.to_bytes())
    return path


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def digest_of(path: Path) -> str:
    return model_digest(read_gguf(path))


def test_smollm2_digest_by_its_definition() -> None:
    """design.md section 7: header with tensor table, file size, 64 KiB at 64 evenly spaced places."""
    model, content = read_gguf(smollm2_path()), smollm2_path().read_bytes()
    header, sample = model.header_bytes, 64 * 1024
    expected = header.to_bytes(8, "little") + len(content).to_bytes(8, "little") + content[:header]
    for place in range(64):
        start = (len(content) - sample) * place // 63
        expected += content[start : start + sample]
    assert model_digest(model) == hashlib.sha256(expected).hexdigest()


def test_path_does_not_enter(tmp_path: Path) -> None:
    assert digest_of(write_model(tmp_path / "x.gguf")) == digest_of(write_model(tmp_path / "y.gguf"))


def test_two_fine_tunes_of_one_shape_differ(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    before = digest_of(path)
    header_bytes, file_bytes = read_gguf(path).header_bytes, path.stat().st_size
    seen = {before}
    for offset in (header_bytes + 32, file_bytes // 63 * 30, file_bytes - 1):
        write_model(path)
        overwrite(path, offset, b"\x01")
        seen.add(digest_of(path))
    assert len(seen) == 4
    assert digest_of(write_model(path)) == before


def test_metadata_and_size_enter(tmp_path: Path) -> None:
    plain = digest_of(write_model(tmp_path / "a.gguf"))
    assert digest_of(write_model(tmp_path / "b.gguf", name="b")) != plain
    longer = write_model(tmp_path / "c.gguf")
    with longer.open("ab") as file:
        file.write(bytes(1))
    assert digest_of(longer) != plain


@pytest.mark.parametrize("offset", range(0, 2 << 20, 200_003))
def test_a_small_file_is_hashed_whole(offset: int, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", data_bytes=2 << 20)
    before, header_bytes = digest_of(path), read_gguf(path).header_bytes
    overwrite(path, header_bytes + 64 + offset, b"\x01")
    assert digest_of(path) != before


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    model = read_gguf(path)
    with path.open("r+b") as file:
        file.truncate(LARGE_BYTES // 2)
    with pytest.raises(InvalidCheckpoint, match="is shorter than when its header was read"):
        model_digest(model)
    path.unlink()
    with pytest.raises(InvalidCheckpoint, match="cannot be read"):
        model_digest(model)
