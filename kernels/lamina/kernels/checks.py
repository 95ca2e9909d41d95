"""Checks of what callers hand to a Backend's memory methods, shared by its implementations."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.buffer import Buffer, DType, HostTensor


def require_host_values(buffer: Buffer, values: NDArray[np.generic]) -> None:
    """Raise ValueError unless `values` can be uploaded into the first rows of the buffer."""
    allowed = {buffer.dtype.host_dtype}
    if buffer.dtype in (DType.F16, DType.BF16):
        allowed.add(np.dtype(np.float32))
    if values.dtype not in allowed:
        raise ValueError(f"upload of {values.dtype} into a {buffer.dtype.value} buffer")
    if values.ndim != len(buffer.shape) or values.shape[1:] != buffer.shape[1:] or len(values) > buffer.shape[0]:
        raise ValueError(f"upload of {list(values.shape)} values into a buffer of {list(buffer.shape)}")


def require_parts(parts: Sequence[HostTensor], bias: NDArray[np.float32] | None) -> tuple[int, tuple[int, ...]]:
    """in_features and rows of each part. Raises ValueError if columns differ or `bias` does not fit."""
    widths = {part.cols for part in parts}
    part_rows = tuple(part.rows for part in parts)
    if len(widths) != 1:
        raise ValueError(f"parts of a weight must have equal columns, not {sorted(widths)}")
    if bias is not None and bias.shape != (sum(part_rows),):
        raise ValueError(f"bias of {list(bias.shape)} values for {sum(part_rows)} rows")
    return widths.pop(), part_rows
