"""The manual split: `--split 0-11,12-29`, or a YAML file of workers and their layers. Obeyed or refused.

workers:
  - address: 127.0.0.1:50051
    layers: 0-11
  - address: 127.0.0.1:50052
    device: 0          # optional, the worker's first device by default
    layers: 12-29
"""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from lamina.spec.address import Address, parse_address
from lamina.spec.errors import InvalidConfig, InvalidSplit, LaminaError
from lamina.spec.model import LayerRange

_MAX_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class SplitEntry:
    """One worker and its layers; `line` in the file, for messages."""

    address: Address
    device: int
    layers: LayerRange
    line: int


def parse_split(text: str) -> tuple[LayerRange, ...]:
    """Ranges of `0-11,12-29`. Raises InvalidSplit."""
    return tuple(LayerRange.parse(part) for part in text.split(","))


def read_split_file(path: Path) -> tuple[SplitEntry, ...]:
    """The entries in order. Raises InvalidConfig naming file, line and what is wrong there."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidConfig(f"{path}: larger than {_MAX_FILE_BYTES} bytes, this is no split file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: cannot be read as a split file: {error}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise InvalidConfig(f"{path}:{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    except RecursionError:
        raise InvalidConfig(f"{path}: nested too deeply for a split file") from None
    return tuple(_read_entry(path, node) for node in _worker_nodes(path, root))


def _worker_nodes(path: Path, root: yaml.Node | None) -> list[yaml.Node]:
    if root is None:
        raise InvalidConfig(f"{path}:1: the file is empty; it needs a list `workers`")
    for key, value in _fields(path, root, ("workers",)).items():
        if key == "workers" and isinstance(value, yaml.SequenceNode) and value.value:
            return list(value.value)
    raise InvalidConfig(f"{path}:{_line(root)}: `workers` must be a list with at least one entry")


def _read_entry(path: Path, node: yaml.Node) -> SplitEntry:
    fields = _fields(path, node, ("address", "device", "layers"))
    texts: dict[str, str] = {}
    for key, value in fields.items():
        if not isinstance(value, yaml.ScalarNode):
            raise InvalidConfig(f"{path}:{_line(value)}: `{key}` must be a single value")
        texts[key] = value.value
    for key in ("address", "layers"):
        if key not in texts:
            raise InvalidConfig(f"{path}:{_line(node)}: the worker has no `{key}`")
    try:
        address = parse_address(texts["address"])
        layers = LayerRange.parse(texts["layers"])
    except LaminaError as error:
        bad = "address" if not isinstance(error, InvalidSplit) else "layers"
        raise InvalidConfig(f"{path}:{_line(fields[bad])}: {error}") from None
    device = texts.get("device", "0")
    if not re.fullmatch(r"[0-9]{1,4}", device):
        raise InvalidConfig(f"{path}:{_line(fields['device'])}: device {device!r} is not a number")
    return SplitEntry(address, int(device), layers, _line(node))


def _fields(path: Path, node: yaml.Node, allowed: tuple[str, ...]) -> dict[str, yaml.Node]:
    """The fields of a mapping; raises InvalidConfig for another kind of node, unknown or repeated keys."""
    if not isinstance(node, yaml.MappingNode):
        raise InvalidConfig(f"{path}:{_line(node)}: a mapping with {', '.join(allowed)} is expected here")
    fields: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.value not in allowed:
            raise InvalidConfig(f"{path}:{_line(key)}: unknown key {key.value!r}; known: {', '.join(allowed)}")
        if key.value in fields:
            raise InvalidConfig(f"{path}:{_line(key)}: {key.value!r} is given twice")
        fields[key.value] = value
    return fields


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
