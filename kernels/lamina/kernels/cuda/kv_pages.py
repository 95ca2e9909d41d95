"""KV caches on the device: where K and V lie, and their order inside a page (the CUDA twin is src/kv.cuh)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import BLOCK_TOKENS, DType, KvCache
from lamina.kernels.cuda.device import Device, Memory, Span
from lamina.kernels.quant.kv_bytes import Q8_BLOCK_VALUES, kv_row_bytes

KV_TYPES = {DType.F32: 0, DType.F16: 1, DType.BF16: 2, DType.Q8_0: 3}  # KvType of kv.cuh
MAX_HEAD_DIM = 1024


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


def key_width(dim: int) -> int:
    """Values that a K page keeps of a token: whole fragments."""
    return -(-dim // 32) * 32


def value_width(dim: int) -> int:
    """The same of a V page."""
    return -(-dim // 16) * 16


def page_bytes(dtype: DType, dim: int, width: int) -> int:
    """Bytes of 16 tokens of one head of `dim` values, kept as `width`.

    Raises Unsupported for a dtype or head size without a kernel (B-16).
    """
    if dtype not in KV_TYPES:
        raise Unsupported(f"cuda has no {dtype.value} KV cache; it has {', '.join(kind.value for kind in KV_TYPES)}")
    if not 0 < dim <= MAX_HEAD_DIM:
        raise Unsupported(f"cuda attention has no kernel for heads of {dim} values; 1 to {MAX_HEAD_DIM}")
    if dtype is DType.Q8_0 and dim % Q8_BLOCK_VALUES:
        raise Unsupported(f"cuda keeps {dtype.value} in blocks of {Q8_BLOCK_VALUES} values, heads have {dim}")
    return BLOCK_TOKENS * kv_row_bytes(dtype, width)


def key_page_bytes(dtype: DType, dim: int) -> int:
    """`page_bytes` of keys."""
    return page_bytes(dtype, dim, key_width(dim))


def value_page_bytes(dtype: DType, dim: int) -> int:
    """`page_bytes` of values."""
    return page_bytes(dtype, dim, value_width(dim))


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
    pages, dtype = pages_of(cache), cache.dtype
    key_bytes, value_bytes = key_page_bytes(dtype, cache.key_dim), value_page_bytes(dtype, cache.value_dim)
    k = _read(device, Span(pages.memory, 0, 1, key_bytes, 0), cache, key_order(cache.key_dim), blocks)
    v = _read(
        device, Span(pages.memory, pages.v_offset, 1, value_bytes, 0), cache, value_order(cache.value_dim), blocks
    )
    return k[:num_tokens], v[:num_tokens]


def _read(
    device: Device, first_page: Span, cache: KvCache, order: NDArray[np.int64], blocks: Sequence[int]
) -> NDArray[np.float32]:
    """[16 * blocks, kv heads, dim] of pages that follow each other from `first_page` on."""
    block_bytes = cache.num_kv_heads * first_page.row_bytes
    tokens = np.empty((len(blocks) * BLOCK_TOKENS, cache.num_kv_heads, order.shape[1]), np.float32)
    for i, block in enumerate(blocks):
        span = Span(first_page.memory, first_page.offset + block * block_bytes, 1, block_bytes, block_bytes)
        pages = np.ascontiguousarray(device.download(span)).reshape(cache.num_kv_heads, -1)
        values = _decoded(pages, cache.dtype, order)
        tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS] = values.transpose(1, 0, 2)
    return tokens


def _decoded(pages: NDArray[np.uint8], dtype: DType, order: NDArray[np.int64]) -> NDArray[np.float32]:
    """[heads, page bytes] -> [heads, 16, dim]."""
    if dtype is DType.Q8_0:
        num_codes = order.size  # whole blocks: heads are as wide as their pages
        scales = pages[:, num_codes:].view(np.float16).reshape(len(pages), -1, BLOCK_TOKENS).astype(np.float32)
        codes = pages[:, :num_codes].view(np.int8)[:, order].astype(np.float32)
        return codes * scales.transpose(0, 2, 1).repeat(Q8_BLOCK_VALUES, axis=2)
    elements = pages.view(dtype.host_dtype)[:, order]
    if dtype is DType.BF16:
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32)
