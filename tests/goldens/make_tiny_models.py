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
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from numpy.typing import NDArray

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from goldens.tiny_oracle import CONTEXT, RMS_EPS, load_transformers_model, transformers_logits  # noqa: E402
from goldens.tiny_weights import (  # noqa: E402
    VOCAB,
    TinySpec,
    TinyTensor,
    draw_tensors,
    interleave_halves,
    llama3_frequency_divisors,
)

from support.tiny_forward import TinyModel  # noqa: E402
from support.tiny_tokenizer import BOS, add_byte_tokenizer, byte_vocabulary  # noqa: E402

DATA = TESTS / "data"
GOLDENS = TESTS / "goldens" / "tiny_models.json"

PROMPT_LENGTHS = (1, 7, 16, 17, 40)
OTHER_POSITIONS = {17: (0, 15), 40: (16, 31)}
NUM_GREEDY = 12
# A model that repeats one token would hide a wrong position or a wrong cache slot.
LEAST_DISTINCT = 6

_T = GGMLQuantizationType
Floats = NDArray[np.float32]


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
    TinySpec("mixtral", "llama", 8, (_T.F16,), layers=3, experts=4, selected=2, expert_types=(_T.F16, _T.Q8_0)),
    TinySpec(
        "qwen3moe",
        "qwen3moe",
        9,
        (_T.F16,),
        layers=3,
        heads=3,
        kv_heads=1,
        head_dim=32,
        tied=False,
        writes_head_dim=True,
        experts=8,
        selected=3,
        expert_types=(_T.Q4_0, _T.Q8_0, _T.F16),
    ),
    TinySpec(
        "gpt_oss",
        "gpt-oss",
        10,
        (_T.Q8_0,),
        head_dim=32,
        tied=False,
        writes_head_dim=True,
        experts=6,
        selected=4,
        expert_types=(_T.MXFP4,),
        window=8,
        rope=YARN_ROPE,
    ),
)


def write_gguf(spec: TinySpec, tensors: list[TinyTensor], path: Path) -> None:
    """Write the model as llama.cpp's converter would."""
    writer = GGUFWriter(str(path), spec.arch)
    writer.add_name(f"tiny {spec.name}")
    writer.add_block_count(spec.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ff)
    if spec.experts:
        writer.add_expert_count(spec.experts)
        writer.add_expert_used_count(spec.selected)
        if spec.arch != "llama":
            writer.add_expert_feed_forward_length(spec.ff)
    if spec.window:
        writer.add_sliding_window(spec.window)
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
