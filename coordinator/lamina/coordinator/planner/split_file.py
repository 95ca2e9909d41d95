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

from lamina.coordinator.yaml_file import line_of, read_yaml_node
from lamina.spec.address import Address, parse_address
from lamina.spec.errors import InvalidConfig, InvalidSplit, LaminaError
from lamina.spec.model import LayerRange


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
    root = read_yaml_node(path, "split file")
    return tuple(_read_entry(path, node) for node in _worker_nodes(path, root))


def _worker_nodes(path: Path, root: yaml.Node | None) -> list[yaml.Node]:
    if root is None:
        raise InvalidConfig(f"{path}:1: the file is empty; it needs a list `workers`")
    for key, value in _fields(path, root, ("workers",)).items():
        if key == "workers" and isinstance(value, yaml.SequenceNode) and value.value:
            return list(value.value)
    raise InvalidConfig(f"{path}:{line_of(root)}: `workers` must be a list with at least one entry")


def _read_entry(path: Path, node: yaml.Node) -> SplitEntry:
    fields = _fields(path, node, ("address", "device", "layers"))
    texts: dict[str, str] = {}
    for key, value in fields.items():
        if not isinstance(value, yaml.ScalarNode):
            raise InvalidConfig(f"{path}:{line_of(value)}: `{key}` must be a single value")
        texts[key] = value.value
    for key in ("address", "layers"):
        if key not in texts:
            raise InvalidConfig(f"{path}:{line_of(node)}: the worker has no `{key}`")
    try:
        address = parse_address(texts["address"])
        layers = LayerRange.parse(texts["layers"])
    except LaminaError as error:
        bad = "address" if not isinstance(error, InvalidSplit) else "layers"
        raise InvalidConfig(f"{path}:{line_of(fields[bad])}: {error}") from None
    device = texts.get("device", "0")
    if not re.fullmatch(r"[0-9]{1,4}", device):
        raise InvalidConfig(f"{path}:{line_of(fields['device'])}: device {device!r} is not a number")
    return SplitEntry(address, int(device), layers, line_of(node))


def _fields(path: Path, node: yaml.Node, allowed: tuple[str, ...]) -> dict[str, yaml.Node]:
    """The fields of a mapping; raises InvalidConfig for another kind of node, unknown or repeated keys."""
    if not isinstance(node, yaml.MappingNode):
        raise InvalidConfig(f"{path}:{line_of(node)}: a mapping with {', '.join(allowed)} is expected here")
    fields: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.value not in allowed:
            raise InvalidConfig(f"{path}:{line_of(key)}: unknown key {key.value!r}; known: {', '.join(allowed)}")
        if key.value in fields:
            raise InvalidConfig(f"{path}:{line_of(key)}: {key.value!r} is given twice")
        fields[key.value] = value
    return fields
