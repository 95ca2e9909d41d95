"""Physical KV caches of a stage and the block tables of its sequences. Owned by the compute thread.

Tables are logical and the same on every stage; the coordinator decides which blocks a sequence has. This module only
checks that a plan fits what came before, and turns it into slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Backend
from lamina.kernels.buffer import DType, KvCache
from lamina.spec.errors import InvalidPlan
from lamina.spec.ids import BlockId, SeqId
from lamina.spec.model import LayerSpec
from lamina.spec.placement import StageSettings
from lamina.spec.step import SeqSlice, StepPlan

Ints = NDArray[np.int32]
_FEW = 8  # rows, up to which integers are faster than arrays


@dataclass(slots=True)
class _SequenceTable:
    row: int  # of the block tables
    next_pos: int
    num_blocks: list[int]  # by group
    room: int  # tokens that its blocks hold, at most the context


class Location(NamedTuple):
    """Where the rows of a step lie. `blocks` have as many columns as the longest context of the step needs."""

    positions: Ints  # [rows]
    row_starts: Ints  # [seqs + 1]
    slots: tuple[Ints, ...]  # by cache group [rows]
    blocks: tuple[Ints, ...]  # by cache group [seqs, blocks]


class SequenceTables:
    """Block tables by sequence; `apply` follows a plan, `locate` gathers what it needs, `remove` forgets a sequence."""

    def __init__(self, num_blocks: tuple[int, ...], settings: StageSettings) -> None:
        self._num_blocks = num_blocks
        self._settings = settings
        self._tables: dict[SeqId, _SequenceTable] = {}
        self._blocks = [np.zeros((0, settings.max_blocks_per_seq), np.int32) for _ in num_blocks]
        self._free_rows: list[int] = []
        # 0, 1, 2, …: what index arrays are cut from, int32 [max(rows, seqs) + 1]
        self._counting = np.arange(max(settings.max_rows, settings.max_seqs) + 1, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._tables)

    def remove(self, seq: SeqId) -> None:
        """Forget a sequence; an unknown one is fine (it may have been cancelled before its first step)."""
        table = self._tables.pop(seq, None)
        if table is not None:
            self._free_rows.append(table.row)

    def clear(self) -> None:
        """Forget all."""
        self._tables.clear()
        self._free_rows = list(range(len(self._blocks[0]))) if self._blocks else []

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
                table = self._tables[piece.seq] = _SequenceTable(self._new_row(), 0, [0] * len(self._num_blocks), 0)
            if any(piece.new_blocks):
                self._append(table, piece.new_blocks)
            table.next_pos = piece.pos + piece.num_tokens

    def locate(self, plan: StepPlan) -> Location:
        """The arrays of a plan that has been applied."""
        slices, tables, block_tokens = plan.slices, self._tables, self._settings.block_tokens
        count, counting = len(slices), self._counting
        num_rows = plan.num_rows
        if num_rows == count <= _FEW:
            return self._locate_few([tables[piece.seq].row for piece in slices], [piece.pos for piece in slices])
        table_rows = np.array([tables[piece.seq].row for piece in slices], np.int32)
        firsts = np.array([piece.pos for piece in slices], np.int32)
        if num_rows == count:  # decode: a row each; this path is most steps, and short
            positions, row_starts, table_of_row = firsts, counting[: count + 1], table_rows
        else:
            counts = np.array([piece.num_tokens for piece in slices], np.int32)
            row_starts = np.zeros(count + 1, np.int32)
            np.cumsum(counts, out=row_starts[1:])
            positions = counting[: row_starts[-1]] + np.repeat(firsts - row_starts[:-1], counts)
            table_of_row = np.repeat(table_rows, counts)
        indices, offsets = np.divmod(positions, block_tokens)
        width = int(indices.max()) + 1
        slots = tuple(table[table_of_row, indices] * block_tokens + offsets for table in self._blocks)
        return Location(positions, row_starts, slots, tuple(table[table_rows, :width] for table in self._blocks))

    def _locate_few(self, table_rows: list[int], positions: list[int]) -> Location:
        """A row each of few sequences: arrays of few values cost as much as of many, integers do not."""
        block_tokens, tables = self._settings.block_tokens, self._blocks
        places = [
            (row, pos // block_tokens, pos % block_tokens) for row, pos in zip(table_rows, positions, strict=True)
        ]
        width = max(positions) // block_tokens + 1
        slots = [[table.item(row, index) * block_tokens + offset for row, index, offset in places] for table in tables]
        seqs = slice(table_rows[0], table_rows[0] + 1) if len(table_rows) == 1 else table_rows
        return Location(
            np.array(positions, np.int32),
            self._counting[: len(places) + 1],
            tuple([np.array(of_group, np.int32) for of_group in slots]),
            tuple([table[seqs, :width] for table in tables]),
        )

    def blocks_of(self, seq: SeqId, group: int) -> Ints:
        """The sequence's table row, int32 [max blocks]."""
        table: Ints = self._blocks[group][self._tables[seq].row]
        return table

    def _append(self, table: _SequenceTable, new_blocks: tuple[tuple[BlockId, ...], ...]) -> None:
        for group, blocks in enumerate(new_blocks):
            start = table.num_blocks[group]
            table.num_blocks[group] = end = start + len(blocks)
            self._blocks[group][table.row, start:end] = blocks
        settings = self._settings
        table.room = min(min(table.num_blocks) * settings.block_tokens, settings.max_context)

    def _new_row(self) -> int:
        if not self._free_rows:
            held = len(self._blocks[0])
            more = max(self._settings.max_seqs, held)
            self._blocks = [
                np.concatenate([table, np.zeros((more, table.shape[1]), np.int32)]) for table in self._blocks
            ]
            self._free_rows = list(range(held, held + more))
        row = self._free_rows.pop()
        for table in self._blocks:
            table[row] = 0
        return row

    def _check(self, piece: SeqSlice) -> None:
        table = self._tables.get(piece.seq)
        end = piece.pos + piece.num_tokens
        if table is not None and table.next_pos == piece.pos and end <= table.room and not any(piece.new_blocks):
            return
        where = f"sequence {piece.seq} at position {piece.pos}"
        if table is not None and table.next_pos != piece.pos:
            raise InvalidPlan(f"{where}: its next position is {table.next_pos}")
        if end > self._settings.max_context:
            raise InvalidPlan(f"{where}: {end} tokens exceed the context of {self._settings.max_context}")
        for group, blocks in enumerate(piece.new_blocks):
            held = 0 if table is None else table.num_blocks[group]
            needed = -(-end // self._settings.block_tokens)
            if not needed <= held + len(blocks) <= self._settings.max_blocks_per_seq:
                raise InvalidPlan(f"{where}: {held + len(blocks)} blocks in group {group}, {needed} needed")
            if any(not 0 <= block < self._num_blocks[group] for block in blocks):
                raise InvalidPlan(f"{where}: block outside the pool of {self._num_blocks[group]} in group {group}")


def logit_rows_of(plan: StepPlan, last_rows: Ints) -> Ints:
    """The rows of a step whose logits are wanted, int32; `last_rows` int32 [slices]."""
    if plan.num_scored:
        ends = zip(plan.slices, last_rows + 1, plan.num_scored, strict=True)
        ranges = [np.arange(end - piece.want_logits - scored, end) for piece, end, scored in ends]
        return np.concatenate(ranges).astype(np.int32)
    wanted = [piece.want_logits for piece in plan.slices]
    return last_rows if all(wanted) else last_rows[wanted]


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
