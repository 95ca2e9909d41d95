"""YAML files of users, read to nodes that know their lines, so that every complaint can name one.

Owns reading; what the nodes should say is known by those who ask for them.
"""

from pathlib import Path
from typing import Any

import yaml

from lamina.spec.errors import InvalidConfig

_MAX_FILE_BYTES = 2**20
_MAX_DEPTH = 32  # PyYAML composes recursively; no file of ours has more than a few levels


def read_yaml_node(path: Path, what: str) -> yaml.Node | None:
    """The root of a file, None if it says nothing. Raises InvalidConfig with file and line; `what` it should be."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidConfig(f"{path}: larger than {_MAX_FILE_BYTES} bytes, this is no {what}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise InvalidConfig(f"{path}: cannot be read as a {what}: {cause}; check the path") from None
    try:
        _check_depth(path, text, what)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        line = _line(getattr(error, "problem_mark", None))
        raise InvalidConfig(f"{path}:{line}: not valid YAML: {getattr(error, 'problem', error)}") from None


def line_of(node: yaml.Node) -> int:
    """Where a node begins, from 1."""
    return _line(node.start_mark)


def _line(mark: Any) -> int:
    """Of a mark of either of PyYAML's parsers, from 1; the first where they do not know."""
    return mark.line + 1 if mark is not None else 1


def _check_depth(path: Path, text: str, what: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            line = _line(event.start_mark)
            raise InvalidConfig(f"{path}:{line}: nested deeper than {_MAX_DEPTH} levels, this is no {what}")
