"""OpenAI's requests to GenerationRequests. Runs in the tokenising pool: templates, tokenizer and grammars take time.

All functions raise InvalidRequest, or ApiError where OpenAI's error has more to say.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypedDict

from lamina.coordinator.api import tools as tool_calls
from lamina.coordinator.api.errors import ApiError
from lamina.coordinator.api.generation import GenerationRequest
from lamina.coordinator.api.grammar import json_object_grammar, schema_grammar
from lamina.coordinator.api.parameters import (
    MAX_CHOICES,
    ChatParameters,
    CompletionParameters,
    GenerationParameters,
    TokenizeParameters,
)
from lamina.coordinator.api.reasoning import ThoughtSplitter, is_opened_by
from lamina.coordinator.api.served_model import ServedModel
from lamina.spec.errors import InvalidRequest
from lamina.spec.sampling import SamplingParams

_SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_window",
)
_DEFAULT_TEMPERATURE = 1.0  # OpenAI's
_PROMPT_END_TOKENS = 16  # more than <think> and the space around it can be


class _Shared(TypedDict):
    """The fields of a GenerationRequest that both kinds of completion fill alike."""

    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    cache_salt: str


def chat_request(body: ChatParameters, model: ServedModel) -> GenerationRequest:
    """One conversation to continue."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(
            400, "max_tokens and max_completion_tokens differ; give one", code="invalid_value", param="max_tokens"
        )
    functions, forced = _chosen_tools(body)
    grammar = response_grammar(body.response_format)
    form = model.tool_format
    if forced:
        if grammar:
            raise InvalidRequest("response_format cannot be combined with a forced tool call")
        grammar = tool_calls.forced_call_grammar(form, forced, several=body.parallel_tool_calls is True)
    variables = {**_effort_variables(body, model), **(body.chat_template_kwargs or {})}
    prompt = encode_chat(model, body.messages, body.tools if functions else [], variables)
    return _limited(
        GenerationRequest(
            prompts=(tuple(prompt),),
            num_choices=body.n,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            grammar=grammar,
            make_tool_parser=partial(tool_calls.make_parser, form, frozenset(functions)) if functions else None,
            make_reasoning_splitter=None if grammar or not model.thinks else _splitter_after(prompt, model),
            **_shared(body, model, num_logprobs=(body.top_logprobs or 0) if body.logprobs else -1),
        ),
        model,
        "messages",
    )


