"""Make the tiny random models of tests/data and their golden logits; see TINY_MODELS.md.

Owns tests/data/tiny_*.gguf and tests/goldens/tiny_models.json. Must not import anything of lamina: the goldens are what
`transformers` computes in float64 from the same weights. Making them needs torch and transformers; `--check` compares
the committed files with a forward pass in numpy and needs neither.

    python tests/goldens/make_tiny_models.py            # rewrites everything
    python tests/goldens/make_tiny_models.py --check
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, quants
from numpy.typing import NDArray

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from support.tiny_forward import TinyModel  # noqa: E402
from support.tiny_tokenizer import BOS, add_byte_tokenizer, byte_vocabulary  # noqa: E402

DATA = TESTS / "data"
GOLDENS = TESTS / "goldens" / "tiny_models.json"

VOCAB = 288
CONTEXT = 256
RMS_EPS = 1e-5
PROMPT_LENGTHS = (1, 7, 16, 17, 40)
OTHER_POSITIONS = {17: (0, 15), 40: (16, 31)}
NUM_GREEDY = 12
# A model that repeats one token would hide a wrong position or a wrong cache slot.
LEAST_DISTINCT = 6

_T = GGMLQuantizationType
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TinySpec:
    """One tiny model: its shape, its rope as a Hugging Face config says it, the types its matrices cycle through.

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
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Eight types for the seven matrices of a layer: each role meets several of them.
MIXED_TYPES = (_T.Q4_0, _T.Q8_0, _T.F16, _T.Q4_0, _T.BF16, _T.Q4_0, _T.Q8_0, _T.Q4_0)

SPECS = (
    TinySpec("llama3", "llama", 1, (_T.F16,), tied=False, writes_head_dim=True, rope=LLAMA3_ROPE),
    TinySpec("llama_tied", "llama", 2, (_T.F32,), layers=2),
    TinySpec("llama_linear", "llama", 3, (_T.F16,), layers=2, rope=LINEAR_ROPE),
    TinySpec("llama_mixed", "llama", 4, MIXED_TYPES, hidden=96, ff=64, heads=6, least_margin=0.5),
    TinySpec("qwen2", "qwen2", 5, (_T.BF16,)),
    TinySpec("qwen2_yarn", "qwen2", 6, (_T.F16,), layers=2, rope=YARN_ROPE),
    TinySpec(
        "qwen3", "qwen3", 7, (_T.F16,), layers=3, heads=3, kv_heads=1, head_dim=32, tied=False, writes_head_dim=True
    ),
)

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
}


@dataclass(frozen=True, slots=True)
class TinyTensor:
    """A tensor under its Hugging Face name, in that layout: raw bytes as GGUF stores them, and what they decode to."""

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
        "mlp.gate_proj": matrix(spec.ff, spec.hidden, 1.5),
        "mlp.up_proj": matrix(spec.ff, spec.hidden),
        "mlp.down_proj": matrix(spec.hidden, spec.ff, 2.0),
    }
    if spec.arch == "qwen3":
        weights["self_attn.q_norm"] = rng.normal(1.3, 0.3, spec.head_dim)
        weights["self_attn.k_norm"] = rng.normal(1.3, 0.3, spec.head_dim)
    return weights


def draw_tensors(spec: TinySpec) -> Iterator[TinyTensor]:
    """All tensors of a model, in a fixed order."""
    rng = np.random.default_rng(spec.seed)
    num_matrices = 0

    def tensor(hf_name: str, gguf_name: str, values: NDArray[np.float64]) -> TinyTensor:
        nonlocal num_matrices
        tensor_type = _T.F32
        if values.ndim == 2:
            tensor_type = spec.matrix_types[num_matrices % len(spec.matrix_types)]
            num_matrices += 1
        stored = quants.quantize(values.astype(np.float32), tensor_type)
        decoded = quants.dequantize(stored, tensor_type).reshape(values.shape)
        return TinyTensor(hf_name, gguf_name, tensor_type, stored, decoded)

    yield tensor("model.embed_tokens.weight", "token_embd.weight", rng.normal(0.0, 0.4, (VOCAB, spec.hidden)))
    for layer in range(spec.layers):
        for part, values in draw_layer(spec, rng).items():
            hf_name, gguf_name = f"model.layers.{layer}.{part}", f"blk.{layer}.{LAYER_NAMES[part]}"
            yield tensor(f"{hf_name}.weight", f"{gguf_name}.weight", values)
            if spec.arch == "qwen2" and part[-6:] in {"q_proj", "k_proj", "v_proj"}:
                yield tensor(f"{hf_name}.bias", f"{gguf_name}.bias", rng.normal(0.0, 0.5, len(values)))
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


