"""The tiny models in `transformers`, in float64 from the decoded weights: what the goldens are computed with.

Needs torch and transformers, imported on use. Must not import anything of lamina.
"""

from typing import Any

import numpy as np
from goldens.tiny_weights import VOCAB, TinySpec, TinyTensor
from numpy.typing import NDArray

CONTEXT = 256
RMS_EPS = 1e-5
Floats = NDArray[np.float64]


def expert_settings(spec: TinySpec) -> dict[str, Any]:
    """What a config calls the experts and the window."""
    if not spec.experts:
        return {}
    settings: dict[str, Any] = {"num_experts_per_tok": spec.selected, "num_local_experts": spec.experts}
    if spec.arch == "qwen3moe":
        del settings["num_local_experts"]
        settings |= {"num_experts": spec.experts, "moe_intermediate_size": spec.ff, "norm_topk_prob": True}
    return settings | ({"sliding_window": spec.window} if spec.window else {})


def state_of(spec: TinySpec, tensors: list[TinyTensor]) -> dict[str, Floats]:
    """The decoded weights under the names and in the layouts of the model class."""
    state = {tensor.hf_name: tensor.decoded.astype(np.float64) for tensor in tensors}
    for layer in range(spec.layers if spec.experts else 0):
        mlp = f"model.layers.{layer}.mlp"
        parts = ("gate_proj", "up_proj", "down_proj")
        matrices = [state.pop(f"{mlp}.experts.{part}.weight") for part in parts]
        if spec.arch != "gpt-oss":
            state[f"{mlp}.experts.gate_up_proj"] = np.concatenate(matrices[:2], axis=1)
            state[f"{mlp}.experts.down_proj"] = matrices[2]
            continue
        biases = [state.pop(f"{mlp}.experts.{part}.bias") for part in parts]
        # [experts, in, out], and gate and up alternate
        state[f"{mlp}.experts.gate_up_proj"] = (
            np.stack(matrices[:2], axis=2).reshape(spec.experts, 2 * spec.ff, spec.hidden).swapaxes(1, 2).copy()
        )
        state[f"{mlp}.experts.gate_up_proj_bias"] = np.stack(biases[:2], axis=2).reshape(spec.experts, 2 * spec.ff)
        state[f"{mlp}.experts.down_proj"] = matrices[2].swapaxes(1, 2).copy()
        state[f"{mlp}.experts.down_proj_bias"] = biases[2]
        for kind in ("weight", "bias"):
            state[f"{mlp}.router.{kind}"] = state.pop(f"{mlp}.gate.{kind}")
        sinks = f"model.layers.{layer}.self_attn.sinks"
        state[sinks] = state.pop(f"{sinks}.weight")
    return state


def load_transformers_model(spec: TinySpec, tensors: list[TinyTensor]) -> Any:
    """The model of `transformers` in float64 and eager attention, with the decoded weights."""
    import torch
    import transformers  # type: ignore[import-not-found,unused-ignore]

    configs = {
        "llama": transformers.MixtralConfig if spec.experts else transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "qwen3moe": transformers.Qwen3MoeConfig,
        "gpt-oss": transformers.GptOssConfig,
    }
    config = configs[spec.arch](
        **expert_settings(spec),
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
        experts_implementation="eager",  # others have no float64
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    state = {name: torch.from_numpy(values) for name, values in state_of(spec, tensors).items()}
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
