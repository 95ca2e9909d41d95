"""What every request passes before a route sees it: the API key, the size of its body, how many others are there."""

import hmac

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamina.coordinator.api.errors import RETRY_AFTER_S, ApiError, error_body

OPEN_PATHS = frozenset(("/health", "/health/live", "/health/ready"))


class Gate:
    """ASGI middleware. With a key, everything but `open_paths` is refused without it."""

    def __init__(
        self, app: ASGIApp, api_key: str, max_body_bytes: int, open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._api_key = api_key.encode()
        self._max_body_bytes = max_body_bytes
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers)
            declared = headers.get(b"content-length", b"0")
            if declared.isdigit() and int(declared) > self._max_body_bytes:
                raise self._too_large()
        except ApiError as error:
            await send_error(send, error)
            return
        try:
            await self._app(scope, self._counting(receive), send)
        except ClientDisconnect:
            return  # before its request was whole: nobody is left to be answered

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._api_key or path in self._open_paths:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._api_key):
            raise ApiError(
                401,
                "missing or wrong API key: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _counting(self, receive: Receive) -> Receive:
        """A body without a declared length is counted as it comes; ApiError goes to the app's handler."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._max_body_bytes} bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )


class Full:
    """ASGI app in the place of another, on connections beyond the limit: passes on health checks, refuses the rest."""

    def __init__(self, app: ASGIApp, max_connections: int) -> None:
        self._app = app
        self._max_connections = max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        problem = f"{self._max_connections} connections are open, which is the limit here; try again later"
        headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
        await send_error(send, ApiError(503, problem, code="too_many_connections", headers=headers))


async def send_error(send: Send, error: ApiError) -> None:
    """An error answer straight over ASGI."""
    body = error_body(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
