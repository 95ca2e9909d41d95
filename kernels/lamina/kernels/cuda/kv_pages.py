"""KV caches on the device: where K and V lie, and their order inside a page (the CUDA twin is src/kv.cuh)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import BLOCK_TOKENS, DType, KvCache
from lamina.kernels.cuda.device import Device, Memory, Span
from lamina.kernels.quant.kv_bytes import kv_row_bytes

KV_TYPES = {DType.F32: 0, DType.F16: 1, DType.BF16: 2}  # KvType of kv.cuh
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """K pages [block][kv head], then V pages; `v_offset` in bytes."""

    memory: Memory
    v_offset: int

    @property
    def k_address(self) -> int:
        return self.memory.address

    @property
    def v_address(self) -> int:
        return self.memory.address + self.v_offset


def pages_of(cache: KvCache) -> Pages:
    if not isinstance(cache.storage, Pages):
        raise TypeError("KvCache belongs to another backend")
    return cache.storage


def page_bytes(dtype: DType, dim: int) -> int:
    """Bytes of 16 tokens of one head. Raises Unsupported for a dtype or head size without a kernel (B-16)."""
    if dtype not in KV_TYPES:
        raise Unsupported(f"cuda has no {dtype.value} KV cache; it has {', '.join(kind.value for kind in KV_TYPES)}")
    if dim % 32 or not 0 < dim <= MAX_HEAD_DIM:
        raise Unsupported(
            f"cuda attention has no kernel for heads of {dim} values; multiples of 32 up to {MAX_HEAD_DIM}"
        )
    return BLOCK_TOKENS * kv_row_bytes(dtype, dim)


def key_order(dim: int) -> NDArray[np.int64]:
    """Index within a K page of (token, dimension): [16, dim]."""
    token, d = np.arange(BLOCK_TOKENS)[:, None], np.arange(dim)[None, :]
    lane = (2 * (token // 4) + token % 2) * 4 + d // 8 % 4
    return ((d // 32 * 2 + token // 2 % 2) * 32 + lane) * 8 + d % 8


def value_order(dim: int) -> NDArray[np.int64]:
    """Index within a V page of (token, dimension): [16, dim]."""
    token, d = np.arange(BLOCK_TOKENS)[:, None], np.arange(dim)[None, :]
    return (d // 16 * 32 + d % 8 * 4 + token // 4) * 8 + d // 8 % 2 * 4 + token % 4


def read_pages(
    device: Device, cache: KvCache, blocks: Sequence[int], num_tokens: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """K and V of a block list in token order, as float32."""
    pages = pages_of(cache)
    k = _read(device, pages.memory, 0, cache, cache.key_dim, key_order(cache.key_dim), blocks)
    v = _read(device, pages.memory, pages.v_offset, cache, cache.value_dim, value_order(cache.value_dim), blocks)
    return k[:num_tokens], v[:num_tokens]


def _read(
    device: Device,
    memory: Memory,
    offset: int,
    cache: KvCache,
    dim: int,
    order: NDArray[np.int64],
    blocks: Sequence[int],
) -> NDArray[np.float32]:
    block_bytes = cache.num_kv_heads * page_bytes(cache.dtype, dim)
    tokens = np.empty((len(blocks) * BLOCK_TOKENS, cache.num_kv_heads, dim), np.float32)
    for i, block in enumerate(blocks):
        raw = device.download(Span(memory, offset + block * block_bytes, 1, block_bytes, block_bytes))
        pages = _widened(raw, cache.dtype).reshape(cache.num_kv_heads, -1)
        tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS] = pages[:, order].transpose(1, 0, 2)
    return tokens


def _widened(raw: NDArray[np.uint8], dtype: DType) -> NDArray[np.float32]:
    elements = np.ascontiguousarray(raw).view(dtype.host_dtype)
    if dtype is DType.BF16:
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32)
