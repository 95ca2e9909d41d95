"""Routes that tell: models, tokens, health, metrics, version, the cluster; and embeddings, which are refused."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from lamina.coordinator.api.errors import RETRY_AFTER_S, ApiError
from lamina.coordinator.api.openai_requests import tokenize
from lamina.coordinator.api.parameters import DetokenizeParameters, TokenizeParameters, parse_body
from lamina.coordinator.api.routes_completions import described_by
from lamina.coordinator.api.service import InferenceService
from lamina.coordinator.api.state import Ready, state_object
from lamina.wire.version import own_version


def info_routes(service: InferenceService) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["information"])
    model = service.model

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        """The served model."""
        return {"object": "list", "data": [_model_object(service)]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, object]:
        """One model by name."""
        model.check_name(name)
        return _model_object(service)

    @router.post("/v1/embeddings")
    async def embeddings() -> Response:
        """Refused: what is served is a language model."""
        raise ApiError(
            400, f"model {model.id!r} generates text and gives no embeddings", code="unsupported_model", param="model"
        )

    @router.post("/tokenize", openapi_extra=described_by(TokenizeParameters))
    async def tokenize_text(request: Request) -> dict[str, object]:
        """Token ids of a text or a conversation."""
        body = parse_body(TokenizeParameters, request.headers.get("content-type", ""), await request.body())
        model.check_name(body.model)
        ids = await service.prepare(lambda: tokenize(body, model))
        tokens: list[Any] = [*ids]
        if body.with_pieces:
            tokens = [{"id": token, "piece": model.tokenizer.decode([token])} for token in ids]
        return {"tokens": tokens, "count": len(ids), "max_model_len": model.max_context}

    @router.post("/detokenize", openapi_extra=described_by(DetokenizeParameters))
    async def detokenize(request: Request) -> dict[str, str]:
        """The text of token ids."""
        body = parse_body(DetokenizeParameters, request.headers.get("content-type", ""), await request.body())
        model.check_name(body.model)
        text = model.tokenizer.decode(body.tokens)
        return {"content": text, "prompt": text}

    @router.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Release, protocol, schema."""
        own = own_version()
        protocol = f"{own.protocol_major}.{own.protocol_minor}"
        return {"version": own.product, "protocol": protocol, "schema": own.schema_digest.hex()}

    @router.get("/admin/cluster")
    async def cluster() -> dict[str, object]:
        """Workers, stages and load, for people and the page."""
        return _cluster_object(service)

    _add_health(router, service)
    return router


def _add_health(router: APIRouter, service: InferenceService) -> None:
    @router.get("/health")
    @router.get("/health/ready")
    async def health() -> Response:
        """200 when a request would be served now, else 503 with the reason."""
        state = service.state
        headers = {} if isinstance(state, Ready) else {"Retry-After": str(RETRY_AFTER_S)}
        return JSONResponse(state_object(state), 200 if isinstance(state, Ready) else 503, headers)

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        """200 as long as the process answers."""
        return {"status": "ok"}


def _cluster_object(service: InferenceService) -> dict[str, object]:
    state, cluster = service.state, service.cluster
    scheduler = state.engine.scheduler if isinstance(state, Ready) else None
    return {
        "model": service.model.id,
        "state": state_object(state),
        "max_context": service.model.max_context,
        "num_requests_open": service.num_active,
        "num_requests_running": scheduler.num_running if scheduler else 0,
        "num_requests_waiting": scheduler.num_waiting if scheduler else 0,
        "kv_cache_usage_ratio": scheduler.kv_usage_ratio if scheduler else 0.0,
        "tokens_per_s": round(service.metrics.tokens_per_s(), 2),
        **cluster.snapshot(),
    }


def _model_object(service: InferenceService) -> dict[str, object]:
    model = service.model
    return {
        "id": model.id,
        "object": "model",
        "created": model.created_s,
        "owned_by": "lamina",
        "max_model_len": model.max_context,
    }
