"""The declarative model: what every layer computes, and which tensors a range of layers has.

One frozen ModelSpec describes any model we run; it is compared, hashed and sent, never subclassed. Knows no file
format, no backend and no device.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from lamina.spec.checkpoint import TensorIndex
from lamina.spec.errors import InvalidCheckpoint, InvalidSplit

MAX_SELECTED_EXPERTS = 32  # of one token
ROPE_FACTORS = "rope_freqs.weight"  # one tensor for all layers, replicated on every stage


class RopeLayout(Enum):
    """Which two values of a head rotate together."""

    NORM = "norm"  # adjacent pairs (2i, 2i+1)
    NEOX = "neox"  # halves (i, i + dims/2)


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Angles as trained."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071); formula in models-and-formats.md section 5."""

    factor: float
    original_context: int
    ext_factor: float = 1.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


RopeScaling: TypeAlias = NoScaling | LinearScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `dims` values of each head: theta_i = freq_base^(-2i/dims)."""

    layout: RopeLayout
    dims: int
    freq_base: float
    scaling: RopeScaling = NoScaling()
    has_freq_factors: bool = False  # theta_i is divided by rope_freqs[i], a tensor [dims/2]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer. Query head h reads kv head h // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float  # factor on q·k
    rope: RopeSpec
    window: int | None = None  # key p0 is visible to query p1 iff 0 <= p1 - p0 < window
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMSNorm per head on q and k, before rope
    sinks: bool = False  # one logit per head joins the softmax denominator
    softcap: float | None = None  # logits become cap * tanh(logits / cap)

    @property
    def query_width(self) -> int:
        return self.num_heads * self.key_dim

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_kv_heads * self.value_dim

    @property
    def output_width(self) -> int:
        """Width of the concatenated heads that enter attn_output."""
        return self.num_heads * self.value_dim


class Activation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    SWIGLU_CLAMPED = "swiglu_clamped"  # gpt-oss; experts only


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """down( activation(gate(x)) * up(x) )"""

    intermediate: int
    activation: Activation


class Gating(Enum):
    """Over what a router takes its softmax."""

    SOFTMAX = "softmax"  # all experts
    SOFTMAX_SELECTED = "softmax_selected"  # those selected alone


@dataclass(frozen=True, slots=True)
class ExpertsFfn:
    """Sum over the `num_selected` experts that router(x) ranks first of share * down( activation(gate(x), up(x)) )."""

    intermediate: int  # of one expert
    activation: Activation
    num_experts: int
    num_selected: int
    gating: Gating
    normalise: bool  # shares are divided by their sum
    share_scale: float = 1.0
    bias: bool = False  # of the router and of every matrix of the experts
    fused_gate_up: bool = False  # gate and up are the halves of one tensor ffn_gate_up_exps


Ffn: TypeAlias = DenseFfn | ExpertsFfn
"""What follows attention."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One pre-norm layer: x += attention(norm(x)); x += ffn(norm(x))."""

    index: int  # absolute in the model, never relative to a stage
    attention: AttentionSpec
    ffn: Ffn
    cache_group: int
    fused_qkv: bool = False  # q, k, v are the row ranges of one tensor attn_qkv
    ffn_norm: str = "ffn_norm"  # tensor of the norm before the ffn