def completion_request(body: CompletionParameters, model: ServedModel) -> GenerationRequest:
    """One or several texts to continue."""
    if body.best_of not in (None, body.n):
        raise ApiError(400, "best_of other than n is not supported", code="unsupported_parameter", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported", code="unsupported_parameter", param="echo")
    prompts = _prompts(body.prompt, model)
    if len(prompts) * body.n > MAX_CHOICES:
        raise InvalidRequest(f"{len(prompts)} prompts with n = {body.n} are more than {MAX_CHOICES} choices")
    return _limited(
        GenerationRequest(
            prompts=prompts,
            num_choices=body.n,
            max_tokens=16 if body.max_tokens is None else body.max_tokens,  # OpenAI's default
            grammar=response_grammar(body.response_format),
            **_shared(body, model, num_logprobs=-1 if body.logprobs is None else body.logprobs),
        ),
        model,
        "prompt",
    )


def encode_chat(
    model: ServedModel,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None,
    variables: Mapping[str, object] | None,
) -> list[int]:
    """Token ids of a conversation, with tools in the template's own way or in plain messages."""
    messages = tool_calls.parse_arguments(messages)
    if model.template_knows_tools:
        return model.chat.encode(messages, tools=tools or None, variables=variables)
    return model.chat.encode(tool_calls.spell_out(messages, tools or []), variables=variables)


def tokenize(body: TokenizeParameters, model: ServedModel) -> list[int]:
    """Token ids for /tokenize."""
    given = [value for value in (body.content, body.prompt, body.messages) if value is not None]
    if len(given) != 1:
        raise InvalidRequest("give exactly one of content, prompt, messages")
    if body.messages is not None:
        return encode_chat(model, body.messages, None, None)
    text = body.content if body.content is not None else body.prompt or ""
    return model.tokenizer.encode(text, add_special=body.add_special, parse_special=body.parse_special)


def response_grammar(wanted: Mapping[str, object] | None) -> str:
    """The grammar of a response_format, "" for text."""
    match wanted:
        case None | {"type": "text"}:
            return ""
        case {"type": "json_object"}:
            return json_object_grammar()
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema_grammar(schema)
        case {"type": "json_schema"}:
            problem = "response_format.json_schema.schema must be a JSON schema object"
        case _:
            problem = "response_format.type must be text, json_object or json_schema"
    raise ApiError(400, problem, code="invalid_value", param="response_format")


def _shared(body: GenerationParameters, model: ServedModel, num_logprobs: int) -> _Shared:
    given = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    sampling = SamplingParams(
        temperature=_DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        logit_bias=_logit_bias(body.logit_bias or {}, model.tokenizer.vocab_size),
        seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
        num_logprobs=num_logprobs,
        **given,
    )
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if not all(stops):
        raise ApiError(400, "a stop string is empty; leave it out", code="invalid_value", param="stop")
    return {
        "sampling": sampling,
        "stop_strings": stops,
        "stop_ids": frozenset(_checked_ids(body.stop_token_ids or [], model, "stop_token_ids")),
        "ignore_eos": body.ignore_eos,
        "cache_salt": body.cache_salt or "",
    }


def _limited(request: GenerationRequest, model: ServedModel, param: str) -> GenerationRequest:
    """The request, unless a prompt leaves no room for a token. The service cuts max_tokens to the room."""
    longest = max(map(len, request.prompts))
    if longest >= model.max_context:
        could_be = f"; it is served with --context {model.max_context}, the model allows {model.model_context}"
        raise ApiError(
            400,
            f"the prompt has {longest} tokens, the context here is {model.max_context}: shorten it"
            f"{could_be if model.max_context < model.model_context else ''}",
            code="context_length_exceeded",
            param=param,
        )
    return request


def _splitter_after(prompt: Sequence[int], model: ServedModel) -> Callable[[], ThoughtSplitter]:
    """Thoughts may be open at the end of the prompt already."""
    opened = is_opened_by(model.tokenizer.decode(prompt[-_PROMPT_END_TOKENS:]))
    return partial(ThoughtSplitter, opened=opened)


def _effort_variables(body: ChatParameters, model: ServedModel) -> dict[str, object]:
    """What `reasoning_effort` means to the template: a word, or whether to think at all. Raises ApiError."""
    effort, source = body.reasoning_effort, model.chat.template.source
    if effort is None:
        return {}
    if "reasoning_effort" in source:
        return {"reasoning_effort": effort}
    if "enable_thinking" in source:
        return {"enable_thinking": effort != "none"}
    raise ApiError(
        400,
        "reasoning_effort is not supported by this model's chat template; leave it out",
        code="unsupported_parameter",
        param="reasoning_effort",
    )


def _chosen_tools(body: ChatParameters) -> tuple[dict[str, tool_calls.Tool], dict[str, tool_calls.Tool]]:
    """(functions the model is told of, those of which one must be called)."""
    functions = tool_calls.check_tools(body.tools or [])
    choice = body.tool_choice
    if not functions:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", code="invalid_value", param="tool_choice")
        return {}, {}
    match choice:
        case None | "auto":
            return functions, {}
        case "none":
            return {}, {}
        case "required":
            return functions, functions
        case {"type": "function", "function": {"name": str(name)}} if name in functions:
            return functions, {name: functions[name]}
    raise ApiError(
        400,
        "tool_choice must be none, auto, required or a function among the tools",
        code="invalid_value",
        param="tool_choice",
    )


def _prompts(prompt: str | list[str] | list[int] | list[list[int]], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (_encode_text(prompt, model),)
    if not prompt:
        raise ApiError(400, "prompt is empty", code="invalid_value", param="prompt")
    if len(prompt) > MAX_CHOICES and not isinstance(prompt[0], int):
        raise InvalidRequest(f"{len(prompt)} prompts are more than {MAX_CHOICES}")
    ids = [part for part in prompt if isinstance(part, int)]
    if ids:
        return (_checked_ids(ids, model, "prompt"),)
    return tuple(
        _encode_text(part, model) if isinstance(part, str) else _checked_ids(part, model, "prompt")
        for part in prompt
        if not isinstance(part, int)
    )


def _encode_text(text: str, model: ServedModel) -> tuple[int, ...]:
    """A raw prompt is its author's own frame, so control tokens in it are meant."""
    ids = model.tokenizer.encode(text, add_special=True, parse_special=True)
    if not ids:
        raise ApiError(400, "prompt is empty; send at least one token", code="invalid_value", param="prompt")
    return tuple(ids)


def _checked_ids(ids: Sequence[int], model: ServedModel, param: str) -> tuple[int, ...]:
    size = model.tokenizer.vocab_size
    outside = next((token for token in ids if not 0 <= token < size), None)
    if outside is not None:
        raise ApiError(400, f"token id {outside} is not between 0 and {size - 1}", code="invalid_value", param=param)
    if not ids and param == "prompt":
        raise ApiError(400, "prompt is empty; send at least one token", code="invalid_value", param=param)
    return tuple(ids)


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        if not key.isdecimal() or len(key) > 9 or int(key) >= vocab_size:
            raise ApiError(
                400,
                f"logit_bias: {key!r:.40} is not a token id between 0 and {vocab_size - 1}",
                code="invalid_value",
                param="logit_bias",
            )
        biases[int(key)] = bias
    return biases
