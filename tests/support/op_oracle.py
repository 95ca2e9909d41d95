"""Every op in float64, one row and one head at a time, from its specification in lamina.kernels.ops.

Shares no code with the backends, on purpose: slow, plain, and written a second time.
"""

import math

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from lamina.kernels.buffer import DType, HostTensor

F64 = NDArray[np.float64]


def decoded(*tensors: HostTensor) -> F64:
    """The stacked matrix [sum of rows, cols]."""
    parts = [quants.dequantize(t.data, GGMLQuantizationType(t.type.value)).reshape(t.rows, t.cols) for t in tensors]
    return np.concatenate(parts).astype(np.float64)


def rms_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> F64:
    out = x.astype(np.float64)
    for row in out:
        for start in range(0, len(row), len(weight)):
            group = row[start : start + len(weight)]
            group /= math.sqrt(sum(value * value for value in group.tolist()) / len(group) + eps)
            group *= weight
    return out


def silu(x: F64) -> F64:
    return np.array([value / (1 + math.exp(-value)) if value > -700 else 0.0 for value in x.ravel()]).reshape(x.shape)


def gelu_tanh(x: F64) -> F64:
    def one(value: float) -> float:
        return 0.5 * value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)))

    return np.array([one(value) for value in x.ravel().tolist()]).reshape(x.shape)


def rope(
    x: NDArray[np.float32],
    positions: list[int],
    inv_freq: NDArray[np.float32],
    head_dim: int,
    layout: str,
    magnitude: float,
) -> F64:
    """Each pair as a complex number, turned."""
    out = x.astype(np.float64)
    half = len(inv_freq)
    for row, position in zip(out, positions, strict=True):
        for start in range(0, len(row), head_dim):
            for i in range(half):
                a, b = (2 * i, 2 * i + 1) if layout == "norm" else (i, i + half)
                angle = float(np.float32(position) * inv_freq[i])
                turned = complex(row[start + a], row[start + b]) * complex(math.cos(angle), math.sin(angle))
                row[start + a], row[start + b] = magnitude * turned.real, magnitude * turned.imag
    return out


def attention(
    q: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    positions: list[int],
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: NDArray[np.float32] | None = None,
) -> F64:
    """Rows of one sequence: q [rows, heads, key dim], keys [tokens, kv heads, key dim] -> [rows, heads, value dim]."""
    rows, heads, _ = q.shape
    group = heads // keys.shape[1]
    out = np.zeros((rows, heads, values.shape[2]))
    for row in range(rows):
        first = max(0, positions[row] - window + 1) if window else 0
        for head in range(heads):
            seen_k = keys[first : positions[row] + 1, head // group].astype(np.float64)
            seen_v = values[first : positions[row] + 1, head // group].astype(np.float64)
            scores = scale * (seen_k @ q[row, head].astype(np.float64))
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            exps = np.exp(scores)
            total = exps.sum() + (math.exp(sinks[head]) if sinks is not None else 0.0)
            out[row, head] = (exps / total) @ seen_v
    return out


def stored(values: NDArray[np.float32], dtype: DType) -> NDArray[np.float32]:
    """What a KV cache of this dtype gives back, [tokens, heads, dim], by gguf's own rounding."""
    kind = {
        DType.F32: GGMLQuantizationType.F32,
        DType.F16: GGMLQuantizationType.F16,
        DType.BF16: GGMLQuantizationType.BF16,
        DType.Q8_0: GGMLQuantizationType.Q8_0,
    }[dtype]
    flat = np.ascontiguousarray(values.reshape(-1, values.shape[-1]))
    raw = np.ascontiguousarray(quants.quantize(flat, kind)).view(np.uint8)
    return quants.dequantize(raw, kind).reshape(values.shape)


def route(
    logits: NDArray[np.float32], num_selected: int, *, gating: str, normalise: bool, scale: float
) -> tuple[NDArray[np.int32], F64]:
    """Experts and shares of rows of finite logits, by sorting (-logit, id)."""
    experts = np.zeros((len(logits), num_selected), np.int32)
    shares = np.zeros((len(logits), num_selected))
    for row, values in enumerate(logits.astype(np.float64).tolist()):
        chosen = sorted(range(len(values)), key=lambda expert: (-values[expert], expert))[:num_selected]
        among = chosen if gating == "softmax_selected" else range(len(values))
        total = sum(math.exp(values[expert] - max(values)) for expert in among)
        picked = [math.exp(values[expert] - max(values)) / total for expert in chosen]
        divisor = max(sum(picked), 2.0**-14) if normalise else 1.0
        experts[row] = chosen
        shares[row] = [scale * share / divisor for share in picked]
    return experts, shares


def gated(gate: F64, up: F64, activation: str) -> F64:
    """How a gated linear joins its two halves."""
    if activation == "swiglu_clamped":
        gate = np.minimum(gate, 7.0)
        return silu(1.702 * gate) / 1.702 * (np.clip(up, -7.0, 7.0) + 1)
    return (silu if activation == "silu" else gelu_tanh)(gate) * up


def expert_linear(
    x: NDArray[np.float32],
    experts: NDArray[np.int32],
    shares: NDArray[np.float32],
    matrices: F64,
    biases: F64,
) -> F64:
    """x [rows, k, in], matrices [E, part, in], biases [E, part] -> [rows, part]."""
    out = np.zeros((len(x), matrices.shape[1]))
    for row in range(len(x)):
        for rank, expert in enumerate(experts[row]):
            out[row] += float(shares[row, rank]) * (matrices[expert] @ x[row, rank].astype(np.float64) + biases[expert])
    return out


def distribution(logits: NDArray[np.float32], params: list[float]) -> tuple[NDArray[np.int64], F64, float]:
    """What `params` (ops.SAMPLE_PARAMS) leave of a row, by sorting (-logit, id): ids, running sums, clearance.

    The last is how far top_p is from the nearest sum that it is compared with: where that is float rounding, one token
    more or less may be left.
    """
    temperature, top_k, top_p, min_p, top_n_sigma, _ = params
    values = logits.astype(np.float64).tolist()
    finite = [value for value in values if math.isfinite(value)]
    best, mean = max(values), sum(finite) / len(finite)
    sigma = math.sqrt(sum((value - mean) ** 2 for value in finite) / len(finite))
    lowest = best - top_n_sigma * sigma if top_n_sigma > 0 else -math.inf
    kept = sorted((i for i, v in enumerate(values) if v > -math.inf and v >= lowest), key=lambda i: (-values[i], i))
    kept = kept[: int(top_k)] if top_k > 0 else kept
    weight = {i: math.exp((values[i] - best) / max(temperature, 1e-6)) for i in kept}
    kept = [i for i in kept if weight[i] >= min_p]
    clearance = 1.0
    if top_p < 1:
        total, reached, count = sum(weight[i] for i in kept), 0.0, 0
        while count < len(kept) and reached < top_p:
            reached += weight[kept[count]] / total
            clearance = min(clearance, abs(reached - top_p))
            count += 1
        kept = kept[:count]
    ids = np.array(sorted(kept))
    weights = np.array([weight[i] for i in ids.tolist()])
    return ids, np.cumsum(weights / weights.sum()), clearance
