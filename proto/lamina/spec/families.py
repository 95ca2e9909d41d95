"""Model families: one table row each, and how GGUF metadata becomes a ModelSpec.

Knows metadata keys and tensor names; knows no backend, and reads nothing but the header it is given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lamina.spec.checkpoint import TensorIndex, TensorInfo
from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel
from lamina.spec.gguf import GgufFile
from lamina.spec.metadata import Metadata
from lamina.spec.model import (
    MAX_SELECTED_EXPERTS,
    Activation,
    AttentionSpec,
    CacheGroup,
    CacheKind,
    DenseFfn,
    ExpertsFfn,
    Ffn,
    Gating,
    LayerSpec,
    LinearScaling,
    ModelSpec,
    NoScaling,
    RopeLayout,
    RopeScaling,
    RopeSpec,
    YarnScaling,
    companion_names,
    is_vector,
    stage_tensor_shapes,
)
from lamina.spec.quant import FLOAT_TYPES, WEIGHT_TYPES, GgmlType


@dataclass(frozen=True, slots=True)
class Family:
    """What the metadata of an architecture does not say. Optional tensors (biases, rope_freqs, a fused attn_qkv) are
    detected by their presence; `qkv_bias` says that they must be there."""

    architecture: str
    rope_layout: RopeLayout
    qkv_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    window_period: int = 0  # all but the last of so many layers attend to a window, where the metadata have one
    activation: Activation = Activation.SILU
    ffn_norm: str = "ffn_norm"
    gating: Gating = Gating.SOFTMAX  # of layers with experts
    normalise_shares: bool = True


_FAMILIES = {
    family.architecture: family
    for family in (
        Family("llama", RopeLayout.NORM),  # the converter has permuted q and k
        Family("qwen2", RopeLayout.NEOX, qkv_bias=True),
        Family("qwen3", RopeLayout.NEOX, qk_norm=True),
        Family("qwen3moe", RopeLayout.NEOX, qk_norm=True),
        Family(
            "gpt-oss",
            RopeLayout.NEOX,
            qkv_bias=True,
            sinks=True,
            window_period=2,
            activation=Activation.SWIGLU_CLAMPED,
            ffn_norm="post_attention_norm",
            gating=Gating.SOFTMAX_SELECTED,
            normalise_shares=False,
        ),
    )
}


_GATINGS = {1: Gating.SOFTMAX, 3: Gating.SOFTMAX_SELECTED}  # by expert_gating_func


def model_spec(gguf: GgufFile, digest: str) -> ModelSpec:
    """The model that a GGUF header describes, with its tensors checked (see check_tensors).

    Raises UnsupportedModel (architecture or feature) or InvalidCheckpoint (a key or tensor missing or odd).
    """
    metadata, tensors = Metadata(gguf.metadata, gguf.path), gguf.tensors
    family = _family(metadata, gguf)
    arch = family.architecture
    hidden = metadata.count(f"{arch}.embedding_length")
    attentions = _attentions(metadata, family, tensors, hidden)
    groups = cache_groups([attention.window for attention in attentions])
    group_of_window = {group.window: group.index for group in groups}
    ffns = [_ffn(metadata, family, tensors, index, len(attentions)) for index in range(len(attentions))]
    spec = ModelSpec(
        architecture=arch,
        name=_printable(metadata.text("general.name", gguf.path.stem)),
        digest=digest,
        layers=tuple(
            LayerSpec(
                index=index,
                attention=attention,
                ffn=ffns[index],
                cache_group=group_of_window[attention.window],
                fused_qkv=f"blk.{index}.attn_qkv.weight" in tensors,
                ffn_norm=family.ffn_norm,
            )
            for index, attention in enumerate(attentions)
        ),
        vocab_size=tensors["token_embd.weight"].rows,
        hidden=hidden,
        context_length=metadata.count(f"{arch}.context_length"),
        norm_eps=metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
        embedding_scale=1.0,
        final_softcap=metadata.optional_number(f"{arch}.final_logit_softcapping"),
        cache_groups=groups,
    )
    check_tensors(spec, tensors)
    return spec


def _family(metadata: Metadata, gguf: GgufFile) -> Family:
    arch = metadata.text("general.architecture")
    family = _FAMILIES.get(arch)
    if family is None:
        raise UnsupportedModel(f"{gguf.path}: architecture {arch!r:.60} is none of {', '.join(sorted(_FAMILIES))}")
    return family


def _attentions(metadata: Metadata, family: Family, tensors: TensorIndex, hidden: int) -> list[AttentionSpec]:
    """One AttentionSpec per layer."""
    arch = family.architecture
    num_layers = metadata.count(f"{arch}.block_count")
    if num_layers > len(tensors):  # before anything of that size is built
        raise metadata.fail(f"{arch}.block_count is {num_layers}, but there are only {len(tensors)} tensors")
    heads = metadata.counts(f"{arch}.attention.head_count", num_layers)
    windows = _windows(metadata, family, num_layers)
    kv_key = f"{arch}.attention.head_count_kv"
    kv_heads = metadata.counts(kv_key, num_layers) if kv_key in metadata else heads
    return [
        replace(_attention(metadata, family, tensors, hidden, index, num_heads, num_kv_heads), window=windows[index])
        for index, (num_heads, num_kv_heads) in enumerate(zip(heads, kv_heads, strict=True))
    ]


def _attention(
    metadata: Metadata, family: Family, tensors: TensorIndex, hidden: int, index: int, num_heads: int, num_kv_heads: int
) -> AttentionSpec:
    arch = family.architecture
    if num_heads % num_kv_heads:
        raise metadata.fail(f"layer {index} has {num_heads} heads, no multiple of its {num_kv_heads} kv heads")
    default_dim = None if hidden % num_heads else hidden // num_heads
    key_dim = metadata.count(f"{arch}.attention.key_length", default_dim)
    blk = f"blk.{index}"
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=metadata.count(f"{arch}.attention.value_length", default_dim),
        scale=metadata.number(f"{arch}.attention.scale", 1 / math.sqrt(key_dim)),
        rope=_rope(metadata, family, tensors, key_dim),
        qkv_bias=family.qkv_bias or f"{blk}.attn_q.bias" in tensors or f"{blk}.attn_qkv.bias" in tensors,
        output_bias=f"{blk}.attn_output.bias" in tensors,
        qk_norm=family.qk_norm,
        sinks=family.sinks,
        softcap=metadata.optional_number(f"{arch}.attn_logit_softcapping"),
    )


def _windows(metadata: Metadata, family: Family, num_layers: int) -> list[int | None]:
    """What each layer's attention is limited to; the pattern is a period or a flag for each layer."""
    key = f"{family.architecture}.attention.sliding_window"
    if not family.window_period or key not in metadata:
        return [None] * num_layers
    window, pattern_key = metadata.count(key), f"{key}_pattern"
    is_windowed = metadata.flags(pattern_key, num_layers)
    if is_windowed is None:
        period = metadata.count(pattern_key, family.window_period)
        is_windowed = tuple(index % period < period - 1 for index in range(num_layers))
    return [window if flag else None for flag in is_windowed]


