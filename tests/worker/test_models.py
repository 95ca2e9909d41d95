"""Which files a worker opens when a coordinator names a path, and what it says of the others."""

from pathlib import Path

import pytest

from lamina.rpc_worker.models import find_model, open_model
from lamina.spec.errors import InvalidCheckpoint


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a.gguf, sub/b.gguf and a link to a blob beside the folder, which also has secret.gguf."""
    folder = tmp_path / "models"
    (folder / "sub").mkdir(parents=True)
    for place in ("models/a.gguf", "models/sub/b.gguf", "blob", "secret.gguf"):
        (tmp_path / place).write_bytes(b"root:x:0")
    (folder / "linked.gguf").symlink_to(tmp_path / "blob")
    (tmp_path / "elsewhere").symlink_to(folder)
    return folder


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("/nowhere/a.gguf", "a.gguf"),
        ("a.gguf", "a.gguf"),
        ("/nowhere/linked.gguf", "linked.gguf"),
        ("{}/sub/b.gguf", "sub/b.gguf"),
        ("{}/../elsewhere/sub/b.gguf", "sub/b.gguf"),
    ],
)
def test_files_of_its_own_folders(models: Path, named: str, found: str) -> None:
    path = find_model(named.format(models), (models.parent / "other", models))
    assert path.resolve() == (models / found).resolve()


@pytest.mark.parametrize("named", ["{}/../secret.gguf", "{}/sub/../../secret.gguf", "{0.parent}/secret.gguf", "{}/.."])
def test_nothing_outside_of_them(models: Path, named: str) -> None:
    """It is refused like a file that is not there, and found by a worker that was given no folders."""
    path = named.format(models)
    with pytest.raises(InvalidCheckpoint, match="model file not found here") as there:
        find_model(path, (models,))
    (models.parent / "secret.gguf").unlink()
    with pytest.raises(InvalidCheckpoint) as absent:
        find_model(path, (models,))
    assert str(there.value) == str(absent.value)


def test_without_folders_any_path(models: Path) -> None:
    assert find_model(f"{models}/../secret.gguf", ()) == models / "../secret.gguf"


@pytest.mark.parametrize("content", [b"root:x:0", b"PK\x03\x04", b"12345678{", b"vers"])
def test_a_refusal_holds_nothing_of_the_file(tmp_path: Path, content: bytes) -> None:
    """Whoever reaches the port may name any path: what begins like what must stay here, and in the worker's log."""
    path = tmp_path / "shadow"
    path.write_bytes(content)
    with pytest.raises(InvalidCheckpoint) as refused:
        open_model(path, "0" * 64)
    assert str(refused.value) == f"{path}: is not a GGUF file"
    assert refused.value.__cause__ is None
