"""Physical KV caches of a stage and the block tables of its sequences. Owned by the compute thread.

Tables are logical and the same on every stage; the coordinator decides which blocks a sequence has. This module only
checks that a plan fits what came before, and turns it into slots.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Backend
from lamina.kernels.buffer import DType, KvCache
from lamina.spec.errors import InvalidPlan
from lamina.spec.ids import BlockId, SeqId
from lamina.spec.model import LayerSpec
from lamina.spec.placement import StageSettings
from lamina.spec.step import SeqSlice, StepPlan


@dataclass
class _SequenceTable:
    next_pos: int
    num_blocks: list[int]  # by group
    blocks: list[NDArray[np.int32]]  # by group [max blocks]


class SequenceTables:
    """Block tables by sequence; `apply` follows a plan, `remove` forgets a sequence."""

    def __init__(self, num_blocks: tuple[int, ...], settings: StageSettings) -> None:
        self._num_blocks = num_blocks
        self._settings = settings
        self._tables: dict[SeqId, _SequenceTable] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def remove(self, seq: SeqId) -> None:
        """Forget a sequence; an unknown one is fine (it may have been cancelled before its first step)."""
        self._tables.pop(seq, None)

    def clear(self) -> None:
        """Forget all."""
        self._tables.clear()

    def apply(self, plan: StepPlan) -> None:
        """Take a plan's new blocks. Raises InvalidPlan, before anything is changed, if it does not fit."""
        for piece in plan.slices:
            self._check(piece)
        for copy in plan.block_copies:
            if (
                not (0 <= copy.group < len(self._num_blocks))
                or max(copy.source, copy.target) >= self._num_blocks[copy.group]
            ):
                raise InvalidPlan(f"step {plan.step}: block copy {copy} is outside the pool")
        for piece in plan.slices:
            table = self._tables.get(piece.seq)
            if table is None:
                width = self._settings.max_blocks_per_seq
                groups = range(len(self._num_blocks))
                table = _SequenceTable(piece.pos, [0 for _ in groups], [np.zeros(width, np.int32) for _ in groups])
                self._tables[piece.seq] = table
            for group, blocks in enumerate(piece.new_blocks):
                start = table.num_blocks[group]
                table.blocks[group][start : start + len(blocks)] = blocks
                table.num_blocks[group] = start + len(blocks)
            table.next_pos = piece.end

    def blocks_of(self, seq: SeqId, group: int) -> NDArray[np.int32]:
        """The sequence's table row, int32 [max blocks]."""
        return self._tables[seq].blocks[group]

    def _check(self, piece: SeqSlice) -> None:
        where = f"sequence {piece.seq} at position {piece.pos}"
        table = self._tables.get(piece.seq)
        if table is not None and table.next_pos != piece.pos:
            raise InvalidPlan(f"{where}: its next position is {table.next_pos}")
        if piece.end > self._settings.max_context:
            raise InvalidPlan(f"{where}: {piece.end} tokens exceed the context of {self._settings.max_context}")
        for group, blocks in enumerate(piece.new_blocks):
            held = 0 if table is None else table.num_blocks[group]
            needed = -(-piece.end // self._settings.block_tokens)
            if not needed <= held + len(blocks) <= self._settings.max_blocks_per_seq:
                raise InvalidPlan(f"{where}: {held + len(blocks)} blocks in group {group}, {needed} needed")
            if any(not 0 <= block < self._num_blocks[group] for block in blocks):
                raise InvalidPlan(f"{where}: block outside the pool of {self._num_blocks[group]} in group {group}")


class KvPool:
    """One cache per layer, the same number of blocks for every layer of a group."""

    def __init__(
        self, backend: Backend, layers: tuple[LayerSpec, ...], num_blocks: tuple[int, ...], settings: StageSettings
    ) -> None:
        """Allocate all caches. Raises CapacityExceeded or Unsupported; nothing stays allocated then."""
        self._backend = backend
        self._layers = layers
        self.num_blocks = num_blocks
        self.caches: list[KvCache] = []
        dtype = DType(settings.kv_dtype)
        try:
            for layer in layers:
                shape = layer.attention
                self.caches.append(
                    backend.alloc_kv(
                        num_blocks[layer.cache_group], shape.num_kv_heads, shape.key_dim, shape.value_dim, dtype
                    )
                )
        except BaseException:
            self.free()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(cache.num_bytes for cache in self.caches)

    def copy_block(self, group: int, source: BlockId, target: BlockId) -> None:
        """Copy a block in every layer of the group."""
        for layer, cache in zip(self._layers, self.caches, strict=True):
            if layer.cache_group == group:
                self._backend.copy_kv_block(cache, source, target)

    def free(self) -> None:
        """Give the memory back."""
        while self.caches:
            self._backend.free_kv(self.caches.pop())
