"""JSON schemas to llguidance grammars, checked here so that a schema nobody can follow is refused with the request.

The matcher itself runs beside the sampler, on the last stage. Building and checking a grammar takes from a millisecond
to a second and lets go of the interpreter: call it from a thread. Results are kept, since clients repeat their schemas.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import llguidance

from lamina.spec.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON allows any amount of white space anywhere, and a small model may never leave it. Enough for an indented document.
_WHITE_SPACE = "[ \\t\\n]{1,16}"
# OpenAI takes 120,000 characters of names and values. Compiling takes the last stage some seconds per MiB, and
# its steps wait if a prompt is done before that.
_MAX_CHARACTERS = 2**18


def json_object_grammar() -> str:
    """Any JSON object."""
    return schema_grammar({"type": "object"})


def schema_grammar(schema: Mapping[str, object]) -> str:
    """A document that `schema` accepts. Raises InvalidRequest for a schema that is wrong or cannot be enforced."""
    return _schema_grammar(_bounded(json.dumps(schema), "the JSON schema"))


def lark_grammar(source: str) -> str:
    """A grammar in llguidance's Lark dialect. Raises InvalidRequest if a schema in it is wrong."""
    what = "the tools' parameters"
    return _checked(_bounded(source, what), what)


def embedded_schema(schema: Mapping[str, object], *, strict: bool) -> str:
    """A rule body for `lark_grammar`. What the schema says beyond what can be enforced is refused only if `strict`."""
    own = schema.get("x-guidance")
    options = {**(own if isinstance(own, Mapping) else {}), "whitespace_pattern": _WHITE_SPACE, "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


@lru_cache(maxsize=64)
def _schema_grammar(schema: str) -> str:
    overrides: JsonCompileOptions = {"whitespace_pattern": _WHITE_SPACE}
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
    except ValueError as error:  # its own reader of JSON takes less than Python's: depth, large numbers, surrogates
        raise InvalidRequest(f"the JSON schema cannot be enforced: {error}") from None
    return _checked(grammar, "the JSON schema")


def _bounded(source: str, what: str) -> str:
    if len(source) > _MAX_CHARACTERS:
        raise InvalidRequest(
            f"{what} cannot be enforced: {len(source)} characters, at most {_MAX_CHARACTERS} are taken"
        )
    return source


@lru_cache(maxsize=64)
def _checked(grammar: str, what: str) -> str:
    is_error, reasons = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        reason = reasons[0].strip().split("\n", 1)[0][:300]
        raise InvalidRequest(f"{what} cannot be enforced: {reason}")
    return grammar
