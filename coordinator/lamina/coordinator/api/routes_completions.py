"""Routes that generate: /v1/chat/completions and /v1/completions."""

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from lamina.coordinator.api.generation import GenerationRequest
from lamina.coordinator.api.openai_answers import AnswerHead, EventWriter, WholeAnswer
from lamina.coordinator.api.openai_requests import chat_request, completion_request
from lamina.coordinator.api.parameters import (
    ChatParameters,
    CompletionParameters,
    GenerationParameters,
    Parameters,
    parse_body,
)
from lamina.coordinator.api.service import InferenceService
from lamina.coordinator.api.streaming import StreamResponse, WholeResponse, while_connected
from lamina.spec.errors import InvalidRequest


def described_by(kind: type[Parameters]) -> dict[str, Any]:
    """The request body for the OpenAPI document; bodies are parsed by hand, for errors in OpenAI's shape."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def completion_routes(service: InferenceService, ping_s: float) -> APIRouter:
    """The routes; streams are pinged when nothing came for `ping_s` seconds."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", openapi_extra=described_by(ChatParameters))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        body = await _read(request, ChatParameters)
        generation = await _prepare(service, request, body, partial(chat_request, body, service.model))
        return await _start(service, body, generation, ping_s, chat=True)

    @router.post("/v1/completions", openapi_extra=described_by(CompletionParameters))
    async def completions(request: Request) -> Response:
        """Continue texts."""
        body = await _read(request, CompletionParameters)
        generation = await _prepare(service, request, body, partial(completion_request, body, service.model))
        return await _start(service, body, generation, ping_s, chat=False)

    return router


async def _read(request: Request, kind: type[Any]) -> Any:
    return parse_body(kind, request.headers.get("content-type", ""), await request.body())


async def _prepare(
    service: InferenceService, request: Request, body: GenerationParameters, convert: Callable[[], GenerationRequest]
) -> GenerationRequest:
    service.model.check_name(body.model)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true")
    service.check_ready()
    generation = await service.prepare(convert)
    if generation.grammar:  # may take seconds, and others wait for it
        await while_connected(service.prepare_grammar(generation), request.receive)
    return generation


async def _start(
    service: InferenceService,
    body: ChatParameters | CompletionParameters,
    generation: GenerationRequest,
    ping_s: float,
    *,
    chat: bool,
) -> Response:
    """Queue the request; what refuses it is still an HTTP error, what happens later is part of the stream."""
    events = service.generate(generation)
    await anext(events)  # Started: from here on whoever closes the events cancels the request
    tokenizer = service.model.tokenizer
    echoes = isinstance(body, CompletionParameters) and body.echo
    head = AnswerHead(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        model=service.model.id,
        created_s=int(time.time()),
        token_bytes=tokenizer.token_bytes,
        num_choices=generation.num_choices,
        num_prompts=len(generation.prompts),
        prompt_texts=tuple(tokenizer.decode(ids, skip_special=True) for ids in generation.prompts) if echoes else (),
    )
    if not body.stream:
        answer = WholeAnswer(head, chat=chat, with_logprobs=generation.sampling.num_logprobs >= 0)
        return WholeResponse(events, answer)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return StreamResponse(events, EventWriter(head, chat=chat, include_usage=include_usage), ping_s)
