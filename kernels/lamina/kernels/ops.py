"""Every op: its signature, its specification (the docstring of its wrapper) and the check of its arguments.

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

ALL_OPS: Mapping[str, OpSpec] = {
    op.name: op
    for op in (
        EMBED,
        RMS_NORM,
        LINEAR,
        GATED_LINEAR,
        ROPE,
        KV_WRITE,
        ATTENTION,
        ADD,
        SOFTCAP,
        GATHER_ROWS,
        ARGMAX,
    )
}

ACTIVATIONS = ("silu", "gelu_tanh")
ROPE_LAYOUTS = ("norm", "neox")


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


def validate_args(op: OpSpec, args: Args) -> None:
    """Raise LaunchError unless names, kinds, dtypes and shapes of `args` fit the op."""
    if args.keys() != op.args.keys():
        raise LaunchError(f"{op.name}: arguments {sorted(args)} given, {sorted(op.args)} wanted")
    for name, arg in op.args.items():
        value = args[name]
        if value is None and arg.optional:
            continue
        if type(value) is not arg.kind:
            raise LaunchError(f"{op.name}: {name} must be {arg.kind.__name__}, not {type(value).__name__}")
        if isinstance(value, Buffer) and value.dtype is not arg.dtype:
            raise LaunchError(f"{op.name}: {name} must be {arg.dtype}, not {value.dtype}")
    problem = _shape_problem(op, args)
    if problem:
        raise LaunchError(f"{op.name}: {problem}")


def _shape_problem(op: OpSpec, args: Args) -> str | None:
    """What is wrong with the shapes, or None."""
    a: dict[str, int] = {name: v.num_columns for name, v in args.items() if isinstance(v, Buffer)}
    weight = args.get("weight", args.get("table"))
    cache = args.get("cache")
    match op.name:
        case "embed" if isinstance(weight, Weight) and a["out"] != weight.in_features:
            return f"out has {a['out']} columns, the table {weight.in_features}"
        case "rms_norm" if isinstance(weight, Buffer) and (a["x"] % weight.shape[0] or a["out"] != a["x"]):
            return f"x has {a['x']} columns, weight {weight.shape[0]}, out {a['out']}"
        case "linear" if isinstance(weight, Weight) and (a["x"], a["out"]) != (weight.in_features, weight.out_features):
            return f"x, out have {a['x']}, {a['out']} columns, weight is {weight.out_features} x {weight.in_features}"
        case "gated_linear" if isinstance(weight, Weight):
            return _gated_problem(a, weight, args["activation"])
        case "rope":
            return _rope_problem(a["x"], args)
        case "kv_write" | "attention" if isinstance(cache, KvCache):
            return _cache_problem(op, a, cache) or _sinks_problem(args, a.get("q", 0) // cache.key_dim)
        case "add" | "gather_rows" if len({a[name] for name in a if name != "indices"}) != 1:
            return f"columns differ: {a}"
    return None


def _gated_problem(columns: Mapping[str, int], weight: Weight, activation: Value) -> str | None:
    if activation not in ACTIVATIONS:
        return f"activation {activation!r} is none of {ACTIVATIONS}"
    if len(weight.part_rows) != 2 or weight.part_rows[0] != weight.part_rows[1]:
        return f"weight parts {weight.part_rows} are not two equal ones"
    if (columns["x"], columns["out"]) != (weight.in_features, weight.part_rows[0]):
        found = (columns["x"], columns["out"])
        return f"x, out have {found} columns, weight is {weight.part_rows} x {weight.in_features}"
    return None


def _rope_problem(num_columns: int, args: Args) -> str | None:
    head_dim, inv_freq = args["head_dim"], args["inv_freq"]
    if args["layout"] not in ROPE_LAYOUTS:
        return f"layout {args['layout']!r} is none of {ROPE_LAYOUTS}"
    if not isinstance(head_dim, int) or not isinstance(inv_freq, Buffer) or head_dim <= 0 or num_columns % head_dim:
        return f"{num_columns} columns are no multiple of head_dim {head_dim}"
    return None if 2 * inv_freq.shape[0] <= head_dim else f"{inv_freq.shape[0]} frequencies for head_dim {head_dim}"


def _cache_problem(op: OpSpec, columns: Mapping[str, int], cache: KvCache) -> str | None:
    if op.name == "kv_write":
        wanted = (cache.num_kv_heads * cache.key_dim, cache.num_kv_heads * cache.value_dim)
        found = (columns["k"], columns["v"])
        return None if found == wanted else f"k, v have {found} columns, the cache {wanted}"
    heads, rest = divmod(columns["q"], cache.key_dim)
    if rest or heads % cache.num_kv_heads or columns["out"] != heads * cache.value_dim:
        return f"q, out have {columns['q']}, {columns['out']} columns; cache has {cache.num_kv_heads} KV heads"
    return None


def _sinks_problem(args: Args, num_heads: int) -> str | None:
    sinks = args.get("sinks")
    if isinstance(sinks, Buffer) and sinks.shape != (num_heads,):
        return f"sinks have shape {sinks.shape}, q has {num_heads} heads"
    return None
