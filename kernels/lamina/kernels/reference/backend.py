"""The oracle: every op in numpy float32, weights dequantised once at load, real paged KV caches. No torch.

Owns the arrays behind its buffers: a buffer has an array [rows, row stride] (or [rows]), a weight one float32 matrix of
all parts, a cache its `Pages`. BLAS decides the order of sums, so a row may depend on what is beside it (A-31).
One compute thread; BLAS uses its own threads, which a process sets by environment only.
"""

import platform
from collections.abc import Sequence

import numpy as np
import psutil
from numpy.typing import NDArray

from lamina.kernels.backend import Capabilities, DeviceFacts, Unsupported
from lamina.kernels.buffer import BLOCK_TOKENS, Buffer, DType, Extent, HostTensor, KvCache, StepShape, Weight
from lamina.kernels.ledger import LedgerBackend, stacked_rows
from lamina.kernels.ops import Args, OpSpec
from lamina.kernels.quant.dequantize import dequantize_into
from lamina.kernels.quant.kv_bytes import KV_DTYPES
from lamina.kernels.reference import attention, kv_codec
from lamina.kernels.reference.runners import RUNNERS, Operands
from lamina.kernels.reference.storage import Matrix, rows_of, storage_of
from lamina.spec.quant import GgmlType

F32 = NDArray[np.float32]


class ReferenceBackend(LedgerBackend):
    """See the module docstring. `max_memory_bytes` caps what it allocates (None: what the machine has)."""

    name = "reference"
    capabilities = Capabilities(kv_dtypes=KV_DTYPES, kernel="numpy float32")

    def __init__(self, *, max_memory_bytes: int | None = None) -> None:
        super().__init__()
        self._max_memory_bytes = max_memory_bytes

    # -- memory

    def device_facts(self) -> DeviceFacts:
        memory = psutil.virtual_memory()
        total, free = memory.total, memory.available
        if self._max_memory_bytes is not None:
            total = min(total, self._max_memory_bytes)
            free = min(free, self._max_memory_bytes - self.ledger.used_bytes)
        return DeviceFacts("cpu", f"{platform.processor() or platform.machine()} (numpy)", total, free)

    def alloc(self, shape: tuple[int, ...], dtype: DType, extent: Extent = Extent.FIXED) -> Buffer:
        self._reserve(f"a {dtype.value} buffer of {shape}", int(np.prod(shape)) * dtype.itemsize)
        values = np.zeros(shape, dtype.host_dtype)
        self.ledger.add(values, values.nbytes)
        return Buffer(shape, dtype, extent, values, shape[1] if len(shape) == 2 else 1)

    def _upload(self, buffer: Buffer, values: NDArray[np.generic]) -> None:
        if buffer.dtype is DType.BF16 and values.dtype == np.float32:
            values = kv_codec.float32_to_bf16(values.astype(np.float32, copy=False))
        rows_of(buffer, len(values))[...] = values

    def _download(self, buffer: Buffer, num_rows: int) -> NDArray[np.generic]:
        return rows_of(buffer, num_rows).copy()

    def _copy(self, source: Buffer, target: Buffer, num_rows: int) -> None:
        rows_of(target, num_rows)[...] = rows_of(source, num_rows)

    def load_weight(self, parts: Sequence[HostTensor], bias: NDArray[np.float32] | None = None) -> Weight:
        """Raises ValueError if the parts' columns differ or `bias` has not one value per row."""
        in_features, part_rows = stacked_rows(parts, bias)
        num_bytes = 4 * sum(part_rows) * (in_features + (bias is not None))
        self._reserve(f"a weight of {sum(part_rows)} x {in_features} as float32", num_bytes)
        values = np.empty((sum(part_rows), in_features), np.float32)
        start = 0
        for part in parts:
            dequantize_into(part, values[start : start + part.rows])
            start += part.rows
        matrix = Matrix(values, None if bias is None else bias.astype(np.float32))
        self.ledger.add(matrix, num_bytes)
        return Weight(in_features, part_rows, num_bytes, matrix)

    def weight_bits(self, tensor_type: GgmlType) -> float:
        """float32, whatever the checkpoint has."""
        return 32.0

    def alloc_kv(self, num_blocks: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType) -> KvCache:
        num_bytes = num_blocks * self.kv_bytes_per_block(num_kv_heads, key_dim, value_dim, dtype)
        self._reserve(f"a KV cache of {num_blocks} blocks", num_bytes)
        shape = (num_blocks, BLOCK_TOKENS, num_kv_heads)
        k, v = (np.zeros((*shape, size), element) for size, element in _kv_rows(dtype, key_dim, value_dim))
        pages = attention.Pages(k, v, dtype)
        self.ledger.add(pages, num_bytes)
        return KvCache(num_blocks, num_kv_heads, key_dim, value_dim, dtype, num_bytes, pages)

    def kv_bytes_per_block(self, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType) -> int:
        """Raises Unsupported like `alloc_kv`."""
        rows = BLOCK_TOKENS * num_kv_heads
        return sum(rows * size * np.dtype(element).itemsize for size, element in _kv_rows(dtype, key_dim, value_dim))

    def copy_kv_block(self, cache: KvCache, source: int, target: int) -> None:
        self._require_usable("copy_kv_block", cache)
        pages = storage_of(cache, attention.Pages)
        pages.k[target], pages.v[target] = pages.k[source], pages.v[source]

    def read_kv(self, cache: KvCache, blocks: Sequence[int], num_tokens: int) -> tuple[F32, F32]:
        self._require_usable("read_kv", cache)
        k, v = storage_of(cache, attention.Pages).read(np.asarray(blocks, np.int32), 0, num_tokens)
        return k.copy(), v.copy()

    def _compute(self, op: OpSpec, args: Args, shape: StepShape, num_rows: int) -> None:
        RUNNERS[op.name](Operands(op.name, args, num_rows, shape))


def _kv_rows(dtype: DType, key_dim: int, value_dim: int) -> list[tuple[int, type[np.generic]]]:
    try:
        return [kv_codec.row_shape(dtype, dim) for dim in (key_dim, value_dim)]
    except ValueError as error:
        raise Unsupported(f"reference KV cache: {error}") from None
