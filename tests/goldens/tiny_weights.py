"""The random weights of the tiny models: every tensor under its Hugging Face and its GGUF name.

Owns what a tensor holds and how it is stored; see TINY_MODELS.md. Must not import anything of lamina.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

VOCAB = 288
_T = GGMLQuantizationType
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TinySpec:
    """One tiny model: its shape, its rope as a Hugging Face config says it, the types its matrices cycle through.

    With `experts`, each layer has so many of width `ff` and a float32 router that selects some; `expert_types` are what
    their matrices cycle through. A `window` limits every other layer, from the first.

    least_margin: by how much, at least, each greedy token's logit beats the next: above what rounding activations moves
    them, so that a greedy text is no matter of luck.
    """

    name: str
    arch: str
    seed: int
    matrix_types: tuple[GGMLQuantizationType, ...]
    layers: int = 4
    hidden: int = 64
    ff: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    tied: bool = True
    writes_head_dim: bool = False
    least_margin: float = 0.3
    experts: int = 0
    selected: int = 0
    expert_types: tuple[GGMLQuantizationType, ...] = ()
    window: int = 0
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})


LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
BIASED = {
    "qwen2": ("q_proj", "k_proj", "v_proj"),
    "gpt-oss": ("q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate", "gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True, slots=True)
class TinyTensor:
    """A tensor under its Hugging Face name, in that layout: raw bytes as GGUF stores them, and what they decode to.

    Experts are [experts, out, in] under names of their own; `transformers` keeps them otherwise (see tiny_oracle).
    """

    hf_name: str
    gguf_name: str
    tensor_type: GGMLQuantizationType
    stored: NDArray[Any]
    decoded: Floats


def draw_layer(spec: TinySpec, rng: np.random.Generator) -> dict[str, NDArray[np.float64]]:
    """Weights of one layer by Hugging Face name, so large that it adds as much as the residual already holds.

    A matrix has standard deviation gain / sqrt(inputs). q and k have gain 1.3: attention scores then spread by about
    1.7, so that a wrong rotation shows, but softmax does not yet amplify rounding. The matrices that write to the
    residual have gain 2: it then outgrows the embedding, which tied weights would otherwise echo.
    """

    def matrix(rows: int, cols: int, gain: float = 1.0) -> NDArray[np.float64]:
        return rng.normal(0.0, gain / cols**0.5, (rows, cols))

    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weights = {
        "input_layernorm": rng.normal(1.0, 0.2, spec.hidden),
        "self_attn.q_proj": matrix(q_rows, spec.hidden, 1.3),
        "self_attn.k_proj": matrix(kv_rows, spec.hidden, 1.3),
        "self_attn.v_proj": matrix(kv_rows, spec.hidden),
        "self_attn.o_proj": matrix(spec.hidden, q_rows, 2.0),
        "post_attention_layernorm": rng.normal(1.0, 0.2, spec.hidden),
    }
    weights |= (
        draw_experts(spec, rng)
        if spec.experts
        else {
            "mlp.gate_proj": matrix(spec.ff, spec.hidden, 1.5),
            "mlp.up_proj": matrix(spec.ff, spec.hidden),
            "mlp.down_proj": matrix(spec.hidden, spec.ff, 2.0),
        }
    )
    if spec.arch == "gpt-oss":
        weights["self_attn.sinks"] = rng.normal(1.0, 1.0, spec.heads)
    if spec.arch in {"qwen3", "qwen3moe"}:
        weights["self_attn.q_norm"] = rng.normal(1.3, 0.3, spec.head_dim)
        weights["self_attn.k_norm"] = rng.normal(1.3, 0.3, spec.head_dim)
    return weights


def draw_experts(spec: TinySpec, rng: np.random.Generator) -> dict[str, NDArray[np.float64]]:
    """Router and experts; the router's gain makes the selected experts' shares differ clearly."""

    def matrices(rows: int, cols: int, gain: float) -> NDArray[np.float64]:
        return rng.normal(0.0, gain / cols**0.5, (spec.experts, rows, cols))

    # gpt-oss: gates and ups so large that some are clamped at 7
    gate_gain, down_gain = (4.0, 0.7) if spec.arch == "gpt-oss" else (1.5, 2.0)
    return {
        "mlp.gate": rng.normal(0.0, 1.5 / spec.hidden**0.5, (spec.experts, spec.hidden)),
        "mlp.experts.gate_proj": matrices(spec.ff, spec.hidden, gate_gain),
        "mlp.experts.up_proj": matrices(spec.ff, spec.hidden, gate_gain if spec.arch == "gpt-oss" else 1.0),
        "mlp.experts.down_proj": matrices(spec.hidden, spec.ff, down_gain),
    }


def draw_tensors(spec: TinySpec) -> Iterator[TinyTensor]:
    """All tensors of a model, in a fixed order."""
    rng = np.random.default_rng(spec.seed)
    num_matrices = num_experts = 0

    def tensor(hf_name: str, gguf_name: str, values: NDArray[np.float64]) -> TinyTensor:
        nonlocal num_matrices, num_experts
        tensor_type = _T.F32
        if values.ndim == 3:
            tensor_type = spec.expert_types[num_experts % len(spec.expert_types)]
            num_experts += 1
        elif values.ndim == 2 and not (hf_name.endswith((".bias", "mlp.gate.weight"))):
            tensor_type = spec.matrix_types[num_matrices % len(spec.matrix_types)]
            num_matrices += 1
        stored = quants.quantize(values.astype(np.float32), tensor_type)
        decoded = quants.dequantize(stored, tensor_type).reshape(values.shape)
        return TinyTensor(hf_name, gguf_name, tensor_type, stored, decoded)

    yield tensor("model.embed_tokens.weight", "token_embd.weight", rng.normal(0.0, 0.4, (VOCAB, spec.hidden)))
    for layer in range(spec.layers):
        for part, values in draw_layer(spec, rng).items():
            hf_name, gguf_name = f"model.layers.{layer}.{part}", f"blk.{layer}.{LAYER_NAMES[part]}"
            if spec.arch == "gpt-oss" and part == "post_attention_layernorm":
                gguf_name = f"blk.{layer}.post_attention_norm"
            yield tensor(f"{hf_name}.weight", f"{gguf_name}.weight", values)
            if part.endswith(BIASED.get(spec.arch, ())):
                yield tensor(f"{hf_name}.bias", f"{gguf_name}.bias", rng.normal(0.0, 0.5, values.shape[:-1]))
    yield tensor("model.norm.weight", "output_norm.weight", rng.normal(1.0, 0.2, spec.hidden))
    if not spec.tied:
        yield tensor("lm_head.weight", "output.weight", rng.normal(0.0, 0.4, (VOCAB, spec.hidden)))


def interleave_halves(stored: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of a llama q or k matrix in the order of llama.cpp's converter: pair (i, i + half) becomes (2i, 2i + 1)."""
    half = stored.shape[0] // heads // 2
    return stored.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(stored.shape)


def llama3_frequency_divisors(rope: dict[str, Any], head_dim: int) -> Floats:
    """rope_freqs.weight [head_dim / 2]: by how much Llama 3.1's scaling divides each angle."""
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / wavelength
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return divisors.astype(np.float32)
