"""Byte arithmetic of a stage: what its arena, its cache blocks and its weights occupy. Exact, no device asked.

The worker allocates from `arena_layout` and the planner sums it, so that what is planned is what is taken.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lamina.spec.checkpoint import TensorIndex
from lamina.spec.model import (
    ExpertsFfn,
    Ffn,
    LayerRange,
    ModelSpec,
    companion_names,
    end_tensor_shapes,
    is_vector,
    layer_tensor_shapes,
)
from lamina.spec.placement import StageSettings
from lamina.spec.quant import GgmlType, quant_format
from lamina.spec.step import BLOCK_TOKENS

# Bits per cached value; q8_0 is 32 int8 and an f16 scale.
KV_BITS: Mapping[str, float] = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5}
_ITEM_BYTES = 4  # arena elements are f32 or i32
NUM_KEPT_STEPS = 8  # of which the last stage keeps the tokens, for a stage 0 in the same process
NUM_SAMPLING_PARAMS = 6  # of a row that the device draws a token from, see `ops.sample`


@dataclass(frozen=True, slots=True)
class ArenaBuffer:
    """One arena buffer: `dtype` "f32" or "i32", `extent` what its leading dimension counts ("fixed" = as it stands).

    Those that are `staged` are written by the host before every step. They lie side by side, in order, so that one
    transfer brings them all.
    """

    name: str
    rows: int
    columns: int
    dtype: str
    extent: str
    staged: bool = False

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.rows * self.columns * _ITEM_BYTES


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on its device."""

    weight_bytes: int
    kv_bytes: int
    arena_bytes: int

    @property
    def total_bytes(self) -> int:
        """All three together."""
        return self.weight_bytes + self.kv_bytes + self.arena_bytes


def arena_layout(spec: ModelSpec, layers: LayerRange, settings: StageSettings) -> tuple[ArenaBuffer, ...]:
    """Every buffer of a stage, sized for the worst step that the settings allow (B-27, B-28).

    Only the first stage has token ids, only the last has logits.
    """
    owned = spec.layers_of(layers)
    qkv = max(part.query_width + part.key_width + part.value_width for part in (layer.attention for layer in owned))
    rows, logit_rows = settings.max_rows, settings.max_logit_rows
    buffers = [
        *_staged_layout(spec, layers, settings),
        ArenaBuffer("hidden", rows, spec.hidden, "f32", "rows"),
        ArenaBuffer("norm", rows, spec.hidden, "f32", "rows"),
        ArenaBuffer("qkv", rows, qkv, "f32", "rows"),
        ArenaBuffer("attention", rows, max(layer.attention.output_width for layer in owned), "f32", "rows"),
        *_ffn_layout([layer.ffn for layer in owned], rows),
    ]
    if layers.stop == spec.num_layers:
        buffers.append(ArenaBuffer("logit_hidden", logit_rows, spec.hidden, "f32", "logit_rows"))
        buffers.append(ArenaBuffer("logits", logit_rows, spec.vocab_size, "f32", "logit_rows"))
        buffers.append(ArenaBuffer("best", logit_rows, 1, "i32", "logit_rows"))
        if layers.start:
            buffers.append(ArenaBuffer("kept", NUM_KEPT_STEPS * logit_rows, 1, "i32", "fixed"))
    return tuple(buffers)


def _staged_layout(spec: ModelSpec, layers: LayerRange, settings: StageSettings) -> list[ArenaBuffer]:
    """What the host writes before every step: first what it knows last, last what is largest and mostly unused."""
    rows, seqs, width = settings.max_rows, settings.max_seqs, settings.max_blocks_per_seq
    items = [("tokens", rows, 1, "rows")] if layers.start == 0 else []
    items += [("positions", rows, 1, "rows"), ("row_starts", seqs + 1, 1, "fixed")]
    if layers.stop == spec.num_layers:
        items.append(("logit_rows", settings.max_logit_rows, 1, "logit_rows"))
        items.append(("sampling", settings.max_logit_rows, NUM_SAMPLING_PARAMS, "logit_rows"))
    items += [(f"slots.{group.index}", rows, 1, "rows") for group in spec.cache_groups]
    items += [(f"blocks.{group.index}", seqs, width, "seqs") for group in spec.cache_groups]
    return [
        ArenaBuffer(name, count, columns, "f32" if name == "sampling" else "i32", extent, staged=True)
        for name, count, columns, extent in items
    ]


