"""Decode and prefill rates of the CUDA backend alone, on stacks of random weights in the shapes of real models.

Runs at the level of the Backend interface: every op of every layer, KV writes and argmax included; no worker, no gRPC,
no sampling parameters. Figures are tokens per second. Run on a machine with an NVIDIA GPU:

    PYTHONPATH=proto:coordinator:rpc_worker:kernels:tests python benchmarks/cuda_backend.py --json results.json
"""

import argparse
import datetime
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cuda_peer import peer_of
from gguf import GGMLQuantizationType

from lamina.kernels import ops
from lamina.kernels.backend import Backend
from lamina.kernels.buffer import (
    BLOCK_TOKENS,
    Buffer,
    DType,
    Extent,
    HostTensor,
    KvCache,
    StepLimits,
    StepShape,
    Weight,
)
from lamina.kernels.cuda.backend import CudaBackend
from lamina.spec.quant import GgmlType
from support.tiny import random_blocks

Q4, Q6 = GgmlType.Q4_K, GgmlType.Q6_K


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a llama-like decoder."""

    name: str
    layers: int
    hidden: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    biases: bool


QWEN_7B = ModelShape("qwen7b", 28, 3584, 18944, 28, 4, 128, 152064, True)
LLAMA_8B = ModelShape("llama8b", 32, 4096, 14336, 32, 8, 128, 128256, False)
LLAMA_1B = ModelShape("llama1b", 16, 2048, 8192, 32, 8, 64, 128256, False)
MODELS = {shape.name: shape for shape in (QWEN_7B, LLAMA_8B, LLAMA_1B)}


def uses_q6(layer: int, layers: int) -> bool:
    """Whether Q4_K_M keeps attn_v and ffn_down of this layer as Q6_K."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights and cache of one layer."""

    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    cache: KvCache


