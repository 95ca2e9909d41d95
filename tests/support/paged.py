"""Sequences with paged K and V on a backend: scattered blocks, garbage wherever nothing may be read."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.kernels import ops
from lamina.kernels.buffer import BLOCK_TOKENS, Buffer, DType, Extent, KvCache
from support import op_oracle
from support.backends import Bench

F32 = NDArray[np.float32]
GARBAGE = 1e4  # large enough to show in any result that read it


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts and sizes of a layer."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int


class PagedSequences:
    """K and V of sequences of given lengths, and one cache whose every slot starts as garbage.

    Sequence s has keys k[s] [length, kv heads, key dim] and blocks[s]; blocks of all sequences are shuffled together.
    """

    def __init__(self, bench: Bench, heads: Heads, lengths: list[int], dtype: DType) -> None:
        self.bench = bench
        self.heads = heads
        self.lengths = lengths
        needed = [-(-length // BLOCK_TOKENS) for length in lengths]
        self.num_blocks = sum(needed) + 3
        order = bench.rng.permutation(self.num_blocks)
        ends = np.cumsum(needed)
        self.blocks = [order[end - count : end] for end, count in zip(ends, needed, strict=True)]
        self.k = [bench.normal(length, heads.num_kv_heads, heads.key_dim) for length in lengths]
        self.v = [bench.normal(length, heads.num_kv_heads, heads.value_dim) for length in lengths]
        self.cache: KvCache = bench.backend.alloc_kv(
            self.num_blocks, heads.num_kv_heads, heads.key_dim, heads.value_dim, dtype
        )
        self.spoil(range(self.num_blocks))

    def spoil(self, blocks: "range | NDArray[np.int64]", key: float = GARBAGE, value: float = -GARBAGE) -> None:
        """Overwrite whole blocks with garbage."""
        slots = np.concatenate([np.arange(BLOCK_TOKENS) + block * BLOCK_TOKENS for block in blocks])
        kv_heads = self.heads.num_kv_heads
        k = np.full((len(slots), kv_heads * self.heads.key_dim), key)
        v = np.full((len(slots), kv_heads * self.heads.value_dim), value)
        self._write(k, v, slots)

    def write(self, pieces: list[tuple[int, int, int]]) -> None:
        """Store positions start .. stop - 1 of each (sequence, start, stop) in one launch."""
        k = np.concatenate([self.k[s][start:stop].reshape(stop - start, -1) for s, start, stop in pieces])
        v = np.concatenate([self.v[s][start:stop].reshape(stop - start, -1) for s, start, stop in pieces])
        self._write(k, v, np.concatenate([self.slots(s, start, stop) for s, start, stop in pieces]))

    def write_all(self) -> None:
        self.write([(s, 0, length) for s, length in enumerate(self.lengths)])

    def slots(self, seq: int, start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop)
        return self.blocks[seq][positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS

    def table(self, seqs: list[int], spare_columns: int = 2) -> Buffer:
        """The block table of these sequences, zero beyond their blocks."""
        width = max(len(self.blocks[s]) for s in seqs) + spare_columns
        table = np.zeros((len(seqs), width), np.int32)
        for row, s in enumerate(seqs):
            table[row, : len(self.blocks[s])] = self.blocks[s]
        return self.bench.ints(table, Extent.SEQS)

    def attend(
        self,
        q: F32,
        pieces: list[tuple[int, int, int]],
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: F32 | None = None,
        view: bool = False,
    ) -> F32:
        """Attention of q [rows, heads, key dim], whose rows are the pieces' positions in order, in one launch."""
        bench, heads = self.bench, self.heads
        starts = np.cumsum([0, *(stop - start for _, start, stop in pieces)])
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in pieces])
        out = bench.output(len(q), heads.num_heads * heads.value_dim, view=view)
        queries = bench.floats(q.reshape(len(q), -1), view=view)
        bench.step(len(q), len(pieces))
        ops.attention(
            bench.backend,
            queries,
            self.cache,
            bench.ints(positions),
            bench.ints([*starts, 999, 999], Extent.FIXED),
            self.table([s for s, _, _ in pieces]),
            out,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else bench.vector(sinks),
        )
        found: F32 = np.asarray(bench.read(out), np.float32)
        return found.reshape(len(q), heads.num_heads, heads.value_dim)

    def expected(
        self,
        q: F32,
        pieces: list[tuple[int, int, int]],
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: F32 | None = None,
    ) -> NDArray[np.float64]:
        """The same in float64, from K and V as the cache's dtype rounds them."""
        rows: list[NDArray[np.float64]] = []
        first = 0
        for s, start, stop in pieces:
            k, v = (op_oracle.stored(values[s], self.cache.dtype) for values in (self.k, self.v))
            piece = q[first : first + stop - start]
            where = list(range(start, stop))
            rows.append(
                op_oracle.attention(piece, k, v, where, scale=scale, window=window, softcap=softcap, sinks=sinks)
            )
            first += stop - start
        return np.concatenate(rows)

    def _write(self, k: F32, v: F32, slots: NDArray[np.int64]) -> None:
        self.bench.step(len(slots))
        ops.kv_write(self.bench.backend, self.bench.floats(k), self.bench.floats(v), self.bench.ints(slots), self.cache)
