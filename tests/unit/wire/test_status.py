"""Errors over gRPC: the same type comes out, with who reported it; transport failures get a type of their own."""

import inspect

import grpc
import pytest

from lamina.spec import errors
from lamina.wire.status import ERROR_KEY, error_from_name, error_from_rpc, error_name, status_of

Code = grpc.StatusCode


ERROR_TYPES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.LaminaError)]


def rpc_error(code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


@pytest.mark.parametrize("kind", ERROR_TYPES, ids=lambda kind: kind.__name__)
def test_every_type_comes_back(kind: type[errors.LaminaError]) -> None:
    error = kind("what, where, remedy")
    assert error_name(error) == kind.__name__, "mapped itself, not only by its base"
    rpc = rpc_error(status_of(error), str(error), ((ERROR_KEY, error_name(error)),))
    back = error_from_rpc(rpc, "worker a")
    assert type(back) is kind
    assert str(back) == "worker a: what, where, remedy"
    assert type(error_from_name(error_name(error), "x")) is kind


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidRequest, Code.INVALID_ARGUMENT),
        (errors.InvalidPlan, Code.INVALID_ARGUMENT),
        (errors.InvalidCheckpoint, Code.INVALID_ARGUMENT),
        (errors.UnsupportedModel, Code.UNIMPLEMENTED),
        (errors.CapacityExceeded, Code.RESOURCE_EXHAUSTED),
        (errors.StaleEpoch, Code.FAILED_PRECONDITION),
        (errors.VersionMismatch, Code.FAILED_PRECONDITION),
        (errors.WorkerUnreachable, Code.UNAVAILABLE),
        (errors.WorkerLost, Code.UNAVAILABLE),
        (errors.NumericalError, Code.DATA_LOSS),
        (errors.LaminaError, Code.INTERNAL),
    ],
)
def test_codes(kind: type[errors.LaminaError], code: grpc.StatusCode) -> None:
    assert status_of(kind("x")) is code


def test_a_type_of_a_lower_layer_travels_as_its_base() -> None:
    class Special(errors.CapacityExceeded):
        pass

    assert status_of(Special("x")) is Code.RESOURCE_EXHAUSTED
    assert error_name(Special("x")) == "CapacityExceeded"


def test_an_unknown_name_is_the_root_type() -> None:
    """A newer peer may know more types."""
    assert type(error_from_name("FromTheFuture", "x")) is errors.LaminaError


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (Code.UNAVAILABLE, errors.WorkerLost, "worker a: connection lost \\(reset\\)"),
        (Code.INTERNAL, errors.WorkerLost, "worker a: connection lost$"),
        (Code.DEADLINE_EXCEEDED, errors.WorkerUnreachable, "worker a: no answer within the deadline"),
        (Code.UNIMPLEMENTED, errors.VersionMismatch, "worker a: is there, but is no lamina worker"),
        (Code.RESOURCE_EXHAUSTED, errors.CapacityExceeded, "worker a: reset"),
        (Code.UNKNOWN, errors.LaminaError, "worker a: UNKNOWN: reset"),
    ],
)
def test_transport_failures(code: grpc.StatusCode, kind: type[errors.LaminaError], said: str) -> None:
    """An error that no lamina peer sent: no name in the trailing metadata."""
    error = error_from_rpc(rpc_error(code, "reset"), "worker a")
    assert type(error) is kind
    with pytest.raises(kind, match=said):
        raise error


def test_no_details_at_all() -> None:
    assert "UNAVAILABLE" in str(error_from_rpc(rpc_error(Code.UNAVAILABLE, ""), "worker a"))
