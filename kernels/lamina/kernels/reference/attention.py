"""Paged causal attention in numpy. The oracle may gather pages (A-26 binds backends that serve), in bounded tiles.

Pure functions over arrays; knows nothing of buffers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.buffer import BLOCK_TOKENS, DType
from lamina.kernels.reference import kv_codec
from lamina.kernels.reference.storage import require_within

_TILE_SCORES = 1 << 23  # float32 scores held at once: 32 MiB, whatever the context

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Pages:
    """Stored K [blocks, 16, kv heads, key elements] and V [.., value elements] of one layer."""

    k: NDArray[np.generic]
    v: NDArray[np.generic]
    dtype: DType

    def write(self, k: F32, v: F32, slots: I32) -> None:
        """Store k [rows, kv heads, key dim] and v [.., value dim] at slots [rows] (block * 16 + offset)."""
        for pages, values in ((self.k, k), (self.v, v)):
            pages.reshape(-1, *pages.shape[2:])[slots] = kv_codec.encode(values, self.dtype)

    def read(self, blocks: I32, first: int, stop: int) -> tuple[F32, F32]:
        """K and V, float32 [stop - first, kv heads, dim], at positions first .. stop - 1 of a block list.

        Reads no other block: those before a window may have been given to another sequence. Raises InvalidPlan for a
        block that the cache does not have.
        """
        first_block = first // BLOCK_TOKENS
        wanted = blocks[first_block : -(-stop // BLOCK_TOKENS)]
        require_within("attention: blocks", wanted, len(self.k))
        start = first - first_block * BLOCK_TOKENS
        tokens = slice(start, start + stop - first)
        k, v = (pages[wanted].reshape(-1, *pages.shape[2:])[tokens] for pages in (self.k, self.v))
        return kv_codec.decode(k, self.dtype), kv_codec.decode(v, self.dtype)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What turns q.k into probabilities; zero means off. `sinks` f32 [heads]."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: F32 | None = None


def attend(
    q: F32, pages: Pages, positions: I32, row_starts: I32, block_table: I32, rule: ScoreRule, value_dim: int
) -> F32:
    """q [rows, heads, key dim] -> [rows, heads, value dim]; arguments as in `ops.attention`, cut to the step."""
    num_heads = q.shape[1]
    out = np.zeros((len(q), num_heads, value_dim), np.float32)
    for blocks, start, stop in zip(block_table, row_starts[:-1].tolist(), row_starts[1:].tolist(), strict=True):
        if start == stop:
            continue
        longest = int(positions[start:stop].max()) + 1
        step = max(1, _TILE_SCORES // (num_heads * longest))
        for row in range(start, stop, step):
            tile = slice(row, min(row + step, stop))
            out[tile] = _attend_tile(q[tile], pages, positions[tile], blocks, rule)
    return out


def _attend_tile(q: F32, pages: Pages, positions: I32, blocks: I32, rule: ScoreRule) -> F32:
    """Rows of one sequence: q [rows, heads, key dim] -> [rows, heads, value dim]."""
    rows, heads, key_dim = q.shape
    stop = int(positions.max()) + 1
    first = max(0, int(positions.min()) - rule.window + 1) if rule.window > 0 else 0
    k, v = pages.read(blocks, first, stop)
    kv_heads = k.shape[1]
    # [kv heads, rows * group, key dim] @ [kv heads, key dim, keys]: the group shares its K without a copy
    grouped = q.reshape(rows, kv_heads, -1, key_dim).transpose(1, 0, 2, 3).reshape(kv_heads, -1, key_dim)
    scores = (grouped @ k.transpose(1, 2, 0)).reshape(kv_heads, rows, -1, stop - first)
    scores *= np.float32(rule.scale)
    if rule.softcap > 0:
        scores = np.float32(rule.softcap) * np.tanh(scores / np.float32(rule.softcap))
    _hide_unseen(scores, positions, np.arange(first, stop), rule.window)
    weights, denominator = _softmax_parts(scores, rule.sinks)
    mixed = weights.reshape(kv_heads, -1, stop - first) @ v.transpose(1, 0, 2)
    mixed = mixed.reshape(kv_heads, rows, heads // kv_heads, -1) / denominator
    return mixed.transpose(1, 0, 2, 3).reshape(rows, heads, -1)


def _hide_unseen(scores: F32, positions: I32, keys: NDArray[np.int64], window: int) -> None:
    """Set scores [kv heads, rows, group, keys] to -inf where a row does not see the key."""
    distance = positions[:, None] - keys
    hidden = distance < 0
    if window > 0:
        hidden |= distance >= window
    if hidden.any():
        np.copyto(scores, np.float32(-np.inf), where=hidden[None, :, None, :])


def _softmax_parts(scores: F32, sinks: F32 | None) -> tuple[F32, F32]:
    """exp(scores - max) (in place) and its sum over keys [.., 1], with the sink of each head in max and sum."""
    peak = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.reshape(scores.shape[0], 1, -1, 1)
        peak = np.maximum(peak, sink)
    scores -= peak
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    return scores, total if sinks is None else total + np.exp(sink - peak)
