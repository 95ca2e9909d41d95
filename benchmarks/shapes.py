"""Model files of real shapes with random weights, written block by block: what is measured is bytes and arithmetic.

Owns the shapes, the Q4_K_M mix and the block layouts it needs. Weights are random but sound: every file loads in
lamina and in llama.cpp and gives finite logits. The tokenizer is that of SmolLM2, padded to the shape's vocabulary.

    python benchmarks/shapes.py llama1b [--models DIR]
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from numpy.typing import NDArray

REPO = Path(__file__).resolve().parents[1]
MODELS = REPO / "models"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_VERSION = 1  # part of the file name: a change of the generator makes new files

_NORMAL, _UNUSED = 1, 5  # GGUF's token types

_T = GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class Shape:
    """What a file is made of; `mix` is "q4_k_m" or "q8_0". With `experts`, `ff` is the width of each."""

    name: str
    arch: str
    mix: str
    layers: int
    hidden: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float
    tied: bool
    experts: int = 0
    selected: int = 0

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.mix}-random-v{_VERSION}.gguf"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama1b", "llama", "q4_k_m", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, True),
        Shape("llama8b", "llama", "q4_k_m", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, False),
        # a billion parameters, of which each token reads an eighth of the experts', as in Qwen3-30B-A3B (a sixteenth)
        Shape("moe1b", "qwen3moe", "q4_k_m", 10, 1024, 512, 16, 4, 64, 49152, 32768, 1e6, True, 64, 8),
        Shape("qwen05b", "qwen2", "q8_0", 24, 896, 4864, 14, 2, 64, 151936, 32768, 1e6, True),
        Shape("qwen7b", "qwen2", "q4_k_m", 28, 3584, 18944, 28, 4, 128, 152064, 32768, 1e6, False),
    )
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A row of the tensor table, in torch's order: `rows` x `cols`, `experts` times; a vector has one row."""

    name: str
    kind: GGMLQuantizationType
    rows: int
    cols: int
    experts: int = 1

    @property
    def num_bytes(self) -> int:
        block_values, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.experts * self.rows * self.cols // block_values * block_bytes


@dataclass(frozen=True, slots=True)
class _HalfScale:
    """Where a block keeps its fp16 scale, and the rms of its values at scale 1 when all other bytes are random.

    A minimum of `min_ratio` scales at `min_offset` brings the mean to 0.
    """

    offset: int
    unit_rms: float
    min_offset: int | None = None
    min_ratio: float = 0.0


_HALF_SCALES = {
    _T.Q4_0: _HalfScale(0, 4.6),
    _T.Q4_1: _HalfScale(0, 4.6, 2, -7.5),
    _T.Q5_0: _HalfScale(0, 9.2),
    _T.Q5_1: _HalfScale(0, 9.2, 2, -15.5),
    _T.Q8_0: _HalfScale(0, 73.6),
    _T.Q4_K: _HalfScale(0, 259.0, 2, 7.5),
    _T.Q5_K: _HalfScale(0, 527.0, 2, 15.5),
    _T.Q6_K: _HalfScale(208, 1370.0),
}