def _ffn(metadata: Metadata, family: Family, tensors: TensorIndex, index: int, num_layers: int) -> Ffn:
    """Experts in a layer that has a router."""
    arch, blk = family.architecture, f"blk.{index}"
    width_key = f"{arch}.feed_forward_length"
    if f"{blk}.ffn_gate_inp.weight" not in tensors:
        if family.activation is Activation.SWIGLU_CLAMPED:
            raise metadata.fail(f"tensor {blk}.ffn_gate_inp.weight is missing")
        return DenseFfn(metadata.counts(width_key, num_layers)[index], family.activation)
    expert_width_key = f"{arch}.expert_feed_forward_length"
    has_own_width = expert_width_key in metadata
    num_experts = metadata.count(f"{arch}.expert_count")
    num_selected = metadata.count(f"{arch}.expert_used_count")
    if num_selected > min(num_experts, MAX_SELECTED_EXPERTS):
        raise UnsupportedModel(
            f"{metadata.path}: {num_selected} of {num_experts} experts for each token;"
            f" lamina runs up to {MAX_SELECTED_EXPERTS}"
        )
    return ExpertsFfn(
        intermediate=metadata.counts(expert_width_key if has_own_width else width_key, num_layers)[index],
        activation=family.activation,
        num_experts=num_experts,
        num_selected=num_selected,
        gating=_gating(metadata, family),
        normalise=metadata.flag(f"{arch}.expert_weights_norm", family.normalise_shares),
        share_scale=metadata.optional_number(f"{arch}.expert_weights_scale") or 1.0,
        bias=f"{blk}.ffn_gate_inp.bias" in tensors,
        fused_gate_up=f"{blk}.ffn_gate_up_exps.weight" in tensors,
    )


