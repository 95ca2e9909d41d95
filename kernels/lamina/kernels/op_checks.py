"""The check of a launch's arguments against their specification in `ops`, before anything runs (B-05)."""

from collections.abc import Mapping

from lamina.kernels.buffer import Buffer, KvCache, Weight
from lamina.kernels.ops import (
    ACTIVATIONS,
    EXPERT_ACTIVATIONS,
    GATINGS,
    MAX_SELECTED_EXPERTS,
    ROPE_LAYOUTS,
    SAMPLE_PARAMS,
    Args,
    LaunchError,
    OpSpec,
    Value,
)


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
        case "route":
            return _route_problem(a, args["gating"])
        case "expert_gated_linear" if isinstance(weight, Weight):
            return _expert_gated_problem(a, weight, args["activation"])
        case "expert_linear" if isinstance(weight, Weight):
            return _expert_problem(a, weight)
        case "rope":
            return _rope_problem(a["x"], args)
        case "kv_write" | "attention" if isinstance(cache, KvCache):
            return _cache_problem(op, a, cache) or _sinks_problem(args, a.get("q", 0) // cache.key_dim)
        case "add" | "gather_rows" if len({a[name] for name in a if name != "indices"}) != 1:
            return f"columns differ: {a}"
        case "sample" if a["params"] != len(SAMPLE_PARAMS):
            return f"params have {a['params']} columns, not {len(SAMPLE_PARAMS)}"
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


def _route_problem(columns: Mapping[str, int], gating: Value) -> str | None:
    if gating not in GATINGS:
        return f"gating {gating!r} is none of {GATINGS}"
    selected, most = columns["experts"], min(columns["x"], MAX_SELECTED_EXPERTS)
    if selected != columns["shares"] or selected > most:
        return f"experts, shares have {selected}, {columns['shares']} columns for {columns['x']} logits, at most {most}"
    return None


def _expert_gated_problem(columns: Mapping[str, int], weight: Weight, activation: Value) -> str | None:
    if activation not in EXPERT_ACTIVATIONS:
        return f"activation {activation!r} is none of {EXPERT_ACTIVATIONS}"
    parts, part_rows = len(weight.part_rows), weight.part_rows[0]
    if parts % 2 or set(weight.part_rows) != {part_rows}:
        return f"weight has {parts} parts of {_few(weight.part_rows)} rows, not two equal ones for each expert"
    return _selection_problem(columns, parts // 2, (weight.in_features, columns["experts"] * part_rows))


def _expert_problem(columns: Mapping[str, int], weight: Weight) -> str | None:
    part_rows = weight.part_rows[0]
    if set(weight.part_rows) != {part_rows}:
        return f"weight has parts of {_few(weight.part_rows)} rows, not one of equal rows for each expert"
    if columns["shares"] != columns["experts"]:
        return f"experts, shares have {columns['experts']}, {columns['shares']} columns"
    wanted = (columns["experts"] * weight.in_features, part_rows)
    return _selection_problem(columns, len(weight.part_rows), wanted)


def _selection_problem(columns: Mapping[str, int], num_experts: int, wanted: tuple[int, int]) -> str | None:
    """`wanted` are the columns of x and out."""
    if columns["experts"] > num_experts:
        return f"{columns['experts']} experts a row of a weight of {num_experts}"
    found = (columns["x"], columns["out"])
    return None if found == wanted else f"x, out have {found} columns, {columns['experts']} experts a row want {wanted}"


def _few(rows: tuple[int, ...]) -> str:
    """The distinct values, without a list of all experts."""
    return ", ".join(str(value) for value in sorted(set(rows)))


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