def tensors_of(shape: Shape) -> Iterator[Tensor]:
    """All tensors of the file, in file order."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    head_kind = _T.Q6_K if shape.mix == "q4_k_m" else _T.Q8_0
    body_kind = _T.Q4_K if shape.mix == "q4_k_m" else _T.Q8_0
    # a tied embedding is the output matrix too and has its type
    yield Tensor("token_embd.weight", head_kind if shape.tied else body_kind, shape.vocab, shape.hidden)
    if shape.arch == "llama":
        yield Tensor("rope_freqs.weight", _T.F32, 1, shape.head_dim // 2)
    for i in range(shape.layers):
        better = _T.Q6_K if shape.mix == "q4_k_m" and has_better_type(i, shape.layers) else body_kind
        yield Tensor(f"blk.{i}.attn_norm.weight", _T.F32, 1, shape.hidden)
        yield Tensor(f"blk.{i}.attn_q.weight", body_kind, query, shape.hidden)
        yield Tensor(f"blk.{i}.attn_k.weight", body_kind, kv, shape.hidden)
        yield Tensor(f"blk.{i}.attn_v.weight", better, kv, shape.hidden)
        if shape.arch == "qwen2":
            yield Tensor(f"blk.{i}.attn_q.bias", _T.F32, 1, query)
            yield Tensor(f"blk.{i}.attn_k.bias", _T.F32, 1, kv)
            yield Tensor(f"blk.{i}.attn_v.bias", _T.F32, 1, kv)
        if shape.arch == "qwen3moe":
            yield Tensor(f"blk.{i}.attn_q_norm.weight", _T.F32, 1, shape.head_dim)
            yield Tensor(f"blk.{i}.attn_k_norm.weight", _T.F32, 1, shape.head_dim)
        yield Tensor(f"blk.{i}.attn_output.weight", body_kind, shape.hidden, query)
        yield Tensor(f"blk.{i}.ffn_norm.weight", _T.F32, 1, shape.hidden)
        if shape.experts:
            yield Tensor(f"blk.{i}.ffn_gate_inp.weight", _T.F32, shape.experts, shape.hidden)
        suffix, experts = ("_exps", shape.experts) if shape.experts else ("", 1)
        yield Tensor(f"blk.{i}.ffn_gate{suffix}.weight", body_kind, shape.ff, shape.hidden, experts)
        yield Tensor(f"blk.{i}.ffn_up{suffix}.weight", body_kind, shape.ff, shape.hidden, experts)
        yield Tensor(f"blk.{i}.ffn_down{suffix}.weight", better, shape.hidden, shape.ff, experts)
    yield Tensor("output_norm.weight", _T.F32, 1, shape.hidden)
    if not shape.tied:
        yield Tensor("output.weight", head_kind, shape.vocab, shape.hidden)


def has_better_type(layer: int, num_layers: int) -> bool:
    """Whether Q4_K_M gives this layer's attn_v and ffn_down Q6_K (llama.cpp's use_more_bits)."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def values_of(tensor: Tensor, rng: np.random.Generator) -> NDArray[np.generic]:
    """The tensor's values as they are stored: float32 [cols] of a vector or [rows, cols] of a router, else raw blocks
    uint8 [all experts' rows, row bytes].

    A matrix decodes to values of mean 0 and rms about 1 / sqrt(cols), so that activations keep their size. Raises
    KeyError for a block type without a layout here.
    """
    if tensor.name == "rope_freqs.weight":
        return _llama3_divisors(tensor.cols)
    if tensor.rows == 1:
        is_norm = tensor.name.endswith("norm.weight")
        spread = rng.normal(0.0, 0.05, tensor.cols)
        return (spread + 1.0 if is_norm else spread).astype(np.float32)
    if tensor.kind == _T.F32:
        return (rng.standard_normal((tensor.rows, tensor.cols)) / math.sqrt(tensor.cols)).astype(np.float32)
    block_values, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    num_blocks = tensor.experts * tensor.rows * tensor.cols // block_values
    words = rng.integers(0, 2**64, -(-tensor.num_bytes // 8), dtype=np.uint64)
    blocks = words.view(np.uint8)[: tensor.num_bytes].reshape(num_blocks, block_bytes)
    scales = np.exp(rng.uniform(-0.3, 0.3, num_blocks)) / math.sqrt(tensor.cols)
    if tensor.kind == _T.Q8_0:  # no quantiser writes -128
        np.maximum(blocks[:, 2:].view(np.int8), -127, out=blocks[:, 2:].view(np.int8))
    layout = _HALF_SCALES[tensor.kind]
    _put_halves(blocks, layout.offset, scales / layout.unit_rms)
    if layout.min_offset is not None:
        _put_halves(blocks, layout.min_offset, scales / layout.unit_rms * layout.min_ratio)
    return blocks.reshape(tensor.experts * tensor.rows, -1)


def _put_halves(blocks: NDArray[np.uint8], offset: int, values: NDArray[np.float64]) -> None:
    blocks[:, offset : offset + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _llama3_divisors(num_pairs: int) -> NDArray[np.float32]:
    """Llama 3's rope scaling by factor 32 from a context of 8192, as its GGUF files store it."""
    factor, original, low, high = 32.0, 8192.0, 1.0, 4.0
    wavelength = 2 * math.pi * 5e5 ** (np.arange(num_pairs) / num_pairs)
    smooth = (original / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, between))
    return divisors.astype(np.float32)


def write_shape(
    shape: Shape, path: Path, tokenizer_file: Path, seed: int = 1, *, first_token: str | None = None
) -> None:
    """Write the file of a shape: the same bytes for the same arguments. An unfinished file is never called `path`.

    `first_token` is what token 0 is instead, as ordinary text: all that a mock worker ever answers.
    """
    partial = path.with_suffix(f".{os.getpid()}.partial")
    writer = GGUFWriter(partial, shape.arch)
    _add_model_metadata(writer, shape)
    _add_tokenizer(writer, tokenizer_file, shape.vocab, first_token)
    for tensor in tensors_of(shape):
        is_float = tensor.kind == _T.F32
        row = tensor.cols if is_float else tensor.num_bytes // (tensor.experts * tensor.rows)
        stored = [size for size in (tensor.experts, tensor.rows) if size > 1] + [row]
        dtype, raw = (np.dtype(np.float32), None) if is_float else (np.dtype(np.uint8), tensor.kind)
        writer.add_tensor_info(tensor.name, stored, dtype, tensor.num_bytes, raw)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.Generator(np.random.SFC64(seed))
        for tensor in tensors_of(shape):
            writer.write_tensor_data(values_of(tensor, rng))
        writer.close()
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _add_model_metadata(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"{shape.name}, random weights")
    writer.add_file_type(15 if shape.mix == "q4_k_m" else 7)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    if shape.arch == "qwen3moe":
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.selected)
        writer.add_expert_feed_forward_length(shape.ff)
    writer.add_quantization_version(2)


@cache
def _tokenizer_of(source: Path) -> dict[str, Any]:
    """The tokenizer keys of a GGUF file; reading 100,000 strings takes the gguf package seconds."""
    fields = GGUFReader(source).fields
    return {key.removeprefix("tokenizer."): field.contents() for key, field in fields.items() if "tokenizer." in key}


def _add_tokenizer(writer: GGUFWriter, source: Path, vocab: int, first_token: str | None) -> None:
    """SmolLM2's tokenizer; ids beyond it are unused tokens. Raises ValueError if it has more tokens than `vocab`."""
    values = _tokenizer_of(source)
    tokens, kinds = list(values["ggml.tokens"]), list(values["ggml.token_type"])
    if first_token is not None:
        tokens[0], kinds[0] = first_token, _NORMAL
    if len(tokens) > vocab:
        raise ValueError(f"{source}: {len(tokens)} tokens do not fit a vocabulary of {vocab}")
    num_spare = vocab - len(tokens)
    writer.add_tokenizer_model(values["ggml.model"])
    writer.add_tokenizer_pre(values["ggml.pre"])
    writer.add_token_list(tokens + [f"<|unused_{i}|>" for i in range(num_spare)])
    writer.add_token_types(kinds + [_UNUSED] * num_spare)
    writer.add_token_merges(values["ggml.merges"])
    writer.add_bos_token_id(values["ggml.bos_token_id"])
    writer.add_eos_token_id(values["ggml.eos_token_id"])
    writer.add_unk_token_id(values["ggml.unknown_token_id"])
    writer.add_pad_token_id(values["ggml.padding_token_id"])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(values["chat_template"])


def model_path(name: str, models: Path = MODELS) -> Path:
    """The file of "smollm2" or of a shape, which is written if it is not there yet.

    Raises FileNotFoundError if SmolLM2 has not been fetched, KeyError for an unknown name.
    """
    smollm2 = models / SMOLLM2
    if not smollm2.is_file():
        raise FileNotFoundError(f"{smollm2}: run `make models` first")
    if name == "smollm2":
        return smollm2
    shape = SHAPES[name]
    path = models / shape.file_name
    if not path.is_file():
        write_shape(shape, path, smollm2)
    return path


def main() -> None:
    """Write one file, or find it written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the model files")
    args = parser.parse_args()
    start = time.perf_counter()
    path = model_path(args.shape, args.models)
    print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
