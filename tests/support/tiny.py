"""Random weights for tests: raw GGUF blocks of any tensor type, and whole small llama files made of them.

Owns the knowledge of where each block format keeps its scales, so that random bytes become finite weights of
ordinary size. Must not import anything of lamina: the files made here test lamina's readers and kernels, and
`gguf.quants` is the only decoder this module trusts.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType, quants
from numpy.typing import NDArray

from support.tiny_tokenizer import add_byte_tokenizer

WEIGHT_RMS = 0.05

_T = GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class _HalfScale:
    """Where a block keeps its fp16 scale `d`, and how large its values are when every other byte is random.

    unit_rms: rms of the decoded values at d = 1 (and min = min_ratio, where the format has a minimum).
    min_offset, min_ratio: byte offset of the fp16 minimum and its size in units of d, chosen so that the mean is 0.
    signed: real quantisers write negative scales in this format, so tests see them as well.
    """

    offset: int
    unit_rms: float
    min_offset: int | None = None
    min_ratio: float = 0.0
    signed: bool = False


_HALF_SCALES = {
    _T.Q4_0: _HalfScale(0, 4.64, signed=True),
    _T.Q4_1: _HalfScale(0, 4.61, min_offset=2, min_ratio=-7.5),
    _T.Q5_0: _HalfScale(0, 9.25, signed=True),
    _T.Q5_1: _HalfScale(0, 9.23, min_offset=2, min_ratio=-15.5),
    _T.Q8_0: _HalfScale(0, 73.9),
    _T.Q2_K: _HalfScale(80, 13.9, min_offset=82, min_ratio=1.5),
    _T.Q3_K: _HalfScale(108, 43.3, signed=True),
    _T.Q4_K: _HalfScale(0, 259.0, min_offset=2, min_ratio=7.5),
    _T.Q5_K: _HalfScale(0, 527.0, min_offset=2, min_ratio=15.5),
    _T.Q6_K: _HalfScale(208, 1370.0, signed=True),
    _T.IQ2_XXS: _HalfScale(0, 53.4),
    _T.IQ2_XS: _HalfScale(0, 55.8),
    _T.IQ2_S: _HalfScale(0, 56.4),
    _T.IQ3_XXS: _HalfScale(0, 142.0),
    _T.IQ3_S: _HalfScale(0, 140.0),
    _T.IQ1_S: _HalfScale(0, 7.2),
    _T.IQ4_NL: _HalfScale(0, 67.5, signed=True),
    _T.IQ4_XS: _HalfScale(0, 1250.0, signed=True),
}

_FLOATS = frozenset({_T.F32, _T.F16, _T.BF16})
# Not every byte is a code that a quantiser writes, and a decoder may read the others as it likes.
_TERNARY = frozenset({_T.TQ1_0, _T.TQ2_0})

ALL_TYPES: tuple[GGMLQuantizationType, ...] = tuple(
    sorted(_FLOATS | _TERNARY | _HALF_SCALES.keys() | {_T.IQ1_M, _T.MXFP4, _T.NVFP4})
)
"""Every tensor type that `gguf.quants.dequantize` decodes, in order of id."""


def random_blocks(
    tensor_type: GGMLQuantizationType, rows: int, cols: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Raw bytes of a random `rows` x `cols` matrix of `tensor_type`, as they stand in a GGUF file.

    Returns uint8 [rows, cols / block values * block bytes]; `gguf.quants.dequantize(result, tensor_type)` gives float32
    [rows, cols], finite, of mean about 0 and rms about WEIGHT_RMS. All quantised bits are random, so that every code,
    sub-block scale and high bit occurs. Raises ValueError when `cols` is no multiple of the block's values.
    """
    block_values, block_bytes = GGML_QUANT_SIZES[tensor_type]
    if cols % block_values:
        raise ValueError(f"{tensor_type.name} stores blocks of {block_values} values; {cols} columns do not divide")
    num_blocks = rows * cols // block_values
    if tensor_type in _FLOATS:
        values = rng.normal(0.0, WEIGHT_RMS, (rows, cols)).astype(np.float32)
        return np.ascontiguousarray(quants.quantize(values, tensor_type)).view(np.uint8)
    if tensor_type in _TERNARY:
        ternary = rng.uniform(-1, 1, (num_blocks, block_values)) * _scales(num_blocks, 0.707, rng)[:, None]
        return np.asarray(quants.quantize(ternary.astype(np.float32).reshape(rows, cols), tensor_type))
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    if tensor_type == _T.Q8_0:
        # no quantiser writes the code -128: its scale is max|x| / 127
        blocks[:, 2:] = np.maximum(blocks[:, 2:].view(np.int8), -127).view(np.uint8)
    if tensor_type == _T.MXFP4:
        blocks[:, 0] = rng.integers(119, 123, num_blocks)  # E8M0: 2**(e - 128) times codes of rms 5.9
    elif tensor_type == _T.NVFP4:
        # UE4M3 per 16 values: 2**-7 to nearly 2**-5, subnormal below code 8
        blocks[:, :4] = rng.integers(4, 16, (num_blocks, 4))
    elif tensor_type == _T.IQ1_M:
        _scatter_iq1_m_scale(blocks, _scales(num_blocks, 7.2, rng))
    else:
        _set_half_scale(blocks, _HALF_SCALES[tensor_type], rng)
    return blocks.reshape(rows, -1)


