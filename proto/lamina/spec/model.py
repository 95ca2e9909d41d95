"""The declarative model: what every layer computes, and the byte and flop arithmetic of a range of layers.

One frozen ModelSpec describes any model we run; it is compared, hashed and sent, never subclassed. Knows no file
format, no backend and no device.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from lamina.spec.checkpoint import TensorIndex
from lamina.spec.errors import InvalidSplit


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


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """down( activation(gate(x)) * up(x) )"""

    intermediate: int
    activation: Activation


Ffn: TypeAlias = DenseFfn
"""What follows attention; a mixture of experts joins here as a second member of the union."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One pre-norm layer: x += attention(norm(x)); x += ffn(norm(x))."""

    index: int  # absolute in the model, never relative to a stage
    attention: AttentionSpec
    ffn: Ffn
    cache_group: int
    fused_qkv: bool = False  # q, k, v are the row ranges of one tensor attn_qkv


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

    def layers_of(self, layers: LayerRange) -> tuple[LayerSpec, ...]:
        """Raises InvalidSplit if the range leaves the model."""
        raise NotImplementedError

    def kv_values_per_token(self, layers: LayerRange, group: int | None = None) -> int:
        """Key and value elements that one token adds in these layers (of one cache group, or of all)."""
        raise NotImplementedError

    def kv_bytes_per_token(self, layers: LayerRange, value_bytes: int, group: int | None = None) -> int:
        """Bytes of the same at `value_bytes` per element; formats below a byte use kv_values_per_token."""
        raise NotImplementedError

    def flops_per_token(self, layers: LayerRange, context: int = 0) -> int:
        """Multiplications and additions for one token: 2 per matrix element (the head counts with the last layer),
        plus scores and weighted sum over `context` cached tokens (at most its window in a window layer)."""
        raise NotImplementedError


def stage_tensor_shapes(spec: ModelSpec, layers: LayerRange) -> dict[str, tuple[int, ...]]:
    """Name -> expected shape (GGUF order) of the tensors that a stage with these layers needs."""
    raise NotImplementedError


def stage_tensor_names(spec: ModelSpec, layers: LayerRange, tensors: TensorIndex) -> tuple[str, ...]:
    """Exactly the tensors that a stage with these layers loads: the first stage has token_embd, the last output_norm
    and output (token_embd when tied); rope_freqs is replicated; scales that belong to a tensor come with it."""
    raise NotImplementedError


def stage_weight_bytes(spec: ModelSpec, layers: LayerRange, tensors: TensorIndex) -> int:
    """Stored bytes of those tensors, summed per tensor (types are mixed inside one model)."""
    raise NotImplementedError
