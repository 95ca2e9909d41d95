"""Typed access to GGUF metadata: a value of the right kind, or an error that names file and key.

Knows nothing of what a key means.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from lamina.spec.errors import InvalidCheckpoint
from lamina.spec.gguf import MetadataValue


class Metadata:
    """The metadata of one file. Methods return `default` for an absent key; without one, absence is an error.

    All raise InvalidCheckpoint.
    """

    def __init__(self, values: Mapping[str, MetadataValue], path: Path) -> None:
        self._values = values
        self.path = path

    def fail(self, problem: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self.path}: {problem}")

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def _get(self, key: str) -> MetadataValue:
        try:
            return self._values[key]
        except KeyError:
            raise self.fail(f"metadata has no {key}, which this model needs") from None

    def text(self, key: str, default: str | None = None) -> str:
        if key not in self._values and default is not None:
            return default
        value = self._get(key)
        if not isinstance(value, str):
            raise self.fail(f"{key} must be a string, is {_shown(value)}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 up."""
        if key not in self._values and default is not None:
            return default
        return self._count(key, self._get(key))

    def counts(self, key: str, length: int, default: int | None = None) -> tuple[int, ...]:
        """`length` whole numbers from 1 up, from an array of so many or from one number for all."""
        if key not in self._values and default is not None:
            return (default,) * length
        value = self._get(key)
        if not isinstance(value, tuple):
            return (self._count(key, value),) * length
        if len(value) != length:
            raise self.fail(f"{key} has {len(value)} values for {length} layers")
        return tuple(self._count(key, item) for item in value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, is {_shown(value)}")
        return value

    def flags(self, key: str, length: int) -> tuple[bool, ...] | None:
        """`length` booleans; None where the key is absent or no array."""
        value = self._values.get(key)
        if not isinstance(value, tuple):
            return None
        flags = tuple(item for item in value if isinstance(item, bool))
        if len(flags) != length or len(value) != length:
            raise self.fail(f"{key} must be {length} booleans, is {_shown(value)}")
        return flags

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        if key not in self._values and default is not None:
            return default
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.fail(f"{key} must be a number above 0, is {_shown(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0; None if the key is absent or 0, which switches a feature off."""
        return self.number(key) if self._values.get(key, 0) != 0 else None

    def _count(self, key: str, value: MetadataValue) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key} must be a whole number above 0, is {_shown(value)}")
        return value


def _shown(value: MetadataValue) -> str:
    return f"an array of {len(value)}" if isinstance(value, tuple) else f"{value!r:.60}"
