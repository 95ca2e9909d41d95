"""Bytes of stored K or V, by dtype: the same on every backend that keeps these formats."""

from lamina.kernels.buffer import DType

KV_DTYPES = frozenset({DType.F32, DType.F16, DType.BF16, DType.Q8_0})
Q8_BLOCK_VALUES = 32
Q8_BLOCK_BYTES = 34  # fp16 scale and 32 int8, ggml's Q8_0


def kv_row_bytes(dtype: DType, dim: int) -> int:
    """Bytes of the `dim` values of one head at one position.

    Raises ValueError for a dtype that no KV cache has, or if Q8_0 blocks do not divide `dim`.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"{dtype.value} is no dtype of a KV cache")
    if dtype is not DType.Q8_0:
        return dim * dtype.itemsize
    blocks, rest = divmod(dim, Q8_BLOCK_VALUES)
    if rest:
        raise ValueError(f"q8_0 stores blocks of {Q8_BLOCK_VALUES} values, heads have {dim}")
    return blocks * Q8_BLOCK_BYTES
