"""Reading a stage's own tensors, and nothing else, from disk into the backend.

Owns the open files while loading. A tensor is read, laid out by the backend and dropped before the next, so host memory
holds about one tensor (the parts of one stacked weight) at a time.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Backend
from lamina.kernels.buffer import Buffer, DType, HostTensor, Weight
from lamina.kernels.quant.dequantize import dequantize
from lamina.rpc_worker.rope import inverse_frequencies
from lamina.rpc_worker.weights import DenseWeights, ExpertsWeights, LayerWeights, StageWeights
from lamina.spec.checkpoint import TensorIndex, TensorInfo
from lamina.spec.errors import InvalidCheckpoint
from lamina.spec.model import (
    ROPE_FACTORS,
    ExpertsFfn,
    Ffn,
    LayerRange,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    companion_names,
)
from lamina.spec.quant import GgmlType

_log = logging.getLogger(__name__)

Progress = Callable[[int], None]  # bytes read so far
_CHUNK_BYTES = 16 * 2**20  # progress and cancellation are looked at between chunks


class TensorReader:
    """Reads byte ranges of tensors; `ranges` is the log of what was read: (file, offset, bytes), `read_s` its time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._files: dict[Path, int] = {}
        self.ranges: list[tuple[Path, int, int]] = []
        self.bytes_read = 0
        self.read_s = 0.0

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def read(self, tensor: TensorInfo) -> HostTensor:
        """The tensor's raw blocks. Raises InvalidCheckpoint if the file ends early or cannot be read."""
        data = np.empty(tensor.num_bytes, np.uint8)
        view = data.data
        done = 0
        while done < tensor.num_bytes:
            piece = view[done : done + _CHUNK_BYTES]
            start = time.perf_counter()
            try:
                got = os.preadv(self._descriptor(tensor.file), [piece], tensor.offset_bytes + done)
            except OSError as error:
                cause = error.strerror or str(error)
                raise InvalidCheckpoint(f"{tensor.file}: tensor {tensor.name} cannot be read: {cause}") from None
            if got == 0:
                raise InvalidCheckpoint(
                    f"{tensor.file}: tensor {tensor.name} ends after {done} of {tensor.num_bytes} bytes; copy it again"
                )
            self.read_s += time.perf_counter() - start
            done += got
            self.bytes_read += got
            self._progress(self.bytes_read)
        self.ranges.append((tensor.file, tensor.offset_bytes, tensor.num_bytes))
        return HostTensor(tensor.type, tensor.rows, tensor.cols, data.reshape(tensor.rows, -1))

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        return self._files[file]


