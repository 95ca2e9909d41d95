"""Model families: one table row each, and how GGUF metadata becomes a ModelSpec.

Knows metadata keys and tensor names; knows no backend, and reads nothing but the header it is given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.spec.checkpoint import TensorIndex, TensorInfo
from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel
from lamina.spec.gguf import GgufFile
from lamina.spec.metadata import Metadata
from lamina.spec.model import (
    Activation,
    AttentionSpec,
    CacheGroup,
    CacheKind,
    DenseFfn,
    LayerSpec,
    LinearScaling,
    ModelSpec,
    NoScaling,
    RopeLayout,
    RopeScaling,
    RopeSpec,
    YarnScaling,
    companion_names,
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
    activation: Activation = Activation.SILU


_FAMILIES = {
    family.architecture: family
    for family in (
        Family("llama", RopeLayout.NORM),  # the converter has permuted q and k
        Family("qwen2", RopeLayout.NEOX, qkv_bias=True),
        Family("qwen3", RopeLayout.NEOX, qk_norm=True),
    )
}


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
    widths = metadata.counts(f"{arch}.feed_forward_length", len(attentions))
    spec = ModelSpec(
        architecture=arch,
        name=_printable(metadata.text("general.name", gguf.path.stem)),
        digest=digest,
        layers=tuple(
            LayerSpec(
                index=index,
                attention=attention,
                ffn=DenseFfn(widths[index], family.activation),
                cache_group=group_of_window[attention.window],
                fused_qkv=f"blk.{index}.attn_qkv.weight" in tensors,
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
    if f"{arch}.expert_count" in metadata and gguf.metadata[f"{arch}.expert_count"] != 0:
        raise UnsupportedModel(f"{gguf.path}: is a mixture of experts, which lamina does not run for {arch}")
    return family


def _attentions(metadata: Metadata, family: Family, tensors: TensorIndex, hidden: int) -> list[AttentionSpec]:
    """One AttentionSpec per layer."""
    arch = family.architecture
    num_layers = metadata.count(f"{arch}.block_count")
    if num_layers > len(tensors):  # before anything of that size is built
        raise metadata.fail(f"{arch}.block_count is {num_layers}, but there are only {len(tensors)} tensors")
    heads = metadata.counts(f"{arch}.attention.head_count", num_layers)
    kv_key = f"{arch}.attention.head_count_kv"
    kv_heads = metadata.counts(kv_key, num_layers) if kv_key in metadata else heads
    return [
        _attention(metadata, family, tensors, hidden, index, num_heads, num_kv_heads)
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
        softcap=metadata.optional_number(f"{arch}.attn_logit_softcapping"),
    )


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
    allowed: frozenset[GgmlType] = FLOAT_TYPES if len(shape) == 1 else WEIGHT_TYPES
    if tensor.type not in allowed:
        names = ", ".join(sorted(kind.name for kind in allowed))
        raise UnsupportedModel(f"{spec.name}: tensor {tensor} has a type that is none of {names}")


def _printable(name: str) -> str:
    """A name fit for logs and pages: the file may hold anything."""
    return "".join(char if char.isprintable() else "?" for char in name)[:200]
