"""Every op: its signature and its specification (the docstring of its wrapper); `op_checks` checks arguments.

Ops act on the first n rows of their buffers, n given by the extent of `out` and the StepShape in force. Activations are
float32, row-major. Nothing here computes; `reference` holds the plain numpy version of each op, which is the oracle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.kernels.buffer import Buffer, DType, KvCache, Operand, Weight

if TYPE_CHECKING:
    from lamina.kernels.backend import Backend

Value = Operand | int | float | bool | str | None
Args = Mapping[str, Value]


class LaunchError(TypeError):
    """Wrong arity, type, dtype or shape of a launch argument: a bug in the caller, found before launch (B-05)."""


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument of an op: kind of value, dtype of a buffer, whether it is written, whether None is allowed."""

    kind: type
    dtype: DType | None = None
    written: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class OpSpec:
    """Name and typed signature of an op, in order."""

    name: str
    args: Mapping[str, Arg]


def _f32(*, written: bool = False, optional: bool = False) -> Arg:
    return Arg(Buffer, DType.F32, written, optional)


_I32 = Arg(Buffer, DType.I32)
_WEIGHT = Arg(Weight)

EMBED = OpSpec("embed", {"tokens": _I32, "table": _WEIGHT, "out": _f32(written=True), "scale": Arg(float)})
RMS_NORM = OpSpec("rms_norm", {"x": _f32(), "weight": _f32(), "out": _f32(written=True), "eps": Arg(float)})
LINEAR = OpSpec("linear", {"x": _f32(), "weight": _WEIGHT, "out": _f32(written=True), "accumulate": Arg(bool)})
GATED_LINEAR = OpSpec(
    "gated_linear", {"x": _f32(), "weight": _WEIGHT, "out": _f32(written=True), "activation": Arg(str)}
)
ROUTE = OpSpec(
    "route",
    {
        "x": _f32(),
        "experts": Arg(Buffer, DType.I32, written=True),
        "shares": _f32(written=True),
        "gating": Arg(str),
        "normalise": Arg(bool),
        "scale": Arg(float),
    },
)
EXPERT_GATED_LINEAR = OpSpec(
    "expert_gated_linear",
    {"x": _f32(), "experts": _I32, "weight": _WEIGHT, "out": _f32(written=True), "activation": Arg(str)},
)
EXPERT_LINEAR = OpSpec(
    "expert_linear",
    {
        "x": _f32(),
        "experts": _I32,
        "shares": _f32(),
        "weight": _WEIGHT,
        "out": _f32(written=True),
        "accumulate": Arg(bool),
    },
)
ROPE = OpSpec(
    "rope",
    {
        "x": _f32(written=True),
        "positions": _I32,
        "inv_freq": _f32(),
        "head_dim": Arg(int),
        "layout": Arg(str),
        "magnitude": Arg(float),
    },
)
KV_WRITE = OpSpec("kv_write", {"k": _f32(), "v": _f32(), "slots": _I32, "cache": Arg(KvCache, written=True)})
ATTENTION = OpSpec(
    "attention",
    {
        "q": _f32(),
        "cache": Arg(KvCache),
        "positions": _I32,
        "row_starts": _I32,
        "block_table": _I32,
        "out": _f32(written=True),
        "scale": Arg(float),
        "window": Arg(int),
        "softcap": Arg(float),
        "sinks": _f32(optional=True),
    },
)
ADD = OpSpec("add", {"x": _f32(), "y": _f32(), "out": _f32(written=True)})
SOFTCAP = OpSpec("softcap", {"x": _f32(written=True), "cap": Arg(float)})
GATHER_ROWS = OpSpec("gather_rows", {"x": _f32(), "indices": _I32, "out": _f32(written=True)})
ARGMAX = OpSpec("argmax", {"x": _f32(), "out": Arg(Buffer, DType.I32, written=True)})
SAMPLE = OpSpec("sample", {"x": _f32(), "params": _f32(), "out": Arg(Buffer, DType.I32, written=True)})

ALL_OPS: Mapping[str, OpSpec] = {
    op.name: op
    for op in (
        EMBED,
        RMS_NORM,
        LINEAR,
        GATED_LINEAR,
        ROUTE,
        EXPERT_GATED_LINEAR,
        EXPERT_LINEAR,
        ROPE,
        KV_WRITE,
        ATTENTION,
        ADD,
        SOFTCAP,
        GATHER_ROWS,
        ARGMAX,
        SAMPLE,
    )
}