class StageLoader:
    """Builds the `StageWeights` of one layer range. Whatever it allocates is owned by them at once."""

    def __init__(self, backend: Backend, spec: ModelSpec, tensors: TensorIndex, reader: TensorReader) -> None:
        self._backend = backend
        self._spec = spec
        self._tensors = tensors
        self._reader = reader
        self._weights = StageWeights(backend)
        self._frequencies: dict[RopeSpec, Buffer] = {}

    def load(self, layers: LayerRange) -> StageWeights:
        """Read and lay out everything the stage needs; once. On failure nothing stays allocated."""
        start = time.perf_counter()
        try:
            self._fill(layers)
        except BaseException:
            self._weights.free()
            raise
        mib, total_s, read_s = self._reader.bytes_read / 2**20, time.perf_counter() - start, self._reader.read_s
        rates = mib / max(total_s, 1e-9), mib / max(read_s, 1e-9)
        _log.info("layers %s: %.1f MiB in %.2f s, %.0f MiB/s; the disk alone: %.0f MiB/s", layers, mib, total_s, *rates)
        return self._weights

    def _fill(self, layers: LayerRange) -> None:
        spec, weights = self._spec, self._weights
        is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
        if is_first:
            weights.embedding = self._linear("token_embd.weight")
        for layer in spec.layers_of(layers):
            weights.layers.append(self._layer(layer))
        if is_last:
            weights.output_norm = self._norm("output_norm.weight")
            if not spec.tie_embeddings:
                weights.head = self._linear("output.weight")
            elif is_first:
                weights.head = weights.embedding  # one copy serves both ends
            else:
                weights.head = self._linear("token_embd.weight")

    def _layer(self, layer: LayerSpec) -> LayerWeights:
        blk, attention = f"blk.{layer.index}", layer.attention
        qkv_names = ("attn_qkv",) if layer.fused_qkv else ("attn_q", "attn_k", "attn_v")
        return LayerWeights(
            attention_norm=self._norm(f"{blk}.attn_norm.weight"),
            qkv=self._linear(
                *(f"{blk}.{name}.weight" for name in qkv_names),
                biases=[f"{blk}.{name}.bias" for name in qkv_names] if attention.qkv_bias else [],
            ),
            query_norm=self._norm(f"{blk}.attn_q_norm.weight") if attention.qk_norm else None,
            key_norm=self._norm(f"{blk}.attn_k_norm.weight") if attention.qk_norm else None,
            inv_freq=self._inv_freq(attention.rope),
            sinks=self._norm(f"{blk}.attn_sinks.weight") if attention.sinks else None,
            output=self._linear(
                f"{blk}.attn_output.weight", biases=[f"{blk}.attn_output.bias"] if attention.output_bias else []
            ),
            ffn_norm=self._norm(f"{blk}.{layer.ffn_norm}.weight"),
            ffn=self._ffn(layer.ffn, blk),
        )

    def _ffn(self, ffn: Ffn, blk: str) -> DenseWeights | ExpertsWeights:
        if not isinstance(ffn, ExpertsFfn):
            return DenseWeights(
                gate_up=self._linear(f"{blk}.ffn_gate.weight", f"{blk}.ffn_up.weight"),
                down=self._linear(f"{blk}.ffn_down.weight"),
            )
        gate_up = ("ffn_gate_up_exps",) if ffn.fused_gate_up else ("ffn_gate_exps", "ffn_up_exps")
        return ExpertsWeights(
            router=self._linear(f"{blk}.ffn_gate_inp.weight", biases=[f"{blk}.ffn_gate_inp.bias"] if ffn.bias else []),
            gate_up=self._experts(ffn, 2 * ffn.num_experts, *(f"{blk}.{name}" for name in gate_up)),
            down=self._experts(ffn, ffn.num_experts, f"{blk}.ffn_down_exps"),
        )

    def _experts(self, ffn: ExpertsFfn, num_parts: int, *names: str) -> Weight:
        """`num_parts` equal parts from tensors that hold all experts one after another: the parts of an expert, which
        come from one tensor or one from each, become neighbours."""
        in_each = num_parts // len(names)
        parts = [split_rows(self._read(f"{name}.weight"), in_each) for name in names]
        bias = None
        if ffn.bias:
            values = [self._vector(f"{name}.bias").reshape(in_each, -1) for name in names]
            bias = np.stack(values, axis=1).reshape(-1)
        stacked = [part for neighbours in zip(*parts, strict=True) for part in neighbours]
        return self._weights.own(self._backend.load_weight(stacked, bias))

    def _linear(self, *names: str, biases: Sequence[str] = ()) -> Weight:
        bias = np.concatenate([self._vector(name) for name in biases]) if biases else None
        parts = [self._read(name) for name in names]
        return self._weights.own(self._backend.load_weight(parts, bias))

    def _norm(self, name: str) -> Buffer:
        return self._upload(self._vector(name))

    def _inv_freq(self, rope: RopeSpec) -> Buffer:
        """One buffer for all layers that rotate alike."""
        if rope not in self._frequencies:
            factors = self._vector(ROPE_FACTORS) if rope.has_freq_factors else None
            self._frequencies[rope] = self._upload(inverse_frequencies(rope, factors))
        return self._frequencies[rope]

    def _upload(self, values: NDArray[np.float32]) -> Buffer:
        buffer = self._weights.own(self._backend.alloc(values.shape, DType.F32))
        self._backend.upload(buffer, values)
        return buffer

    def _vector(self, name: str) -> NDArray[np.float32]:
        return dequantize(self._read(name)).reshape(-1)

    def _read(self, name: str) -> HostTensor:
        """The tensor, multiplied by the scale that may lie beside it (NVFP4); as float32 then.

        An `input_scale` is for activations quantised to NVFP4, which no backend does, and is not read.
        """
        tensor = self._reader.read(self._tensors[name])
        scale_name, _ = companion_names(name)
        if scale_name not in self._tensors:
            return tensor
        values = dequantize(tensor) * self._vector(scale_name)[0]
        return HostTensor(GgmlType.F32, tensor.rows, tensor.cols, values.view(np.uint8))


def split_rows(tensor: HostTensor, num_parts: int) -> list[HostTensor]:
    """Equal runs of its rows, without a copy."""
    rows = tensor.rows // num_parts
    starts = range(0, tensor.rows, rows)
    return [HostTensor(tensor.type, rows, tensor.cols, tensor.data[start : start + rows]) for start in starts]
