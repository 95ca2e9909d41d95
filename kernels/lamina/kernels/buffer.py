"""Values that cross the Backend interface: buffers, weights, KV caches, step shapes. All opaque above it.

A `Buffer` is memory plus a shape whose leading dimension may be symbolic: `Extent` says what it counts, and the
`StepShape` in force when an op runs (or is replayed) says how many. So a recording never bakes in a row count.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.spec.quant import GgmlType

BLOCK_TOKENS = 16  # tokens per KV block, the same on every stage and backend


class DType(Enum):
    """Element types of buffers and KV caches; `itemsize` in bytes (Q8_0 exists in KV caches only)."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I32 = "i32"
    U8 = "u8"
    Q8_0 = "q8_0"

    @cached_property
    def host_dtype(self) -> np.dtype[np.generic]:
        """The numpy type of host values; bf16 travels as its 16 bits. Raises ValueError for Q8_0."""
        if self not in _HOST_DTYPES:
            raise ValueError(f"{self.value} is a type of KV caches, not of buffers")
        return _HOST_DTYPES[self]

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element. Raises ValueError for Q8_0."""
        return self.host_dtype.itemsize


_HOST_DTYPES: dict[DType, np.dtype[np.generic]] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(np.uint16),
    DType.I32: np.dtype(np.int32),
    DType.U8: np.dtype(np.uint8),
}


class Extent(Enum):
    """What a buffer's leading dimension counts at run time; FIXED means the shape is meant as it stands."""

    FIXED = "fixed"
    ROWS = "rows"
    SEQS = "seqs"
    LOGIT_ROWS = "logit_rows"


class StepShape(NamedTuple):
    """The run-time sizes of one step: token rows, sequences, and rows whose logits are wanted."""

    num_rows: int
    num_seqs: int
    num_logit_rows: int

    def rows_in_force(self, extent: Extent, fixed: int) -> int:
        """Rows in force for a buffer of this extent; `fixed` is its leading dimension."""
        match extent:
            case Extent.FIXED:
                return fixed
            case Extent.ROWS:
                return self.num_rows
            case Extent.SEQS:
                return self.num_seqs
            case Extent.LOGIT_ROWS:
                return self.num_logit_rows


@dataclass(frozen=True, slots=True)
class ExpertLimits:
    """The largest mixture of experts among a stage's layers: of so many, each [intermediate, hidden] three times."""

    num_experts: int
    num_selected: int
    hidden: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The worst case that an arena and a backend's workspace are sized for."""

    max_rows: int
    max_seqs: int
    max_logit_rows: int
    max_blocks_per_seq: int
    experts: ExpertLimits | None = None  # None without any

    def admits(self, shape: StepShape) -> bool:
        """Whether a step of this shape fits."""
        return (
            0 < shape.num_rows <= self.max_rows
            and 0 < shape.num_seqs <= self.max_seqs
            and 0 <= shape.num_logit_rows <= self.max_logit_rows
        )


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory of one backend. `storage` is the backend's own; `offset` and `row_stride` are in elements of `dtype`.

    Shape is (rows,) or (rows, columns), row-major; a column view keeps its parent's row stride.
    """

    shape: tuple[int, ...]
    dtype: DType
    extent: Extent
    storage: object = field(repr=False)
    row_stride: int
    offset: int = 0

    @property
    def num_columns(self) -> int:
        """Elements per row (1 for a vector)."""
        return self.shape[1] if len(self.shape) == 2 else 1

    def columns(self, start: int, stop: int) -> "Buffer":
        """The view [:, start:stop] of a two-dimensional buffer; no copy."""
        if len(self.shape) != 2 or not 0 <= start < stop <= self.shape[1]:
            raise ValueError(f"columns [{start}:{stop}] are not within a buffer of shape {self.shape}")
        return replace(self, shape=(self.shape[0], stop - start), offset=self.offset + start)

    def part(self, start: int, shape: tuple[int, ...], dtype: DType, extent: Extent) -> "Buffer":
        """The elements from `start` on of a one-dimensional buffer as a buffer of its own; no copy.

        `dtype` may be another of the same size.
        """
        stride = shape[1] if len(shape) == 2 else 1
        count = shape[0] * stride
        if len(self.shape) != 1 or start < 0 or start + count > self.shape[0] or dtype.itemsize != self.dtype.itemsize:
            raise ValueError(f"{count} {dtype.value} values from {start} on are not within a buffer of {self.shape}")
        return Buffer(shape, dtype, extent, self.storage, stride, self.offset + start)

    def rows(self, start: int, stop: int) -> "Buffer":
        """The view [start:stop] of the leading dimension, which then is meant as it stands; no copy."""
        if not 0 <= start < stop <= self.shape[0]:
            raise ValueError(f"rows [{start}:{stop}] are not within a buffer of shape {self.shape}")
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, extent=Extent.FIXED, offset=self.offset + start * self.row_stride)


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """A tensor as it lies in the checkpoint: raw GGUF blocks uint8 [rows, bytes per row], `cols` values a row."""

    type: GgmlType
    rows: int
    cols: int
    data: NDArray[np.uint8] = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One or several matrices of equal in_features, stacked by rows, in the backend's own layout, with optional bias.

    `part_rows` are the out_features of each stacked part; `num_bytes` is what it occupies on the device.
    """

    in_features: int
    part_rows: tuple[int, ...]
    num_bytes: int
    storage: object = field(repr=False)

    @property
    def out_features(self) -> int:
        """Rows of all parts together."""
        return sum(self.part_rows)


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """The paged K and V of one layer; the layout inside a block is the backend's own."""

    num_blocks: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: DType
    num_bytes: int
    storage: object = field(repr=False)


Operand = Buffer | Weight | KvCache