def _scales(num_blocks: int, unit_rms: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """One positive scale per block, spread over a factor of 2.7, that brings `unit_rms` to WEIGHT_RMS."""
    return (WEIGHT_RMS / unit_rms * np.exp(rng.uniform(-0.5, 0.5, num_blocks))).astype(np.float32)


def _set_half_scale(blocks: NDArray[np.uint8], layout: _HalfScale, rng: np.random.Generator) -> None:
    scale = _scales(len(blocks), layout.unit_rms, rng)
    if layout.signed:
        scale *= rng.choice(np.array([-1.0, 1.0], np.float32), len(blocks))
    _put_half(blocks, layout.offset, scale)
    if layout.min_offset is not None:
        spread = rng.uniform(0.9, 1.1, len(blocks)).astype(np.float32)
        _put_half(blocks, layout.min_offset, scale * np.float32(layout.min_ratio) * spread)


def _put_half(blocks: NDArray[np.uint8], offset: int, values: NDArray[np.float32]) -> None:
    blocks[:, offset : offset + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _scatter_iq1_m_scale(blocks: NDArray[np.uint8], scale: NDArray[np.float32]) -> None:
    """IQ1_M keeps the nibbles of its fp16 scale in the top 4 bits of its four 16-bit scale words, lowest first."""
    bits = scale.astype("<f2").view("<u2")
    for word in range(4):
        high_byte = 48 + 2 * word + 1
        nibble = ((bits >> (4 * word)) & 0xF).astype(np.uint8)
        blocks[:, high_byte] = (blocks[:, high_byte] & 0x0F) | (nibble << 4)


def write_tiny_llama(
    path: Path | str,
    *,
    matrix_type: GGMLQuantizationType,
    vector_type: GGMLQuantizationType = _T.F32,
    hidden: int = 256,
    ff: int = 512,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 320,
    tied: bool = False,
    context: int = 256,
    seed: int = 0,
) -> Path:
    """Write a llama GGUF file of random weights: matrices of `matrix_type`, norms of `vector_type`; return its path.

    The file is complete (byte-level BPE tokenizer) and the same for the same arguments. `hidden` and `ff`
    must be multiples of the block size of `matrix_type` (256 at most); `hidden` also of `heads`; `vocab` >= 272.
    """
    rng = np.random.default_rng(seed)
    head_dim = hidden // heads
    writer = GGUFWriter(str(path), "llama")
    writer.add_name(f"tiny-llama-{matrix_type.name}")
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_vocab_size(vocab)
    add_byte_tokenizer(writer, vocab, pre="llama-bpe")

    def add_matrix(name: str, rows: int, cols: int) -> None:
        writer.add_tensor(f"{name}.weight", random_blocks(matrix_type, rows, cols, rng), raw_dtype=matrix_type)

    def add_norm(name: str) -> None:
        gain = rng.normal(1.0, 0.1, hidden).astype(np.float32)
        stored = np.ascontiguousarray(quants.quantize(gain, vector_type))
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=vector_type)

    add_matrix("token_embd", vocab, hidden)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        add_norm(prefix + "attn_norm")
        add_matrix(prefix + "attn_q", hidden, hidden)
        add_matrix(prefix + "attn_k", kv_heads * head_dim, hidden)
        add_matrix(prefix + "attn_v", kv_heads * head_dim, hidden)
        add_matrix(prefix + "attn_output", hidden, hidden)
        add_norm(prefix + "ffn_norm")
        add_matrix(prefix + "ffn_gate", ff, hidden)
        add_matrix(prefix + "ffn_up", ff, hidden)
        add_matrix(prefix + "ffn_down", hidden, ff)
    add_norm("output_norm")
    if not tied:
        add_matrix("output", vocab, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
