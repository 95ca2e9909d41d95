"""The steps of sampling as functions on one row of logits, in the order that `SamplingParams` documents (B-31).

Filters work on candidates sorted by logit, highest first, equal logits by token id; each keeps at least one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamina.spec.sampling import SamplingParams

Logits = NDArray[np.float32]
Floats = NDArray[np.float64]


def has_penalties(params: SamplingParams) -> bool:
    """Whether any penalty differs from its neutral value."""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def apply_penalties(logits: Logits, history: Sequence[int], num_generated: int, params: SamplingParams) -> None:
    """In place. Repetition (Keskar et al. 2019) over prompt and output, presence and frequency (OpenAI) over output.

    `penalty_window` >= 0 limits both to the last tokens. A logit is divided by the repetition penalty if positive,
    multiplied otherwise; then lowered by frequency * count + presence.
    """
    if not has_penalties(params):
        return
    generated = history[len(history) - num_generated :] if num_generated else []
    window = params.penalty_window
    if window >= 0:
        history, generated = history[-window:] if window else [], generated[-window:] if window else []
    if params.repetition_penalty != 1.0 and len(history):
        seen = np.unique(np.asarray(history, np.int64))
        values = logits[seen]
        with np.errstate(over="ignore"):  # an infinite logit is refused by the sampler
            changed = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        logits[seen] = changed
    if len(generated):
        tokens, counts = np.unique(np.asarray(generated, np.int64), return_counts=True)
        logits[tokens] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)


def draw(logits: Logits, params: SamplingParams, uniform: float) -> int:
    """Filter and draw one token with the given number in [0, 1). Temperature must be > 0."""
    values = logits.astype(np.float64)
    if params.top_n_sigma > 0:
        finite = values[np.isfinite(values)]
        values = np.where(values >= values.max() - params.top_n_sigma * finite.std(), values, -np.inf)
    tokens = _candidates(values, params.top_k)
    scaled = values[tokens] / max(params.temperature, 1e-6)
    scaled -= scaled[0]
    if params.typical_p < 1:
        tokens, scaled = _typical(tokens, scaled, params.typical_p)
    if params.min_p > 0:
        kept = scaled >= scaled.max() + np.log(params.min_p)
        tokens, scaled = tokens[kept], scaled[kept]
    probabilities = _softmax(scaled)
    if params.top_p < 1:
        # Tokens until their sum reaches top_p; the one that reaches it is kept.
        count = int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1
        tokens, probabilities = tokens[:count], probabilities[:count]
    cumulative = np.cumsum(probabilities)
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(tokens[min(place, len(tokens) - 1)])


def logprobs(raw: Logits, token: int, num_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of `token`, and of the `num_top` most likely, under softmax of the raw logits."""
    values = raw.astype(np.float64)
    log_sum = values.max() + np.log(np.exp(values - values.max()).sum())
    top = _candidates(values, num_top) if num_top else np.zeros(0, np.int64)
    return float(values[token] - log_sum), tuple((int(t), float(values[t] - log_sum)) for t in top)


def _candidates(values: Floats, top_k: int) -> NDArray[np.int64]:
    """Ids of the finite values, highest first, equal ones by id; only the first top_k if top_k > 0."""
    if 0 < top_k < len(values):
        threshold = np.partition(values, len(values) - top_k)[len(values) - top_k]
        ids = np.flatnonzero(values >= threshold)
    else:
        ids = np.arange(len(values))
    ids = ids[values[ids] > -np.inf]
    ids = ids[np.argsort(-values[ids], kind="stable")]
    return ids[:top_k] if top_k > 0 else ids


def _softmax(scaled: Floats) -> Floats:
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def _typical(tokens: NDArray[np.int64], scaled: Floats, mass: float) -> tuple[NDArray[np.int64], Floats]:
    """Locally typical sampling (Meister et al. 2022): tokens whose surprise is closest to the entropy, up to `mass`."""
    probabilities = _softmax(scaled)
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    entropy = float((probabilities * surprise).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), mass)) + 1
    kept = np.sort(order[:count])  # back in order of likelihood
    return tokens[kept], scaled[kept]
