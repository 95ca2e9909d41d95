"""Finding and opening a model file on this machine, and proving that it is the one the coordinator means."""

import logging
from dataclasses import dataclass
from pathlib import Path

from lamina.spec.digest import model_digest
from lamina.spec.errors import InvalidCheckpoint
from lamina.spec.families import model_spec
from lamina.spec.gguf import GgufFile, NotGguf, read_gguf
from lamina.spec.model import ModelSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model file with its description."""

    file: GgufFile
    spec: ModelSpec


def find_model(path: str, folders: tuple[Path, ...]) -> Path:
    """The file of that name in one of the worker's own folders, or the path as given, if it leads into one.

    A worker without folders opens any path. Raises InvalidCheckpoint naming all places looked at.
    """
    given = Path(path)
    places = [folder / given.name for folder in folders]
    if not folders or _leads_into(given, folders):
        places.append(given)
    for place in places:
        if _is_file(place):
            return place
    tried = ", ".join(str(place) for place in places)
    raise InvalidCheckpoint(f"model file not found here (tried {tried}); copy it, or name its folder with --models")


def _leads_into(path: Path, folders: tuple[Path, ...]) -> bool:
    """Whether the path's own folder, links resolved, is one of these or below. What the file links to may lie anywhere:
    who put it there meant it."""
    try:
        parent = path.parent.resolve()
        return any(parent.is_relative_to(folder.resolve()) for folder in folders)
    except (OSError, RuntimeError, ValueError):  # too long a name, links in a circle, a NUL
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long or holds a NUL, a folder that may not be looked into
        return False


def open_model(path: Path, expected_digest: str) -> OpenedModel:
    """Read the header and compare the digest. Raises InvalidCheckpoint if it is another file, UnsupportedModel.

    What is raised goes to whoever named the path, so nothing of a file that is no model may be in it.
    """
    try:
        file = read_gguf(path)
    except NotGguf as error:
        _log.warning("%s", error)
        raise InvalidCheckpoint(f"{path}: is not a GGUF file") from None
    digest = model_digest(file)
    if digest != expected_digest:
        raise InvalidCheckpoint(
            f"{path} is not the coordinator's model: its digest is {digest[:12]}, {expected_digest[:12]!r} is wanted"
        )
    return OpenedModel(file, model_spec(file, digest))
