"""Errors <-> gRPC status, mapped once. The error type's name travels in trailing metadata, the message as details."""

from typing import NoReturn

import grpc

from lamina.spec import errors

_CODES: dict[type[errors.LaminaError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidConfig: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidSplit: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidPlan: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidCheckpoint: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedModel: grpc.StatusCode.UNIMPLEMENTED,
    errors.CapacityExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WorkerUnreachable: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerLost: grpc.StatusCode.UNAVAILABLE,
    errors.NumericalError: grpc.StatusCode.DATA_LOSS,
    errors.Unavailable: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LaminaError: grpc.StatusCode.INTERNAL,
}
_TYPES = {kind.__name__: kind for kind in _CODES}
ERROR_KEY = "lamina-error"
# Status details travel in a header block of 8 KiB, percent-encoded: up to three bytes for each.
_MAX_DETAILS_BYTES = 2000


def status_of(error: errors.LaminaError) -> grpc.StatusCode:
    """The status code of an error, by its closest mapped base."""
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)


def error_name(error: errors.LaminaError) -> str:
    """The name of the closest mapped type; `error_from_name` is its inverse."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind in _CODES)


def error_from_name(name: str, message: str) -> errors.LaminaError:
    """The error a peer reported; an unknown name becomes the root type."""
    return _TYPES.get(name, errors.LaminaError)(message)


async def abort(context: grpc.aio.ServicerContext, error: errors.LaminaError) -> NoReturn:  # type: ignore[type-arg]
    """End an RPC with this error; does not return."""
    context.set_trailing_metadata(((ERROR_KEY, error_name(error)),))
    details = str(error).encode(errors="replace")[:_MAX_DETAILS_BYTES].decode(errors="ignore")
    await context.abort(status_of(error), details)


def is_deliberate(rpc: grpc.aio.AioRpcError) -> bool:
    """Whether the peer said so through `abort`; otherwise the transport failed, or something else answered."""
    return ERROR_KEY in dict(rpc.trailing_metadata() or ())


def error_from_rpc(rpc: grpc.aio.AioRpcError, who: str) -> errors.LaminaError:
    """The typed error behind a failed RPC to `who`; transport failures become WorkerUnreachable or WorkerLost."""
    named = dict(rpc.trailing_metadata() or ()).get(ERROR_KEY)
    details = rpc.details() or rpc.code().name
    if isinstance(named, str):
        return error_from_name(named, f"{who}: {details}")
    match rpc.code():
        case grpc.StatusCode.UNAVAILABLE if "ping timeout" in details:
            return errors.WorkerLost(f"{who}: has stopped answering (hung, suspended or unplugged)")
        case grpc.StatusCode.UNAVAILABLE:
            return errors.WorkerLost(f"{who}: connection lost ({details})")
        case grpc.StatusCode.INTERNAL:  # a write met the loss before its status came; a worker's own bears a name
            return errors.WorkerLost(f"{who}: connection lost")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.WorkerUnreachable(f"{who}: no answer within the deadline")
        case grpc.StatusCode.UNIMPLEMENTED:
            return errors.VersionMismatch(f"{who}: is there, but is no lamina worker of this version ({details})")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.CapacityExceeded(f"{who}: {details}")
        case _:
            return errors.LaminaError(f"{who}: {rpc.code().name}: {details}")