def write_gguf(spec: TinySpec, tensors: list[TinyTensor], path: Path) -> None:
    """Write the model as llama.cpp's converter would."""
    writer = GGUFWriter(str(path), spec.arch)
    writer.add_name(f"tiny {spec.name}")
    writer.add_block_count(spec.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ff)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_freq_base(spec.rope["rope_theta"])
    if spec.writes_head_dim:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    if spec.arch == "llama":
        writer.add_rope_dimension_count(spec.head_dim)
        writer.add_vocab_size(VOCAB)
    if spec.rope["rope_type"] in {"linear", "yarn"}:
        writer.add_rope_scaling_type(RopeScalingType(spec.rope["rope_type"]))
        writer.add_rope_scaling_factor(spec.rope["factor"])
    if spec.rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(spec.rope["original_max_position_embeddings"])
    add_byte_tokenizer(writer, VOCAB, pre="llama-bpe" if spec.arch == "llama" else "qwen2")
    if spec.rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_frequency_divisors(spec.rope, spec.head_dim))
    for tensor in tensors:
        stored = tensor.stored
        if spec.arch == "llama" and tensor.gguf_name.endswith("attn_q.weight"):
            stored = interleave_halves(stored, spec.heads)
        elif spec.arch == "llama" and tensor.gguf_name.endswith("attn_k.weight"):
            stored = interleave_halves(stored, spec.kv_heads)
        writer.add_tensor(tensor.gguf_name, np.ascontiguousarray(stored), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_transformers_model(spec: TinySpec, tensors: list[TinyTensor]) -> Any:
    """The model of `transformers` in float64 and eager attention, with the decoded weights."""
    import torch
    import transformers  # type: ignore[import-not-found,unused-ignore]

    configs = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }
    config = configs[spec.arch](
        vocab_size=VOCAB,
        hidden_size=spec.hidden,
        intermediate_size=spec.ff,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=RMS_EPS,
        tie_word_embeddings=spec.tied,
        rope_parameters=dict(spec.rope),
        attn_implementation="eager",
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    state = {tensor.hf_name: torch.from_numpy(tensor.decoded.astype(np.float64)) for tensor in tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"} or (missing and not spec.tied):
        raise ValueError(f"{spec.name}: transformers wants other tensors: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def transformers_logits(model: Any, tokens: list[int]) -> NDArray[np.float64]:
    """Logits [len(tokens), VOCAB]; the whole prompt in one pass, without a cache."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return np.asarray(logits.numpy(), np.float64)


def clear_greedy(model: Any, spec: TinySpec, prompt: list[int], num_ordinary: int) -> tuple[list[int], float] | None:
    """The greedy continuation and its least margin, or None where it is unclear, monotonous or hits a special token."""
    text, least = list(prompt), np.inf
    for _ in range(NUM_GREEDY):
        last = transformers_logits(model, text)[-1]
        runner_up, winner = np.sort(last)[-2:]
        least = min(least, float(winner - runner_up))
        text.append(int(np.argmax(last)))
        if least < spec.least_margin or text[-1] >= num_ordinary:
            return None
    greedy = text[len(prompt) :]
    return (greedy, least) if len(set(greedy)) >= LEAST_DISTINCT else None


def golden_prompt(model: Any, spec: TinySpec, length: int) -> dict[str, Any]:
    """The first random prompt of `length` that has a good greedy continuation, with its logits."""
    num_ordinary = byte_vocabulary(VOCAB)[0].index(BOS)
    for attempt in range(2000):
        prompt = np.random.default_rng((spec.seed, length, attempt)).integers(0, num_ordinary, length).tolist()
        found = clear_greedy(model, spec, prompt, num_ordinary)
        if found is not None:
            greedy, least_margin = found
            rows = transformers_logits(model, prompt)
            positions = (*OTHER_POSITIONS.get(length, ()), length - 1)
            logits = {str(at): [float(f"{value:.6g}") for value in rows[at]] for at in positions}
            return {"tokens": prompt, "greedy": greedy, "least_margin": round(least_margin, 4), "logits": logits}
    raise ValueError(f"{spec.name}: no prompt of {length} tokens has a varied and clear continuation; widen the logits")


def make_model(spec: TinySpec) -> dict[str, Any]:
    """Write one file and return its goldens."""
    path = DATA / f"tiny_{spec.name}.gguf"
    tensors = list(draw_tensors(spec))
    write_gguf(spec, tensors, path)
    model = load_transformers_model(spec, tensors)
    return {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "prompts": [golden_prompt(model, spec, length) for length in PROMPT_LENGTHS],
    }


def make_all() -> None:
    """Write every file and the goldens, one prompt a line."""
    import torch
    import transformers

    torch.set_num_threads(1)  # the matrices are too small to share
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}
    models = {spec.name: make_model(spec) for spec in SPECS}
    text = json.dumps({"made_with": made_with, "models": models}, separators=(",", ":"))
    for mark in ('"models":', '{"tokens"', '"logits"', '{"file"'):
        text = text.replace(mark, "\n" + mark)
    GOLDENS.write_text(text + "\n")


def check() -> float:
    """Largest relative error of the numpy forward pass over all golden logits; raises ValueError where texts differ."""
    worst = 0.0
    for name, entry in json.loads(GOLDENS.read_text())["models"].items():
        model = TinyModel(DATA / entry["file"])
        for prompt in entry["prompts"]:
            logits = model.logits(prompt["tokens"])
            for at, golden in prompt["logits"].items():
                error = float(np.linalg.norm(logits[int(at)] - golden) / np.linalg.norm(golden))
                worst = max(worst, error)
                print(f"{name:13} {len(prompt['tokens']):2} tokens, position {at:>2}: relative error {error:.1e}")
            if model.greedy(prompt["tokens"], NUM_GREEDY) != prompt["greedy"]:
                raise ValueError(f"{name}: the greedy continuation of {prompt['tokens']} differs from transformers'")
    return worst


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make or check the tiny golden models.")
    parser.add_argument("--check", action="store_true", help="compare the committed files with a numpy forward pass")
    if not parser.parse_args().check:
        make_all()
    print(f"largest relative error {check():.1e}")
