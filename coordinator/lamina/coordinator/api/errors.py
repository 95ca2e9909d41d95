"""Errors as HTTP answers in OpenAI's shape; the one place where error types become status codes."""

import json
from collections.abc import Mapping

from lamina.spec import errors

RETRY_AFTER_S = 2


class ApiError(Exception):
    """A request that is refused for a reason that only HTTP has, or with more detail than its LaminaError."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


_STATUS: dict[type[errors.LaminaError], tuple[int, str | None]] = {
    errors.InvalidRequest: (400, None),
    errors.CapacityExceeded: (429, "queue_full"),
    errors.Unavailable: (503, "unavailable"),
    errors.WorkerLost: (503, "worker_lost"),
    errors.WorkerUnreachable: (503, "worker_unreachable"),
    errors.StaleEpoch: (503, "unavailable"),
    errors.NumericalError: (500, "numerical_error"),
    errors.LaminaError: (500, "internal_error"),
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def to_api_error(error: errors.LaminaError) -> ApiError:
    """The answer to a failure, by its closest mapped type."""
    status, code = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return ApiError(status, str(error), code=code, headers=headers)


def error_object(error: ApiError) -> dict[str, object]:
    """The `{"error": …}` object."""
    kind = _TYPES.get(error.status, "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_body(error: ApiError) -> bytes:
    """The body of an error answer."""
    return json.dumps(error_object(error), ensure_ascii=False).encode()
