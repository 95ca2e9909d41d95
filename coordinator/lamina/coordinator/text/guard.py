"""Marks in strings from outside, so that nothing in them can become a control token.

Owns where a mark has to stand. Knows no template and no message. Has no state that changes.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lamina.spec.errors import InvalidRequest

_MAX_DEPTH = 64
# Characters without a meaning, then those of a private plane: one of them is always unused.
_MARK_CODES = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))


@dataclass(frozen=True, slots=True)
class Guard:
    """Where marks go, for one set of control token strings.

    `every_start` finds the characters that can start one, `every_whole` the first character of each that is complete.
    `heads` and `tails` are the proper prefixes and suffixes: a string that ends with a head or begins with a tail could
    become a control token together with its neighbour.
    """

    every_start: re.Pattern[str]
    every_whole: re.Pattern[str]
    heads: frozenset[str]
    tails: frozenset[str]
    singles: frozenset[str]
    longest: int

    @classmethod
    def against(cls, controls: Iterable[str]) -> "Guard":
        """The guard against `controls`, the strings of all control tokens."""
        known = sorted(filter(None, controls), key=len, reverse=True)
        never = r"(?!)"
        starts = "".join(sorted({re.escape(control[0]) for control in known}))
        wholes = "|".join(map(re.escape, known))
        return cls(
            every_start=re.compile(f"[{starts}]" if known else never),
            every_whole=re.compile(f"(?=(?:{wholes}))." if known else never, re.DOTALL),
            heads=frozenset(control[:end] for control in known for end in range(1, len(control))),
            tails=frozenset(control[start:] for control in known for start in range(1, len(control))),
            singles=frozenset(control for control in known if len(control) == 1),
            longest=max(map(len, known), default=0),
        )

    def is_harmless(self, text: str) -> bool:
        """Whether `text` needs no mark. Raises InvalidRequest for a control token that no mark can break."""
        for single in self.singles:
            if single in text:
                raise InvalidRequest(f"the character {single!a} is a control token of this model; leave it out")
        return not self.every_start.search(text) and not self._begins_with_tail(text)

    def mark_ends(self, text: str, mark: str) -> str:
        """`text` with a mark at an end where its neighbour could complete a control token."""
        before = mark if self._begins_with_tail(text) else ""
        after = mark if self._ends_with_head(text) else ""
        return before + text + after

    def _begins_with_tail(self, text: str) -> bool:
        return any(text[:length] in self.tails for length in range(1, self.longest))

    def _ends_with_head(self, text: str) -> bool:
        return any(text[-length:] in self.heads for length in range(1, self.longest))


def mark_inside(text: str, mark: str, where: re.Pattern[str]) -> str:
    """`text` with a mark after each match of `where`."""
    return where.sub(lambda found: found[0] + mark, text)


def unused_character(texts: Iterable[str]) -> str:
    """A character that occurs in none of `texts`."""
    used = frozenset(chain.from_iterable(texts))
    return next(char for char in map(chr, chain.from_iterable(_MARK_CODES)) if char not in used)


def strings_in(value: object) -> list[str]:
    """Every string in nested lists and mappings, keys included."""
    strings: list[str] = []

    def collect(string: str) -> str:
        strings.append(string)
        return string

    change_strings(value, collect, collect)
    return strings


def change_strings(value: Any, change: Callable[[str], str], change_key: Callable[[str], str], depth: int = 0) -> Any:
    """A copy of nested lists and mappings with all strings and keys changed. Raises InvalidRequest if too deep."""
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"the messages or tools nest deeper than {_MAX_DEPTH} levels; flatten them")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change_key(key) if isinstance(key, str) else key: change_strings(item, change, change_key, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [change_strings(item, change, change_key, depth + 1) for item in value]
    return value