class CacheKind(Enum):
    FULL = "full"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table: all that attend to everything, or to the same window of tokens."""

    index: int
    kind: CacheKind
    window: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Layers start ... stop-1; never empty. As text, what users type, both ends are inclusive: "0-11"."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InvalidSplit(f"layer range [{self.start}, {self.stop}) is empty or negative")

    @classmethod
    def parse(cls, text: str) -> "LayerRange":
        """ "0-11" (inclusive) or "5". Raises InvalidSplit."""
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", text, re.ASCII)
        if match is None:
            raise InvalidSplit(f"layer range {text!r} is not of the form FIRST-LAST, like 0-11")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise InvalidSplit(f"layer range {text!r} ends before it starts")
        return cls(first, last + 1)

    def __str__(self) -> str:
        return f"{self.start}-{self.stop - 1}" if len(self) > 1 else str(self.start)

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, layer: object) -> bool:
        return layer in range(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model. `digest` identifies the weights (lamina.spec.digest)."""

    architecture: str
    name: str
    digest: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden: int
    context_length: int
    norm_eps: float
    tie_embeddings: bool
    embedding_scale: float
    final_softcap: float | None
    cache_groups: tuple[CacheGroup, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def all_layers(self) -> LayerRange:
        return LayerRange(0, self.num_layers)

    def __post_init__(self) -> None:
        for place, layer in enumerate(self.layers):
            if layer.index != place:
                raise InvalidCheckpoint(f"model {self.name}: the layer at place {place} has index {layer.index}")
            if not 0 <= layer.cache_group < len(self.cache_groups):
                raise InvalidCheckpoint(f"model {self.name}: layer {place} names cache group {layer.cache_group}")
            if self.cache_groups[layer.cache_group].window != layer.attention.window:
                raise InvalidCheckpoint(f"model {self.name}: layer {place} and its cache group differ in their window")

    def layers_of(self, layers: LayerRange) -> tuple[LayerSpec, ...]:
        """Raises InvalidSplit if the range leaves the model."""
        if layers.stop > self.num_layers:
            raise InvalidSplit(f"layers {layers} do not exist: {self.name} has layers {self.all_layers}")
        return self.layers[layers.start : layers.stop]

    def kv_values_per_token(self, layers: LayerRange, group: int | None = None) -> int:
        """Key and value elements that one token adds in these layers (of one cache group, or of all)."""
        return sum(
            layer.attention.key_width + layer.attention.value_width
            for layer in self.layers_of(layers)
            if group is None or layer.cache_group == group
        )


def layer_tensor_shapes(layer: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape (GGUF order, in_features first) of the tensors of one layer."""
    attention, ffn, blk = layer.attention, layer.ffn, f"blk.{layer.index}"
    qkv = {"attn_q": attention.query_width, "attn_k": attention.key_width, "attn_v": attention.value_width}
    if layer.fused_qkv:
        qkv = {"attn_qkv": sum(qkv.values())}
    shapes: dict[str, tuple[int, ...]] = {f"{blk}.attn_norm.weight": (hidden,)}
    shapes |= {f"{blk}.{name}.weight": (hidden, width) for name, width in qkv.items()}
    if attention.qkv_bias:
        shapes |= {f"{blk}.{name}.bias": (width,) for name, width in qkv.items()}
    if attention.qk_norm:
        shapes |= {f"{blk}.{name}.weight": (attention.key_dim,) for name in ("attn_q_norm", "attn_k_norm")}
    if attention.sinks:
        shapes[f"{blk}.attn_sinks.weight"] = (attention.num_heads,)
    shapes[f"{blk}.attn_output.weight"] = (attention.output_width, hidden)
    if attention.output_bias:
        shapes[f"{blk}.attn_output.bias"] = (hidden,)
    shapes[f"{blk}.{layer.ffn_norm}.weight"] = (hidden,)
    if isinstance(ffn, ExpertsFfn):
        return shapes | _expert_shapes(ffn, hidden, blk)
    return shapes | {
        f"{blk}.ffn_gate.weight": (hidden, ffn.intermediate),
        f"{blk}.ffn_up.weight": (hidden, ffn.intermediate),
        f"{blk}.ffn_down.weight": (ffn.intermediate, hidden),
    }


def _expert_shapes(ffn: ExpertsFfn, hidden: int, blk: str) -> dict[str, tuple[int, ...]]:
    """A tensor of experts has their matrices one after another: in_features, out_features, experts."""
    widths = {"ffn_gate_exps": ffn.intermediate, "ffn_up_exps": ffn.intermediate}
    if ffn.fused_gate_up:
        widths = {"ffn_gate_up_exps": 2 * ffn.intermediate}
    matrices = {name: (hidden, width) for name, width in widths.items()}
    matrices["ffn_down_exps"] = (ffn.intermediate, hidden)
    shapes: dict[str, tuple[int, ...]] = {f"{blk}.ffn_gate_inp.weight": (hidden, ffn.num_experts)}
    shapes |= {f"{blk}.{name}.weight": (*shape, ffn.num_experts) for name, shape in matrices.items()}
    if ffn.bias:
        shapes[f"{blk}.ffn_gate_inp.bias"] = (ffn.num_experts,)
        shapes |= {f"{blk}.{name}.bias": (width, ffn.num_experts) for name, (_, width) in matrices.items()}
    return shapes


def end_tensor_shapes(spec: ModelSpec, layers: LayerRange) -> dict[str, tuple[int, ...]]:
    """Name -> expected shape of what a stage with these layers needs beside them: embedding, norm and head."""
    is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
    embedding = (spec.hidden, spec.vocab_size)
    shapes: dict[str, tuple[int, ...]] = {}
    if is_first or (is_last and spec.tie_embeddings):
        shapes["token_embd.weight"] = embedding
    if is_last:
        shapes["output_norm.weight"] = (spec.hidden,)
        if not spec.tie_embeddings:
            shapes["output.weight"] = embedding
    return shapes


def stage_tensor_shapes(spec: ModelSpec, layers: LayerRange) -> dict[str, tuple[int, ...]]:
    """Name -> expected shape (GGUF order) of the tensors that a stage with these layers needs."""
    ends = end_tensor_shapes(spec, layers)
    shapes = {name: ends.pop(name) for name in ("token_embd.weight",) if name in ends}
    for layer in spec.layers_of(layers):
        if layer.attention.rope.has_freq_factors:
            shapes[ROPE_FACTORS] = (layer.attention.rope.dims // 2,)
        shapes |= layer_tensor_shapes(layer, spec.hidden)
    return shapes | ends


def is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is added or multiplied value by value, so that devices hold it as float32: norms, biases."""
    return len(shape) == 1 or name.endswith(".bias")


def companion_names(weight_name: str) -> tuple[str, str]:
    """The scalar scales that may lie beside an NVFP4 weight (models-and-formats.md section 3)."""
    stem = weight_name.removesuffix(".weight")
    return f"{stem}.scale", f"{stem}.input_scale"


def stage_tensor_names(spec: ModelSpec, layers: LayerRange, tensors: TensorIndex) -> tuple[str, ...]:
    """Exactly the tensors that a stage with these layers loads: the first stage has token_embd, the last output_norm
    and output (token_embd when tied); rope_freqs is replicated; the scales beside a weight come with it."""
    names: list[str] = []
    for name in stage_tensor_shapes(spec, layers):
        names.append(name)
        names += [companion for companion in companion_names(name) if companion in tensors]
    return tuple(names)
