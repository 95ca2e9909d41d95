"""JSON schemas to llguidance grammars, checked here so that a schema nobody can follow is refused with the request.

The matcher itself runs beside the sampler, on the last stage. Building and checking a grammar takes from a millisecond
to a second and lets go of the interpreter: call it from a thread. Results are kept, since clients repeat their schemas.
What would take far longer, and cannot be stopped once it has begun, is refused by its numbers.
"""

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

import llguidance

from lamina.spec.errors import InvalidRequest
from lamina.spec.grammars import MAX_CHARACTERS

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON allows any amount of white space anywhere, and a small model may never leave it. Enough for an indented document.
_WHITE_SPACE = "[ \\t\\n]{1,16}"
_MAX_PATTERNS = 100  # patternProperties in all: each pair is compared, at some 0.1 ms
# multipleOf takes a state, some 10 us, for each remainder of its odd part (that without factors of 2 and 5, which cost
# nothing in decimal), and where several meet, of their least common multiple. So much for one place, and for all.
_MAX_DIVISOR = 10_000
_MAX_DIVISORS = 100_000
_MOST_BITS = 1024  # of a number that the compiler reads


def json_object_grammar() -> str:
    """Any JSON object."""
    return schema_grammar({"type": "object"})


def schema_grammar(schema: Mapping[str, object]) -> str:
    """A document that `schema` accepts. Raises InvalidRequest for a schema that is wrong or cannot be enforced."""
    source = _bounded(json.dumps(schema), "the JSON schema")
    _check_costs(schema)
    return _schema_grammar(source)


def lark_grammar(source: str) -> str:
    """A grammar in llguidance's Lark dialect. Raises InvalidRequest if a schema in it is wrong."""
    what = "the tools' parameters"
    return _checked(_bounded(source, what), what)


def embedded_schema(schema: Mapping[str, object], *, strict: bool) -> str:
    """A rule body for `lark_grammar`. What the schema says beyond what can be enforced is refused only if `strict`.

    Raises InvalidRequest for what would take too long.
    """
    own = schema.get("x-guidance")
    options = {**(own if isinstance(own, Mapping) else {}), "whitespace_pattern": _WHITE_SPACE, "lenient": not strict}
    source = _bounded(json.dumps({**schema, "x-guidance": options}), "the JSON schema")
    _check_costs(schema)
    return f"%json {source}"


@lru_cache(maxsize=64)
def _schema_grammar(schema: str) -> str:
    overrides: JsonCompileOptions = {"whitespace_pattern": _WHITE_SPACE}
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
    except ValueError as error:  # its own reader of JSON takes less than Python's: depth, large numbers, surrogates
        raise InvalidRequest(f"the JSON schema cannot be enforced: {error}") from None
    return _checked(grammar, "the JSON schema")


def _check_costs(schema: Mapping[str, object]) -> None:
    """Raise InvalidRequest for the two keywords whose cost grows out of all proportion to their length.

    It must not become what it guards against: a multiple of many large divisors takes seconds, and the interpreter.
    """
    num_patterns, multiple, total = 0, 1, 0
    for key, value in _entries(schema):
        if key == "patternProperties" and isinstance(value, Mapping):
            num_patterns += len(value)
        elif key == "multipleOf" and isinstance(value, int | float):
            divisor = _odd_part(value)
            multiple, total = math.lcm(multiple, divisor), total + abs(divisor)
            if multiple > _MAX_DIVISOR or total > _MAX_DIVISORS:
                raise InvalidRequest(
                    "the JSON schema cannot be enforced: multipleOf takes too many states; use smaller or rounder"
                    " divisors: without factors of 2 and 5 their least common multiple may be"
                    f" {_MAX_DIVISOR}, their sum {_MAX_DIVISORS}"
                )
    if num_patterns > _MAX_PATTERNS:
        raise InvalidRequest(
            f"the JSON schema cannot be enforced: {num_patterns} patternProperties, at most {_MAX_PATTERNS} are taken"
        )


def _entries(schema: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Every key and value at any depth."""
    stack: list[object] = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            yield from node.items()
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _odd_part(value: float) -> int:
    """Of the number's digits, if they are not too many; 1 for what the compiler refuses, zero and infinite ones."""
    if isinstance(value, float):
        value = int("".join(map(str, Decimal(str(value)).as_tuple().digits)) or 0)
    part = value or 1
    if part.bit_length() > _MOST_BITS:
        return part
    for factor in (2, 5):
        while part % factor == 0:
            part //= factor
    return part


def _bounded(source: str, what: str) -> str:
    if len(source) > MAX_CHARACTERS:
        raise InvalidRequest(f"{what} cannot be enforced: {len(source)} characters, at most {MAX_CHARACTERS} are taken")
    return source


@lru_cache(maxsize=64)
def _checked(grammar: str, what: str) -> str:
    is_error, reasons = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        reason = reasons[0].strip().split("\n", 1)[0][:300]
        raise InvalidRequest(f"{what} cannot be enforced: {reason}")
    return grammar
