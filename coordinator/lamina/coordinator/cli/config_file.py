"""`--config FILE`: one YAML file for everything that a flag can say. Flags win over the environment, that over it.

Keys are the long names of options (and of arguments), with - or _; lists become comma-separated values. A key of
another command is fine, so that one file serves all; a key of none is an error with its line.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from lamina.coordinator.yaml_file import line_of, read_yaml_node
from lamina.spec.errors import InvalidConfig

_CONSTRUCTED_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float"))
Scalar = str | int | float | bool | None


def _apply(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the command that is being parsed."""
    if path is not None:
        own, others = _parameter_names(context.command), _all_names(context.find_root().command)
        values: dict[str, Any] = {}
        for key, (line, value) in read_config(path).items():
            name = key.replace("-", "_")
            if name in own:
                values[own[name]] = value
            elif name not in others:
                raise InvalidConfig(f"{path}:{line}: unknown key {key!r}; keys are the long names of options")
        context.default_map = {**(context.default_map or {}), **values}
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with values for options; flags and the environment win over it.",
        envvar="LAMINA_CONFIG",
        callback=_apply,
        is_eager=True,
        show_default=False,
    ),
]


def read_config(path: Path) -> dict[str, tuple[int, Scalar]]:
    """(line, value) by key. Raises InvalidConfig that names file and line."""
    root = read_yaml_node(path, "configuration")
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise InvalidConfig(f"{path}:{line_of(root)}: must be `key: value` lines")
    values: dict[str, tuple[int, Scalar]] = {}
    for key_node, value_node in root.value:
        key = str(key_node.value)
        if key in values:
            raise InvalidConfig(f"{path}:{line_of(key_node)}: {key!r} is given twice, first in line {values[key][0]}")
        values[key] = (line_of(key_node), _read_value(path, key, value_node))
    return values


def _read_value(path: Path, key: str, node: yaml.Node) -> Scalar:
    if isinstance(node, yaml.ScalarNode):
        return _construct(path, key, node)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return ",".join(str(item.value) for item in node.value)
    raise InvalidConfig(f"{path}:{line_of(node)}: the value of {key!r} must be a single value or a list of them")


def _construct(path: Path, key: str, node: yaml.ScalarNode) -> Scalar:
    """Numbers and truth values as such; anything else (dates, too) as it is written."""
    if node.tag not in _CONSTRUCTED_TAGS:
        return str(node.value)
    try:
        value: Scalar = yaml.SafeLoader("").construct_object(node)
    except (ValueError, KeyError):  # `!!int abc`
        raise InvalidConfig(f"{path}:{line_of(node)}: the value of {key!r} is not what its tag says") from None
    return value


def _parameter_names(command: Any) -> dict[str, str]:
    """Parameter by key, the first long name: `json` is as_json. Of a command of typer's, whose base is not public."""
    named = (parameter for parameter in command.params if parameter.name)
    return {parameter.opts[0].removeprefix("--").replace("-", "_"): parameter.name for parameter in named}


def _all_names(command: Any) -> set[str]:
    groups = getattr(command, "commands", None)
    if groups is None:
        return set(_parameter_names(command))
    return set().union(*(_all_names(each) for each in groups.values()))