def _ffn_layout(ffns: Sequence[Ffn], rows: int) -> list[ArenaBuffer]:
    """Between the matrices of any of these; every selected expert of a row has its own place."""
    experts = [ffn for ffn in ffns if isinstance(ffn, ExpertsFfn)]
    widths = [ffn.intermediate for ffn in ffns if not isinstance(ffn, ExpertsFfn)]
    widths += [ffn.num_selected * ffn.intermediate for ffn in experts]
    buffers = [ArenaBuffer("gate", rows, max(widths), "f32", "rows")]
    if experts:
        selected = max(ffn.num_selected for ffn in experts)
        buffers.append(ArenaBuffer("gate_logits", rows, max(ffn.num_experts for ffn in experts), "f32", "rows"))
        buffers.append(ArenaBuffer("experts", rows, selected, "i32", "rows"))
        buffers.append(ArenaBuffer("shares", rows, selected, "f32", "rows"))
    return buffers


def arena_bytes(spec: ModelSpec, layers: LayerRange, settings: StageSettings) -> int:
    """Bytes of all arena buffers of a stage."""
    return sum(buffer.num_bytes for buffer in arena_layout(spec, layers, settings))


def kv_block_bytes(spec: ModelSpec, layers: LayerRange, group: int, settings: StageSettings) -> int:
    """Bytes of one block of a cache group over the layers of a stage."""
    values = spec.kv_values_per_token(layers, group) * settings.block_tokens
    return int(values * KV_BITS[settings.kv_dtype]) // 8


def window_blocks(window: int, num_rows: int) -> int:
    """Blocks that hold what `num_rows` rows of a sequence see through a window, themselves included, wherever they are.

    The first and the last may be used in part.
    """
    return -(-(window - 1 + num_rows) // BLOCK_TOKENS) + 1


def sliding_windows(spec: ModelSpec) -> tuple[int | None, ...]:
    """By cache group: the window behind which blocks are given back, None if all positions are kept.

    One group keeps all: it counts what a sequence holds, and where no layer has full attention, the widest window has
    to do for it.
    """
    windows = [group.window for group in spec.cache_groups]
    if None not in windows:
        widest = max(range(len(windows)), key=lambda index: windows[index] or 0)
        windows[widest] = None
    return tuple(windows)


class WeightBytes:
    """Bytes of any range of a model's layers as they will lie in a device's memory, after repacking (B-42).

    `weight_bits` is the device's bits per value by tensor type; a type it does not name counts as stored. Vectors
    (norms, biases) are float32 on every device, and so is a matrix with a scale beside it; the rotary frequencies are
    kept once for each way of rotating.
    """

    def __init__(self, spec: ModelSpec, tensors: TensorIndex, weight_bits: Mapping[GgmlType, float]) -> None:
        self._spec = spec
        self._tensors = tensors
        self._bits = weight_bits
        by_layer = (layer_tensor_shapes(layer, spec.hidden) for layer in spec.layers)
        self._up_to = list(accumulate((self._sum(shapes) for shapes in by_layer), initial=0.0))

    def of(self, layers: LayerRange) -> int:
        """Bytes of a stage with these layers, the model's ends included where it has them."""
        ropes = {layer.attention.rope for layer in self._spec.layers_of(layers)}
        total = self._up_to[layers.stop] - self._up_to[layers.start]
        total += self._sum(end_tensor_shapes(self._spec, layers)) + sum(2 * rope.dims for rope in ropes)
        return int(total)

    def _sum(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        return sum(self._tensor(name, shape) for name, shape in shapes.items())

    def _tensor(self, name: str, shape: tuple[int, ...]) -> float:
        if is_vector(name, shape):
            return 4.0 * math.prod(shape)
        is_scaled = companion_names(name)[0] in self._tensors
        kind = GgmlType.F32 if is_scaled else self._tensors[name].type
        return math.prod(shape) * self._bits.get(kind, quant_format(kind, name).bits_per_value) / 8


def stage_weight_bytes_on(
    spec: ModelSpec, layers: LayerRange, tensors: TensorIndex, weight_bits: Mapping[GgmlType, float]
) -> int:
    """`WeightBytes` of one range."""
    return WeightBytes(spec, tensors, weight_bits).of(layers)
