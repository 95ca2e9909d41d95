"""What lies behind the reference's buffers, weights and caches, and how to get at it."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.buffer import Buffer, KvCache, Weight
from lamina.kernels.ops import LaunchError
from lamina.spec.errors import InvalidPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Stacked weight rows, dequantised: values float32 [out, in], bias float32 [out]."""

    values: NDArray[np.float32]
    bias: NDArray[np.float32] | None


def storage_of(operand: Buffer | Weight | KvCache, kind: type[T]) -> T:
    if not isinstance(operand.storage, kind):
        raise LaunchError(f"{type(operand).__name__} belongs to another backend")
    return operand.storage


def require_within(what: str, values: NDArray[np.int32], stop: int) -> None:
    """Raise InvalidPlan if a value is outside [0, stop): the step's arrays name something that does not exist."""
    if values.size and (values.min() < 0 or values.max() >= stop):
        raise InvalidPlan(f"{what} {int(values.min())} .. {int(values.max())} are not within [0, {stop})")


def rows_of(buffer: Buffer, num_rows: int) -> NDArray[np.generic]:
    """The first rows, as a view."""
    array = storage_of(buffer, np.ndarray)
    size = buffer.dtype.itemsize
    shape = (num_rows, *buffer.shape[1:])
    strides = (buffer.row_stride * size, size)[: len(shape)]
    return np.ndarray(shape, buffer.dtype.host_dtype, array, buffer.offset * size, strides)
