"""A small model of random weights in one tensor type, as a GGUF file: what a worker tests its devices with.

One layer, wide enough that every kernel has whole and broken tiles. Random bytes are sound blocks once their scales
are, so K-quants need no quantiser.
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray

from lamina.spec.quant import GgmlType

HIDDEN, FF, VOCAB, CONTEXT = 256, 768, 480, 512
_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 1, 4, 2, 64
_RMS = 0.05

# Where a block keeps its fp16 scale, the rms of its values at scale 1 when all other bytes are random, and where it
# keeps its fp16 minimum and how many scales that must be for a mean of 0.
_SCALES: dict[GgmlType, tuple[int, float, int | None, float]] = {
    GgmlType.Q2_K: (80, 13.9, 82, 1.5),
    GgmlType.Q3_K: (108, 43.3, None, 0.0),
    GgmlType.Q4_K: (0, 259.0, 2, 7.5),
    GgmlType.Q5_K: (0, 527.0, 2, 15.5),
    GgmlType.Q6_K: (208, 1370.0, None, 0.0),
    GgmlType.IQ4_NL: (0, 67.5, None, 0.0),
    GgmlType.IQ4_XS: (0, 1250.0, None, 0.0),
}
_QUANTISED = (
    GgmlType.F32,
    GgmlType.F16,
    GgmlType.BF16,
    GgmlType.Q4_0,
    GgmlType.Q4_1,
    GgmlType.Q5_0,
    GgmlType.Q5_1,
    GgmlType.Q8_0,
    GgmlType.MXFP4,
)
PROBE_TYPES: tuple[GgmlType, ...] = (*_QUANTISED, *_SCALES)
EXPERT_TYPES: tuple[GgmlType, ...] = (GgmlType.F16, GgmlType.MXFP4, GgmlType.Q4_K)
# Every token takes all of them: which of two nearly equal ones is chosen may depend on a device's rounding.
_NUM_EXPERTS = 4


def write_probe_model(path: Path, kind: GgmlType, *, experts: bool = False) -> None:
    """Write the model with all matrices of this type, one of PROBE_TYPES; the same file every time.

    With `experts` the layer is a mixture of them.
    """
    rng = np.random.default_rng(kind.value)
    writer = GGUFWriter(str(path), "llama")
    writer.add_name(f"random {kind.name}")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    if experts:
        writer.add_expert_count(_NUM_EXPERTS)
        writer.add_expert_used_count(_NUM_EXPERTS)

    def add_experts(name: str, rows: int, cols: int) -> None:
        raw_type = GGMLQuantizationType(kind.value)
        matrices = np.stack([random_matrix(kind, rows, cols, rng) for _ in range(_NUM_EXPERTS)])
        writer.add_tensor(f"{name}.weight", matrices, raw_dtype=raw_type)

    def add_matrix(name: str, rows: int, cols: int) -> None:
        raw_type = GGMLQuantizationType(kind.value)
        writer.add_tensor(f"{name}.weight", random_matrix(kind, rows, cols, rng), raw_dtype=raw_type)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", rng.normal(1.0, 0.1, HIDDEN).astype(np.float32))

    add_matrix("token_embd", VOCAB, HIDDEN)
    for layer in range(_LAYERS):
        prefix = f"blk.{layer}."
        add_norm(prefix + "attn_norm")
        add_matrix(prefix + "attn_q", _HEADS * _HEAD_DIM, HIDDEN)
        add_matrix(prefix + "attn_k", _KV_HEADS * _HEAD_DIM, HIDDEN)
        add_matrix(prefix + "attn_v", _KV_HEADS * _HEAD_DIM, HIDDEN)
        add_matrix(prefix + "attn_output", HIDDEN, _HEADS * _HEAD_DIM)
        add_norm(prefix + "ffn_norm")
        if experts:
            router = rng.normal(0.0, _RMS, (_NUM_EXPERTS, HIDDEN)).astype(np.float32)
            writer.add_tensor(prefix + "ffn_gate_inp.weight", router)
        add, more = (add_experts, "_exps") if experts else (add_matrix, "")
        add(f"{prefix}ffn_gate{more}", FF, HIDDEN)
        add(f"{prefix}ffn_up{more}", FF, HIDDEN)
        add(f"{prefix}ffn_down{more}", HIDDEN, FF)
    add_norm("output_norm")
    add_matrix("output", VOCAB, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_matrix(kind: GgmlType, rows: int, cols: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Raw blocks uint8 [rows, bytes per row] of a matrix of mean about 0 and rms about 0.05."""
    raw_type = GGMLQuantizationType(kind.value)
    if kind in _QUANTISED:
        values = rng.normal(0.0, _RMS, (rows, cols)).astype(np.float32)
        return np.ascontiguousarray(quants.quantize(values, raw_type)).view(np.uint8).reshape(rows, -1)
    block_values, block_bytes = GGML_QUANT_SIZES[raw_type]
    num_blocks = rows * cols // block_values
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), np.uint8)
    at, unit_rms, minimum_at, num_scales = _SCALES[kind]
    scale = (_RMS / unit_rms * np.exp(rng.uniform(-0.5, 0.5, num_blocks))).astype("<f2")
    _put(blocks, at, scale)
    if minimum_at is not None:
        _put(blocks, minimum_at, (scale * np.float32(num_scales)).astype("<f2"))
    return blocks.reshape(rows, -1)


def _put(blocks: NDArray[np.uint8], offset: int, halves: NDArray[np.float16]) -> None:
    blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(-1, 2)
