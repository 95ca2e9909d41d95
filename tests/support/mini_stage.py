"""A whole model of one layer on a backend, as a stage would launch it: what recording is tested with."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.kernels import ops
from lamina.kernels.buffer import BLOCK_TOKENS, Buffer, DType, Extent, StepLimits, StepShape
from lamina.spec.quant import GgmlType
from support.backends import Bench

HIDDEN, FF, VOCAB = 64, 96, 50
HEADS, KV_HEADS, DIM = 4, 2, 32
MAX_BLOCKS, NUM_BLOCKS = 8, 20
LIMITS = StepLimits(max_rows=24, max_seqs=4, max_logit_rows=4, max_blocks_per_seq=MAX_BLOCKS)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence at positions start .. , and the sequence's blocks."""

    start: int
    tokens: list[int]
    blocks: list[int]


class MiniStage:
    """Arena, weights, cache, and `launch_all`, which launches embed, one layer, head and argmax."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        backend = self.backend = bench.backend
        backend.reserve_workspace(LIMITS, FF, 2 * FF)
        kind = GgmlType.Q8_0
        self.table = bench.weight((kind, VOCAB), cols=HIDDEN)[0]
        qkv_parts = ((kind, HEADS * DIM), (kind, KV_HEADS * DIM), (kind, KV_HEADS * DIM))
        self.w_qkv = bench.weight(*qkv_parts, cols=HIDDEN, bias=True)[0]
        self.w_out = bench.weight((kind, HIDDEN), cols=HEADS * DIM)[0]
        self.w_gate_up = bench.weight((kind, FF), (kind, FF), cols=HIDDEN)[0]
        self.w_down = bench.weight((kind, HIDDEN), cols=FF)[0]
        self.norm = bench.vector(bench.normal(HIDDEN))
        self.inv_freq = bench.vector(1e4 ** (-np.arange(DIM // 2) / (DIM // 2)))
        self.cache = backend.alloc_kv(NUM_BLOCKS, KV_HEADS, DIM, DIM, DType.F32)
        rows, seqs, logit_rows = LIMITS.max_rows, LIMITS.max_seqs, LIMITS.max_logit_rows

        def ints(shape: tuple[int, ...], extent: Extent) -> Buffer:
            return backend.alloc(shape, DType.I32, extent)

        def floats(columns: int, extent: Extent = Extent.ROWS, count: int = rows) -> Buffer:
            return backend.alloc((count, columns), DType.F32, extent)

        self.tokens, self.positions, self.slots = (ints((rows,), Extent.ROWS) for _ in range(3))
        self.row_starts = ints((seqs + 1,), Extent.FIXED)
        self.block_table = ints((seqs, MAX_BLOCKS), Extent.SEQS)
        self.indices = ints((logit_rows,), Extent.LOGIT_ROWS)
        self.x, self.normed, self.mixed, self.act = (floats(c) for c in (HIDDEN, HIDDEN, HEADS * DIM, FF))
        self.qkv = floats((HEADS + 2 * KV_HEADS) * DIM)
        self.picked = floats(HIDDEN, Extent.LOGIT_ROWS, logit_rows)
        self.logits = floats(VOCAB, Extent.LOGIT_ROWS, logit_rows)
        self.sampled = ints((logit_rows,), Extent.LOGIT_ROWS)

    def buffers(self) -> list[Buffer]:
        """Everything the arena holds."""
        return [value for value in vars(self).values() if isinstance(value, Buffer)]

    def launch_all(self) -> None:
        """The ops of one step, at whatever shape is in force."""
        b, k_start, v_start = self.backend, HEADS * DIM, (HEADS + KV_HEADS) * DIM
        q, k = self.qkv.columns(0, k_start), self.qkv.columns(k_start, v_start)
        v = self.qkv.columns(v_start, v_start + KV_HEADS * DIM)
        ops.embed(b, self.tokens, self.table, self.x, scale=20.0)
        ops.rms_norm(b, self.x, self.norm, self.normed, 1e-5)
        ops.linear(b, self.normed, self.w_qkv, self.qkv)
        ops.rope(b, q, self.positions, self.inv_freq, head_dim=DIM, layout="neox")
        ops.rope(b, k, self.positions, self.inv_freq, head_dim=DIM, layout="neox")
        ops.kv_write(b, k, v, self.slots, self.cache)
        scale = DIM**-0.5
        ops.attention(
            b, q, self.cache, self.positions, self.row_starts, self.block_table, self.mixed, scale=scale, window=30
        )
        ops.linear(b, self.mixed, self.w_out, self.x, accumulate=True)
        ops.rms_norm(b, self.x, self.norm, self.normed, 1e-5)
        ops.gated_linear(b, self.normed, self.w_gate_up, self.act, "silu")
        ops.linear(b, self.act, self.w_down, self.x, accumulate=True)
        ops.gather_rows(b, self.x, self.indices, self.picked)
        ops.linear(b, self.picked, self.table, self.logits)
        ops.argmax(b, self.logits, self.sampled)

    def stage_inputs(self, pieces: list[Piece], logit_rows: list[int]) -> StepShape:
        """Upload what a step reads; its shape."""
        starts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)])
        positions = [piece.start + i for piece in pieces for i in range(len(piece.tokens))]
        blocks = [piece.blocks[(piece.start + i) // BLOCK_TOKENS] for piece in pieces for i in range(len(piece.tokens))]
        slots = np.array(blocks) * BLOCK_TOKENS + np.array(positions) % BLOCK_TOKENS
        table = np.zeros((len(pieces), MAX_BLOCKS), np.int32)
        for row, piece in zip(table, pieces, strict=True):
            row[: len(piece.blocks)] = piece.blocks
        for buffer, values in (
            (self.tokens, [token for piece in pieces for token in piece.tokens]),
            (self.positions, positions),
            (self.slots, slots),
            (self.row_starts, starts),
            (self.block_table, table),
            (self.indices, logit_rows),
        ):
            self.backend.upload(buffer, np.asarray(values, np.int32))
        return StepShape(int(starts[-1]), len(pieces), len(logit_rows))

    def results(self, shape: StepShape) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
        """Hidden rows, logits and greedy tokens of the step."""
        return (
            self.backend.download(self.x, shape.num_rows),
            self.backend.download(self.logits, shape.num_logit_rows),
            self.backend.download(self.sampled, shape.num_logit_rows),
        )
