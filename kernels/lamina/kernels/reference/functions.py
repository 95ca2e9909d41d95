"""Every op but attention as a function of numpy arrays already cut to the step's rows: the executable specification.

float32 in and out, float32 accumulation. Knows nothing of buffers; formulas and shapes are those of `kernels.ops`.
"""

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.ops import LEAST_SHARE_SUM

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Each group of len(weight) columns of x [rows, C] by itself."""
    groups = x.reshape(len(x), -1, len(weight))
    mean_square = np.square(groups).mean(axis=-1, keepdims=True)
    normed: F32 = groups / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed.reshape(x.shape)


def linear(x: F32, matrix: F32, bias: F32 | None) -> F32:
    """x [rows, in] @ matrix [out, in]^T + bias [out]."""
    product: F32 = x @ matrix.T
    if bias is not None:
        product += bias
    return product


def activate(gate: F32, activation: str) -> F32:
    """silu, or gelu in its tanh form."""
    if activation == "silu":
        return gate * sigmoid(gate)
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate * gate * gate)
    activated: F32 = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return activated


def gate(gate: F32, up: F32, activation: str) -> F32:
    """How a gated linear joins its halves; "swiglu_clamped" is gpt-oss's."""
    if activation == "swiglu_clamped":
        gate = np.minimum(gate, np.float32(7))
        up = np.clip(up, -7, 7) + np.float32(1)
        activated = gate * sigmoid(np.float32(1.702) * gate)
    else:
        activated = activate(gate, activation)
    joined: F32 = activated * up
    return joined


def softmax(x: F32) -> F32:
    """Over the columns of each row [rows, C]."""
    exps = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: F32 = exps / exps.sum(axis=-1, keepdims=True)
    return shares


def route(logits: F32, num_selected: int, gating: str, normalise: bool, scale: float) -> tuple[I32, F32]:
    """Experts and shares [rows, num_selected] of logits [rows, E]."""
    clear = np.isfinite(logits.max(axis=-1, keepdims=True))  # numpy's max of a row with a NaN is NaN
    sound = np.where(clear, logits, np.float32(0))
    order = np.argsort(-sound, axis=-1, kind="stable")[:, :num_selected]
    selected = np.take_along_axis(sound, order, axis=-1)
    shares = softmax(selected) if gating == "softmax_selected" else np.take_along_axis(softmax(sound), order, axis=-1)
    if normalise:
        shares = shares / np.maximum(shares.sum(axis=-1, keepdims=True), np.float32(LEAST_SHARE_SUM))
    shares = np.where(clear, shares * np.float32(scale), np.float32(np.nan))
    return order.astype(np.int32), shares.astype(np.float32, copy=False)


def sigmoid(x: F32) -> F32:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    share: F32 = np.where(x >= 0, np.float32(1), small) / (1 + small)
    return share


def rope(x: F32, positions: I32, inv_freq: F32, head_dim: int, layout: str, magnitude: float) -> None:
    """Rotate x [rows, heads * head_dim] in place."""
    angles = positions.astype(np.float32)[:, None, None] * inv_freq  # [rows, 1, D/2]
    cos, sin = np.cos(angles) * np.float32(magnitude), np.sin(angles) * np.float32(magnitude)
    heads = x.reshape(len(x), -1, head_dim)  # a view, also of a column view
    half = len(inv_freq)
    if layout == "norm":
        first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    else:
        first, second = heads[..., :half], heads[..., half : 2 * half]
    rotated = first * cos - second * sin
    second[...] = first * sin + second * cos
    first[...] = rotated


def softcap(x: F32, cap: float) -> F32:
    """cap * tanh(x / cap)."""
    capped: F32 = np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped


def argmax(x: F32) -> I32:
    """Index of the largest of each row [rows, C], first of equals; -1 for a NaN or no finite value."""
    best: I32 = x.argmax(axis=-1).astype(np.int32)  # numpy returns the first NaN if there is one
    peak = np.take_along_axis(x, best[:, None], axis=-1)[:, 0]
    for row in np.flatnonzero(~np.isfinite(peak)):
        if np.isnan(peak[row]) or not np.isfinite(x[row]).any():
            best[row] = -1
    return best