class Stack:
    """A whole model on a backend, with the arena for steps of up to `max_rows` rows."""

    def __init__(self, backend: Backend, shape: ModelShape, max_rows: int, max_seqs: int, num_blocks: int) -> None:
        self.backend, self.shape = backend, shape
        self._rng = np.random.default_rng(0)
        self._tensors: dict[tuple[GgmlType, int, int], HostTensor] = {}
        s, kv = shape, shape.kv_heads * shape.head_dim
        q = shape.heads * shape.head_dim
        limits = StepLimits(max_rows, max_seqs, max_seqs, num_blocks)
        backend.reserve_workspace(limits, max(s.ff, s.hidden, q), max(s.vocab, 2 * s.ff))
        bias = self._normal(q + 2 * kv, scale=0.1) if s.biases else None
        self.layers = [self._layer(i, q, kv, bias, num_blocks) for i in range(s.layers)]
        self.table = backend.load_weight([self._tensor(Q4, s.vocab, s.hidden)])
        self.head = backend.load_weight([self._tensor(Q6, s.vocab, s.hidden)])
        self.norm = self._upload(self._normal(s.hidden, mean=1.0), Extent.FIXED)
        half = s.head_dim // 2
        self.inv_freq = self._upload((1e6 ** (-np.arange(half) / half)).astype(np.float32), Extent.FIXED)

        def rows(columns: int, extent: Extent = Extent.ROWS, count: int = max_rows) -> Buffer:
            return backend.alloc((count, columns), DType.F32, extent)

        def ints(count: int, extent: Extent) -> Buffer:
            return backend.alloc((count,), DType.I32, extent)

        self.x, self.normed, self.qkv = rows(s.hidden), rows(s.hidden), rows(q + 2 * kv)
        self.attended, self.gated = rows(q), rows(s.ff)
        self.last = rows(s.hidden, Extent.LOGIT_ROWS, max_seqs)
        self.logits = rows(s.vocab, Extent.LOGIT_ROWS, max_seqs)
        self.tokens, self.positions, self.slots = (ints(max_rows, Extent.ROWS) for _ in range(3))
        self.row_starts = ints(max_seqs + 1, Extent.FIXED)
        self.block_table = backend.alloc((max_seqs, num_blocks), DType.I32, Extent.SEQS)
        self.logit_rows, self.next = ints(max_seqs, Extent.LOGIT_ROWS), ints(max_seqs, Extent.LOGIT_ROWS)

    def _normal(self, *shape: int, mean: float = 0.0, scale: float = 0.1) -> np.ndarray:
        return self._rng.normal(mean, scale, shape).astype(np.float32)

    def _tensor(self, kind: GgmlType, rows: int, cols: int) -> HostTensor:
        """One random matrix per type and shape serves all layers; each has its own copy on the device."""
        key = (kind, rows, cols)
        if key not in self._tensors:
            blocks = random_blocks(GGMLQuantizationType(kind.value), rows, cols, self._rng)
            self._tensors[key] = HostTensor(kind, rows, cols, blocks)
        return self._tensors[key]

    def _layer(self, index: int, q: int, kv: int, bias: np.ndarray | None, num_blocks: int) -> Layer:
        s, load = self.shape, self.backend.load_weight
        fine = Q6 if uses_q6(index, s.layers) else Q4
        key = self._tensor(Q4, kv, s.hidden)
        return Layer(
            load([self._tensor(Q4, q, s.hidden), key, self._tensor(fine, kv, s.hidden)], bias),
            load([self._tensor(Q4, s.hidden, q)]),
            load([self._tensor(Q4, s.ff, s.hidden)] * 2),
            load([self._tensor(fine, s.hidden, s.ff)]),
            self.backend.alloc_kv(num_blocks, s.kv_heads, s.head_dim, s.head_dim, DType.F16),
        )

    def _upload(self, values: np.ndarray, extent: Extent) -> Buffer:
        buffer = self.backend.alloc(values.shape, DType.F32, extent)
        self.backend.upload(buffer, values)
        return buffer

    @property
    def weight_bytes(self) -> int:
        """What a decode step of one row reads of the weights."""
        parts = (weight for layer in self.layers for weight in (layer.qkv, layer.out, layer.gate_up, layer.down))
        return sum(weight.num_bytes for weight in parts) + self.head.num_bytes

    def stage_inputs(self, seqs: int, rows_each: int, depth: int) -> StepShape:
        """`seqs` sequences with `depth` tokens cached, `rows_each` new rows; each wants its last row's logits."""
        rows, upload = seqs * rows_each, self.backend.upload
        blocks_each = -(-(depth + rows_each) // BLOCK_TOKENS)
        order = np.random.default_rng(1).permutation(seqs * blocks_each).reshape(seqs, blocks_each)
        positions = np.tile(np.arange(depth, depth + rows_each), seqs)
        owner = np.repeat(np.arange(seqs), rows_each)
        slots = order[owner, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        table = np.zeros((seqs, self.block_table.num_columns), np.int32)
        table[:, :blocks_each] = order
        upload(self.tokens, np.random.default_rng(2).integers(0, self.shape.vocab, rows).astype(np.int32))
        upload(self.positions, positions.astype(np.int32))
        upload(self.slots, slots.astype(np.int32))
        upload(self.row_starts, (np.arange(seqs + 1) * rows_each).astype(np.int32))
        upload(self.block_table, table)
        upload(self.logit_rows, ((np.arange(seqs) + 1) * rows_each - 1).astype(np.int32))
        return StepShape(rows, seqs, seqs)

    def fill_caches(self, seqs: int, depth: int) -> None:
        """Random keys and values at every position below `depth`."""
        rows = self.x.shape[0]
        kv = self.shape.kv_heads * self.shape.head_dim
        k, v = (self._upload(self._normal(rows, kv, scale=1.0), Extent.ROWS) for _ in range(2))
        used = seqs * -(-(depth + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        for first in range(0, used, rows):
            count = min(rows, used - first)
            self.backend.upload(self.slots, np.arange(first, first + count, dtype=np.int32))
            self.backend.set_shape(StepShape(count, 1, 0))
            for layer in self.layers:
                ops.kv_write(self.backend, k, v, self.slots, layer.cache)
        self.backend.free(k)
        self.backend.free(v)

    def launch_all(self) -> None:
        """One step: tokens in, argmax out."""
        b = self.backend
        ops.embed(b, self.tokens, self.table, self.x)
        for layer in self.layers:
            self.launch_attention(layer)
            self.launch_mlp(layer)
        self.launch_head()

    def launch_attention(self, layer: Layer) -> None:
        b, s = self.backend, self.shape
        q_columns, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        q = self.qkv.columns(0, q_columns)
        k, v = (self.qkv.columns(q_columns + i * kv, q_columns + (i + 1) * kv) for i in range(2))
        ops.rms_norm(b, self.x, self.norm, self.normed, 1e-6)
        ops.linear(b, self.normed, layer.qkv, self.qkv)
        for part in (q, k):
            ops.rope(b, part, self.positions, self.inv_freq, head_dim=s.head_dim, layout="neox")
        ops.kv_write(b, k, v, self.slots, layer.cache)
        where = (self.positions, self.row_starts, self.block_table)
        ops.attention(b, q, layer.cache, *where, self.attended, scale=s.head_dim**-0.5)
        ops.linear(b, self.attended, layer.out, self.x, accumulate=True)

    def launch_mlp(self, layer: Layer) -> None:
        b = self.backend
        ops.rms_norm(b, self.x, self.norm, self.normed, 1e-6)
        ops.gated_linear(b, self.normed, layer.gate_up, self.gated, "silu")
        ops.linear(b, self.gated, layer.down, self.x, accumulate=True)

    def launch_head(self) -> None:
        b = self.backend
        ops.gather_rows(b, self.x, self.logit_rows, self.last)
        ops.rms_norm(b, self.last, self.norm, self.last, 1e-6)
        ops.linear(b, self.last, self.head, self.logits)
        ops.argmax(b, self.logits, self.next)


def median_seconds(backend: Backend, run: Callable[[], None], repeats: int = 5, inner: int = 20) -> float:
    """Median over `repeats` of the mean time of `inner` runs back to back, after a warm-up."""
    run()
    run()
    times = []
    for _ in range(repeats):
        backend.synchronize()
        start = time.perf_counter()
        for _ in range(inner):
            run()
        backend.synchronize()
        times.append((time.perf_counter() - start) / inner)
    return sorted(times)[len(times) // 2]


def step_seconds(stack: Stack, shape: StepShape, inner: int) -> float:
    """Seconds of one step: a graph replay where the backend records steps of this size, else op by op."""
    backend = stack.backend
    if backend.graph_bucket(shape) is None:
        backend.set_shape(shape)
        return median_seconds(backend, stack.launch_all, inner=inner)
    graph = backend.capture(stack.launch_all, shape)
    seconds = median_seconds(backend, lambda: backend.replay(graph, shape), inner=inner)
    graph.destroy()
    return seconds


def decode_rate(stack: Stack, seqs: int, depth: int) -> float:
    """Tokens per second over all sequences."""
    return seqs / step_seconds(stack, stack.stage_inputs(seqs, 1, depth), 20)


def prefill_rate(stack: Stack, rows: int) -> float:
    """Tokens per second of one chunk of `rows` rows of one sequence."""
    return rows / step_seconds(stack, stack.stage_inputs(1, rows, 0), 4)


def measure(backend: Backend, shape: ModelShape, batches: Sequence[int], depths: Sequence[int]) -> dict[str, float]:
    """All figures of one model."""
    blocks = max(max(batches) * 2, -(-(max(depths) + 2048) // BLOCK_TOKENS) + 1)
    stack = Stack(backend, shape, 2048, max(batches), blocks)
    figures: dict[str, float] = {}
    for depth in depths:
        stack.fill_caches(1, depth)
        figures[f"cuda.backend.decode.{shape.name}.b1.d{depth}"] = decode_rate(stack, 1, depth)
    for seqs in batches:
        if seqs > 1:
            stack.fill_caches(seqs, 0)
            figures[f"cuda.backend.decode.{shape.name}.b{seqs}.d0"] = decode_rate(stack, seqs, 0)
    for rows in (512, 2048):
        figures[f"cuda.backend.prefill.{shape.name}.p{rows}"] = prefill_rate(stack, rows)
    read = stack.weight_bytes * figures[f"cuda.backend.decode.{shape.name}.b1.d0"]
    figures[f"cuda.backend.decode.{shape.name}.b1.d0.weight_bytes_per_s"] = read
    return figures


def report(figures: dict[str, float], machine: str) -> dict[str, object]:
    """The figures as written to JSON."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    entries = []
    for name, value in figures.items():
        peer = peer_of(name)
        unit = "bytes/s" if name.endswith("bytes_per_s") else "tokens/s"
        ratio = None if peer is None else round(value / peer, 3)
        entries.append({"name": name, "value": round(value, 1), "unit": unit, "peer": peer, "ratio": ratio})
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"commit": commit.stdout.strip(), "date": today, "machine": machine, "figures": entries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--models", default=",".join(MODELS))
    args = parser.parse_args()
    figures: dict[str, float] = {}
    machine = ""
    for name in args.models.split(","):
        backend = CudaBackend()
        machine = backend.device_facts().name
        figures |= measure(backend, MODELS[name], (1, 8, 32), (0, 8192))
        backend.close()
    result = report(figures, machine)
    for name, value in figures.items():
        peer = peer_of(name)
        print(f"{name:50s} {value:16,.1f}" + ("" if peer is None else f"   {value / peer:.2f} x peer"))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