def _gating(metadata: Metadata, family: Family) -> Gating:
    key = f"{family.architecture}.expert_gating_func"
    code = metadata.count(key) if metadata.optional_number(key) else None
    if code is None:
        return family.gating
    if code not in _GATINGS:
        raise UnsupportedModel(f"{metadata.path}: {key} is {code}; lamina knows {', '.join(map(str, _GATINGS))}")
    return _GATINGS[code]


def _rope(metadata: Metadata, family: Family, tensors: TensorIndex, key_dim: int) -> RopeSpec:
    key = f"{family.architecture}.rope.dimension_count"
    dims = metadata.count(key, key_dim)
    if dims % 2 or dims > key_dim:
        raise metadata.fail(f"{key} is {dims}, not an even number up to the head's {key_dim}")
    return RopeSpec(
        layout=family.rope_layout,
        dims=dims,
        freq_base=metadata.number(f"{family.architecture}.rope.freq_base", 10000.0),
        scaling=_rope_scaling(metadata, family.architecture, metadata.count(f"{family.architecture}.context_length")),
        has_freq_factors="rope_freqs.weight" in tensors,
    )


def _rope_scaling(metadata: Metadata, arch: str, context_length: int) -> RopeScaling:
    """As llama.cpp reads it: a factor without a type is linear, a type without a factor is no scaling."""
    prefix = f"{arch}.rope.scaling"
    kind = metadata.text(f"{prefix}.type", "linear")
    factor = metadata.optional_number(f"{prefix}.factor") or metadata.optional_number(f"{arch}.rope.scale_linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(f"{prefix}.type is {kind!r:.60}; lamina knows none, linear and yarn")
    if kind == "none" or factor is None:
        return NoScaling()
    if kind == "linear":
        return LinearScaling(factor)
    attn_factor = metadata.number(f"{prefix}.attn_factor", 1.0) * metadata.number(f"{prefix}.yarn_attn_factor", 1.0)
    return YarnScaling(
        factor=factor,
        original_context=metadata.count(f"{prefix}.original_context_length", context_length),
        ext_factor=metadata.number(f"{prefix}.yarn_ext_factor", 1.0),
        attn_factor=attn_factor,
        beta_fast=metadata.number(f"{prefix}.yarn_beta_fast", 32.0),
        beta_slow=metadata.number(f"{prefix}.yarn_beta_slow", 1.0),
    )


def cache_groups(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """The cache groups of layers with these attention windows (None = full attention), in order of appearance."""
    return tuple(
        CacheGroup(index, CacheKind.FULL if window is None else CacheKind.WINDOW, window)
        for index, window in enumerate(dict.fromkeys(windows))
    )


def check_tensors(spec: ModelSpec, tensors: TensorIndex) -> None:
    """Check name, shape and type of every tensor that `spec` needs, before anything is loaded.

    A tensor that the model does not know is refused as well: leaving it out would change the text silently.
    Raises InvalidCheckpoint or UnsupportedModel naming the tensor, what was expected and what was found.
    """
    shapes = stage_tensor_shapes(spec, spec.all_layers)
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise InvalidCheckpoint(f"{spec.name}: tensor {name} {list(shape)} is missing")
        _check_tensor(spec, tensor, shape)
        for companion in companion_names(name):
            if companion in tensors:
                _check_tensor(spec, tensors[companion], (1,))
    companions = {companion for name in shapes for companion in companion_names(name)}
    unknown = next((name for name in tensors if name not in shapes and name not in companions), None)
    if unknown is not None:
        raise UnsupportedModel(f"{spec.name}: tensor {tensors[unknown]} has no place in a {spec.architecture} model")


def _check_tensor(spec: ModelSpec, tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise InvalidCheckpoint(f"{spec.name}: expected {tensor.name} of shape {list(shape)}, found {tensor}")
    allowed: frozenset[GgmlType] = FLOAT_TYPES if is_vector(tensor.name, shape) else WEIGHT_TYPES
    if tensor.type not in allowed:
        names = ", ".join(sorted(kind.name for kind in allowed))
        raise UnsupportedModel(f"{spec.name}: tensor {tensor} has a type that is none of {names}")


def _printable(name: str) -> str:
    """A name fit for logs and pages: the file may hold anything."""
    return "".join(char if char.isprintable() else "?" for char in name)[:200]
