"""The parameters of OpenAI's requests: types, ranges, what is not supported. Nothing is dropped silently.

Pydantic stays at this edge; what comes out is checked and plain. Knows no engine.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lamina.coordinator.api.errors import ApiError

MAX_CHOICES = 64
MAX_STOPS = 16

# Parameters of the API that this server lacks, with the values that ask for nothing. Any may be null.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
# Names for the caller's own records: they change no answer.
_IGNORED = frozenset(("user", "metadata", "safety_identifier", "prompt_cache_key"))

Body = TypeVar("Body", bound="Parameters")
StopStrings = str | Annotated[list[str], Field(max_length=MAX_STOPS)]


class Parameters(BaseModel):
    """A request body: types are taken literally, unknown names are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Parameters):
    """What a stream says beside its deltas."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis, for OpenAI's own network


class GenerationParameters(Parameters):
    """What chat and text completions share. Ranges of the sampler's own are checked by SamplingParams."""

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopStrings | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_window: int | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None


class ChatParameters(GenerationParameters):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class CompletionParameters(GenerationParameters):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = None


class TokenizeParameters(Parameters):
    """Body of /tokenize: `content` (also called `prompt`), or `messages` through the chat template."""

    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeParameters(Parameters):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


def parse_body(kind: type[Body], content_type: str, body: bytes) -> Body:
    """The checked parameters. Raises ApiError: 415 for another type, 400 naming what is wrong."""
    if content_type.split(";", 1)[0].strip().lower() != "application/json":
        raise ApiError(415, "send the body as JSON with Content-Type: application/json")
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError(400, "the body is no JSON that can be read: it nests too deeply") from None
    except ValueError as error:  # includes bytes that are not UTF-8
        raise ApiError(400, f"the body is no JSON that can be read: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        return kind.model_validate(_without_neutral(values))
    except ValidationError as error:
        raise _to_api_error(error) from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _without_neutral(values: dict[str, object]) -> dict[str, object]:
    for name, neutral in _UNSUPPORTED.items():
        if values.get(name) is not None and values[name] not in neutral:
            raise ApiError(
                400, f"parameter {name!r} is not supported here; leave it out", code="unsupported_parameter", param=name
            )
    return {name: value for name, value in values.items() if name not in _IGNORED and name not in _UNSUPPORTED}


def _to_api_error(error: ValidationError) -> ApiError:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [_path(problem["loc"]) for problem in problems if problem["type"] == "extra_forbidden"]
    if unknown:
        names = ", ".join(repr(name) for name in unknown)
        plural = "s" if len(unknown) > 1 else ""
        return ApiError(400, f"unknown parameter{plural}: {names}", code="unknown_parameter", param=unknown[0])
    first = problems[0]
    name = _path(first["loc"])
    if first["type"] == "missing":
        return ApiError(400, f"missing required parameter: {name!r}", code="missing_required_parameter", param=name)
    return ApiError(400, f"{name}: {first['msg']}", code="invalid_value", param=name)


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].role`; the names that pydantic gives to the members of a union are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.replace("_", "").isalnum():
            path += f".{part}" if path else part
    for member in (".str", ".int", ".dict"):
        path = path.removesuffix(member)
    return path
