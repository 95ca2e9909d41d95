"""Finding and opening a model file on this machine, and proving that it is the one the coordinator means."""

from dataclasses import dataclass
from pathlib import Path

from lamina.spec.digest import model_digest
from lamina.spec.errors import InvalidCheckpoint
from lamina.spec.families import model_spec
from lamina.spec.gguf import GgufFile, read_gguf
from lamina.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model file with its description."""

    file: GgufFile
    spec: ModelSpec


def find_model(path: str, folders: tuple[Path, ...]) -> Path:
    """The file of that name in one of the worker's own folders, else the path as given.

    Raises InvalidCheckpoint naming all places looked at.
    """
    given = Path(path)
    places = [folder / given.name for folder in folders] + [given]
    for place in places:
        if _is_file(place):
            return place
    tried = ", ".join(str(place) for place in places)
    raise InvalidCheckpoint(f"model file not found here (tried {tried}); copy it, or name its folder with --models")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a folder that may not be looked into
        return False


def open_model(path: Path, expected_digest: str) -> OpenedModel:
    """Read the header and compare the digest. Raises InvalidCheckpoint if it is another file, UnsupportedModel."""
    file = read_gguf(path)
    digest = model_digest(file)
    if digest != expected_digest:
        raise InvalidCheckpoint(
            f"{path} is not the coordinator's model: its digest is {digest[:12]}, {expected_digest[:12]!r} is wanted"
        )
    return OpenedModel(file, model_spec(file, digest))
