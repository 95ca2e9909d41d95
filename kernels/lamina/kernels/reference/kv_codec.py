"""How the reference keeps K and V: per (block, offset, kv head) one row of elements, rounded to the cache's dtype.

Owns the four encodings. F32, F16 and BF16 are arrays of elements; Q8_0 is ggml's block of 32 values as its 34 bytes
(fp16 scale, 32 int8), so that `gguf.quants` can check it.
"""

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.buffer import DType
from lamina.kernels.quant.kv_bytes import Q8_BLOCK_BYTES, Q8_BLOCK_VALUES, kv_row_bytes

_ELEMENT: dict[DType, type[np.generic]] = {
    DType.F32: np.float32,
    DType.F16: np.float16,
    DType.BF16: np.uint16,
    DType.Q8_0: np.uint8,
}


def row_shape(dtype: DType, dim: int) -> tuple[int, type[np.generic]]:
    """Elements per row of `dim` values, and their numpy type. Raises ValueError like `kv_row_bytes`."""
    num_bytes, element = kv_row_bytes(dtype, dim), _ELEMENT[dtype]
    return num_bytes // np.dtype(element).itemsize, element


def encode(values: NDArray[np.float32], dtype: DType) -> NDArray[np.generic]:
    """float32 [.., dim] -> stored rows [.., elements], rounded to nearest, ties to even."""
    match dtype:
        case DType.F16:
            return values.astype(np.float16)
        case DType.BF16:
            return float32_to_bf16(values)
        case DType.Q8_0:
            return _encode_q8(values)
        case _:
            return values


def decode(stored: NDArray[np.generic], dtype: DType) -> NDArray[np.float32]:
    """Stored rows [.., elements] -> float32 [.., dim]."""
    match dtype:
        case DType.BF16:
            return bf16_to_float32(stored)
        case DType.Q8_0:
            return _decode_q8(stored)
        case _:
            return stored.astype(np.float32, copy=False)


def float32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper 16 bits, rounded to nearest even; NaN stays NaN (made quiet, so that rounding cannot carry it away)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def bf16_to_float32(stored: NDArray[np.generic]) -> NDArray[np.float32]:
    """Exact."""
    return (stored.astype(np.uint32) << 16).view(np.float32)


def _encode_q8(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    blocks = values.reshape(*values.shape[:-1], -1, Q8_BLOCK_VALUES)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    scaled = blocks * inverse
    # ggml rounds halves away from zero
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    stored = np.empty((*blocks.shape[:-1], Q8_BLOCK_BYTES), np.uint8)
    stored[..., :2] = scale.astype("<f2").view(np.uint8)
    stored[..., 2:] = codes.view(np.uint8)
    return stored.reshape(*values.shape[:-1], -1)


def _decode_q8(stored: NDArray[np.generic]) -> NDArray[np.float32]:
    blocks = np.ascontiguousarray(stored).reshape(*stored.shape[:-1], -1, Q8_BLOCK_BYTES)
    scale = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    values = scale * blocks[..., 2:].view(np.int8)
    return values.reshape(*stored.shape[:-1], -1)