ACTIVATIONS = ("silu", "gelu_tanh")
EXPERT_ACTIVATIONS = (*ACTIVATIONS, "swiglu_clamped")
GATINGS = ("softmax", "softmax_selected")
MAX_SELECTED_EXPERTS = 32  # of one row
LEAST_SHARE_SUM = 2.0**-14  # what a row's shares are at least divided by when normalised
ROPE_LAYOUTS = ("norm", "neox")
SAMPLE_PARAMS = ("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "uniform")  # columns, in order


def embed(b: "Backend", tokens: Buffer, table: Weight, out: Buffer, scale: float = 1.0) -> None:
    """out[r] = scale * table[tokens[r]]: i32 [rows], Weight [vocab, hidden] -> f32 [rows, hidden].

    Exact: the dequantised row, also where the Weight was repacked for `linear` (a tied head).
    """
    b.launch(EMBED, {"tokens": tokens, "table": table, "out": out, "scale": float(scale)})


def rms_norm(b: "Backend", x: Buffer, weight: Buffer, out: Buffer, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight over each group of len(weight) columns (Zhang & Sennrich 2019).

    f32 [rows, C], weight f32 [G] with C a multiple of G: G = C is the usual norm, G = head_dim a norm per head.
    `out` may be `x`.
    """
    b.launch(RMS_NORM, {"x": x, "weight": weight, "out": out, "eps": float(eps)})


def linear(b: "Backend", x: Buffer, weight: Weight, out: Buffer, *, accumulate: bool = False) -> None:
    """out = x @ weight^T (+ bias) (+ out if accumulate): f32 [rows, in] -> f32 [rows, out of all parts].

    Accuracy: `reference` multiplies dequantised float32; others may round activations to 8 bits per block of 32 or 256.
    """
    b.launch(LINEAR, {"x": x, "weight": weight, "out": out, "accumulate": accumulate})


def gated_linear(b: "Backend", x: Buffer, weight: Weight, out: Buffer, activation: str) -> None:
    """out = act(x @ gate^T) * (x @ up^T) for a Weight of two equal parts (gate, up): f32 [rows, in] -> [rows, part].

    `activation` is "silu" (SwiGLU) or "gelu_tanh" (GeGLU), Shazeer 2020.
    """
    b.launch(GATED_LINEAR, {"x": x, "weight": weight, "out": out, "activation": activation})


def route(
    b: "Backend",
    logits: Buffer,
    experts: Buffer,
    shares: Buffer,
    *,
    gating: str,
    normalise: bool = False,
    scale: float = 1.0,
) -> None:
    """Choose the k experts of each row: f32 [rows, E] -> experts i32 [rows, k] and shares f32 [rows, k], both ROWS.

    experts[r] are the distinct ids of the k largest of logits[r] in descending order, of equals the lower id first.
    With p = softmax over all E ("softmax") or over the k selected alone ("softmax_selected"), shares[r, j] is
    p[experts[r, j]], divided by max(their sum over j, LEAST_SHARE_SUM) if `normalise`, times `scale`.
    A row with a NaN, or whose largest logit is not finite, gets experts 0 .. k-1 and shares of NaN: its ids can be
    followed, and what it computes is not finite. k <= min(E, MAX_SELECTED_EXPERTS).
    """
    args: dict[str, Value] = {"x": logits, "experts": experts, "shares": shares, "gating": gating}
    b.launch(ROUTE, {**args, "normalise": normalise, "scale": float(scale)})


def expert_gated_linear(b: "Backend", x: Buffer, experts: Buffer, weight: Weight, out: Buffer, activation: str) -> None:
    """`gated_linear` of each row by each of its k experts: f32 [rows, in], i32 [rows, k] -> f32 [rows, k * part].

    out[r, j * part : (j + 1) * part] = act(x[r] @ gate_e^T, x[r] @ up_e^T) with e = experts[r, j]. The Weight of E
    experts has 2 E equal parts, gate_0, up_0, gate_1, up_1 ..., and its bias (if any) in the same order. Ids are read
    on the device and lie in [0, E), distinct in a row; how many rows chose an expert is never known to the host.
    act(g, u) is silu(g) u, gelu_tanh(g) u, or for "swiglu_clamped" (gpt-oss) g' sigmoid(1.702 g') (u' + 1) with
    g' = min(g, 7) and u' = u clamped to [-7, 7].
    """
    args: dict[str, Value] = {"x": x, "experts": experts, "weight": weight, "out": out}
    b.launch(EXPERT_GATED_LINEAR, {**args, "activation": activation})


def expert_linear(
    b: "Backend",
    x: Buffer,
    experts: Buffer,
    shares: Buffer,
    weight: Weight,
    out: Buffer,
    *,
    accumulate: bool = False,
) -> None:
    """out[r] = sum over j of shares[r, j] * (x[r, j] @ weight_e^T (+ bias_e)) (+ out[r] if accumulate).

    x f32 [rows, k * in] holds k vectors a row as `expert_gated_linear` leaves them, experts i32 [rows, k], shares f32
    [rows, k], out f32 [rows, part]. The Weight of E experts has E equal parts. Terms are added one by one in ascending
    order of the expert's id, onto the old `out` if accumulate.
    """
    args: dict[str, Value] = {"x": x, "experts": experts, "shares": shares, "weight": weight, "out": out}
    b.launch(EXPERT_LINEAR, {**args, "accumulate": accumulate})


def rope(
    b: "Backend", x: Buffer, positions: Buffer, inv_freq: Buffer, *, head_dim: int, layout: str, magnitude: float = 1.0
) -> None:
    """Rotate, in place, each head of x by its row's position (Su et al. 2021).

    x f32 [rows, heads * head_dim], positions i32 [rows], inv_freq f32 [D/2] with D <= head_dim (dims beyond D pass).
    Angle = position * inv_freq[i] rounded to float32; inv_freq already holds frequency factors and YaRN; cos and sin
    are multiplied by `magnitude`. layout "norm" rotates (x[2i], x[2i+1]), "neox" rotates (x[i], x[i + D/2]).
    """
    args: dict[str, Value] = {"x": x, "positions": positions, "inv_freq": inv_freq}
    b.launch(ROPE, {**args, "head_dim": head_dim, "layout": layout, "magnitude": float(magnitude)})


def kv_write(b: "Backend", k: Buffer, v: Buffer, slots: Buffer, cache: KvCache) -> None:
    """Store row r of k [rows, kv_heads * key_dim] and v [rows, kv_heads * value_dim] at slot slots[r] (i32 [rows]).

    slot = block * 16 + offset in the block; slots of one step are distinct.
    """
    b.launch(KV_WRITE, {"k": k, "v": v, "slots": slots, "cache": cache})


def attention(
    b: "Backend",
    q: Buffer,
    cache: KvCache,
    positions: Buffer,
    row_starts: Buffer,
    block_table: Buffer,
    out: Buffer,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Buffer | None = None,
) -> None:
    """Causal attention over the paged cache, grouped queries, without gathering pages or repeating KV heads.

    q f32 [rows, heads * key_dim] -> out f32 [rows, heads * value_dim]. Rows of sequence s are
    row_starts[s] .. row_starts[s + 1] - 1 (i32 [num_seqs + 1], a FIXED buffer); row r is at positions[r] and sees keys
    of its sequence at positions p with p <= positions[r] and, if window > 0, positions[r] - p < window. Key p lies in
    block block_table[s, p // 16] (i32 [seqs, max_blocks]) at offset p % 16. Query head h uses KV head
    h // (heads / kv_heads). scores = scale * q.k, then softcap * tanh(scores / softcap) if softcap > 0; sinks f32
    [heads] join the softmax's denominator. Keys of the same step must have been written before.
    """
    args: dict[str, Value] = {"q": q, "cache": cache, "positions": positions, "row_starts": row_starts}
    args |= {"block_table": block_table, "out": out, "scale": float(scale), "window": window}
    b.launch(ATTENTION, {**args, "softcap": float(softcap), "sinks": sinks})


def add(b: "Backend", x: Buffer, y: Buffer, out: Buffer) -> None:
    """out = x + y, f32 [rows, C]; out may be x or y."""
    b.launch(ADD, {"x": x, "y": y, "out": out})


def softcap(b: "Backend", x: Buffer, cap: float) -> None:
    """x = cap * tanh(x / cap), in place, f32 [rows, C]."""
    b.launch(SOFTCAP, {"x": x, "cap": float(cap)})


def gather_rows(b: "Backend", x: Buffer, indices: Buffer, out: Buffer) -> None:
    """out[i] = x[indices[i]]: f32 [rows, C], i32 [logit_rows] -> f32 [logit_rows, C]."""
    b.launch(GATHER_ROWS, {"x": x, "indices": indices, "out": out})


def argmax(b: "Backend", x: Buffer, out: Buffer) -> None:
    """out[r] = index of the largest of x[r], the first of equals; -1 if the row has a NaN or no finite value (B-35)."""
    b.launch(ARGMAX, {"x": x, "out": out})


def sample(b: "Backend", x: Buffer, params: Buffer, out: Buffer) -> None:
    """Draw a token from each row of logits whose temperature is > 0: f32 [rows, C], f32 [rows, 6] -> i32 [rows].

    On entry `out` holds `argmax` of x; rows with a temperature of 0, and rows that are not finite (-1), keep it (B-35).
    The columns of `params` are SAMPLE_PARAMS; 0 switches top_k, min_p and top_n_sigma off, 1 top_p. In order (B-31):

    1. top_n_sigma keeps logits >= max - n * sigma, sigma: the standard deviation of the row's finite logits (B-33).
    2. The logits are divided by the temperature, by 1e-6 if that is more (B-32).
    3. top_k keeps the k largest.
    4. min_p keeps those at least min_p times as likely as the likeliest.
    5. top_p keeps the fewest likeliest that have top_p of the probability together, renormalised over what is left.
    6. What is left is renormalised. The token drawn is the first, in order of id, at which the sum of probabilities
       exceeds `uniform`, a random number in [0, 1) that the caller brings.

    Of equal logits a filter keeps those with the lowest ids. A sum that is within float rounding of a bound (2e-6,
    relative) may fall on either side of it.
    """
    b.launch(SAMPLE, {"x": x, "params": params, "out": out})
