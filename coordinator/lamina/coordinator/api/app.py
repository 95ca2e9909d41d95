"""The FastAPI app: routes to the service, errors to OpenAI's shape. Decides nothing about generation."""

from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from lamina.coordinator.api.errors import ApiError, error_body, to_api_error
from lamina.coordinator.api.gate import OPEN_PATHS, Gate
from lamina.coordinator.api.pages import PAGE_FILES, page_routes
from lamina.coordinator.api.routes_completions import completion_routes
from lamina.coordinator.api.routes_info import info_routes
from lamina.coordinator.api.service import InferenceService
from lamina.coordinator.api.settings import OPEN, ApiSettings
from lamina.spec.errors import LaminaError


def create_app(service: InferenceService, settings: ApiSettings = OPEN, routers: tuple[APIRouter, ...] = ()) -> FastAPI:
    """The app of one served model; `routers` are further routes behind the same gate."""
    app = FastAPI(title="lamina", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    for router in (completion_routes(service, settings.ping_s), info_routes(service), page_routes(), *routers):
        app.include_router(router)
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(LaminaError, _answer)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_unexpected)
    app.add_middleware(
        Gate, api_key=settings.api_key, max_body_bytes=settings.max_body_bytes, open_paths=OPEN_PATHS | {*PAGE_FILES}
    )
    return app


async def _answer(request: Request, error: Exception) -> Response:
    """Our own refusals."""
    if isinstance(error, LaminaError):
        error = to_api_error(error)
    assert isinstance(error, ApiError)
    return _to_response(error)


async def _answer_http(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, method not allowed."""
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            message, code = f"there is no {request.method} {request.url.path}", "not_found"
        case 405:
            message, code = f"{request.url.path} does not take {request.method}", "method_not_allowed"
        case _:
            message, code = str(error.detail), HTTPStatus(error.status_code).name.lower()
    return _to_response(ApiError(error.status_code, message, code=code, headers=error.headers or {}))


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    """A defect: the server's log has the trace, the client gets the kind of failure only."""
    return _to_response(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))


def _to_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, error.headers, media_type="application/json")
