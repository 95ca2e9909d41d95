"""The steps of sampling as functions on one row of logits, in the order that `SamplingParams` documents (B-31).

Filters work on candidates in order of token id; each keeps at least one, and of equal ones the first. Nothing sorts the
whole vocabulary unless it must: that would take longer than the layers of a small model.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamina.spec.sampling import SamplingParams

Logits = NDArray[np.float32]
Floats = NDArray[np.float64]
_FIRST_NUCLEUS = 256  # tokens looked at first for top_p; most distributions have their mass there


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
    """Filter and draw one token with the given number in [0, 1). Temperature must be > 0.

    The number picks by cumulative probability in order of token id, so that a rounding error between two nearly equal
    logits does not swap them.
    """
    values = logits.astype(np.float64)
    tokens = np.arange(len(values))
    if 0 < params.top_k < len(values):  # first, since it is a threshold as well as top_n_sigma, and leaves few
        tokens = np.sort(_largest(values, params.top_k)[: params.top_k])
    lowest = np.finfo(np.float64).min
    if params.top_n_sigma > 0:
        lowest = values.max() - params.top_n_sigma * values[np.isfinite(values)].std()
    tokens = tokens[values[tokens] >= lowest]
    scaled = (values[tokens] - values.max()) / max(params.temperature, 1e-6)
    if params.typical_p < 1:
        kept = _typical(scaled, params.typical_p)
        tokens, scaled = tokens[kept], scaled[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(scaled >= scaled.max() + np.log(params.min_p))
        tokens, scaled = tokens[kept], scaled[kept]
    probabilities = _softmax(scaled)
    if params.top_p < 1:
        kept = _nucleus(probabilities, params.top_p)
        tokens, probabilities = tokens[kept], probabilities[kept]
    cumulative = np.cumsum(probabilities)
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(tokens[min(place, len(tokens) - 1)])


def logprobs(raw: Logits, token: int, num_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of `token`, and of the `num_top` most likely, under softmax of the raw logits."""
    values = raw.astype(np.float64)
    log_sum = values.max() + np.log(np.exp(values - values.max()).sum())
    top = _largest(values, num_top)[:num_top] if num_top else np.zeros(0, np.int64)
    top = top[values[top] > -np.inf]
    return float(values[token] - log_sum), tuple((int(t), float(values[t] - log_sum)) for t in top)


def _largest(values: Floats, count: int) -> NDArray[np.int64]:
    """Where the `count` largest values are, and all that equal the last of them: largest first, equal ones by place."""
    places = np.arange(len(values))
    if count < len(values):
        places = np.flatnonzero(values >= np.partition(values, len(values) - count)[len(values) - count])
    return places[np.argsort(-values[places], kind="stable")]


def _nucleus(probabilities: Floats, mass: float) -> NDArray[np.int64]:
    """The fewest most likely tokens that reach `mass` together (Holtzman et al. 2020), in order of place."""
    size = _FIRST_NUCLEUS
    while True:
        order = _largest(probabilities, size)
        reached = np.cumsum(probabilities[order])
        if reached[-1] >= mass or len(order) == len(probabilities):
            return np.sort(order[: int(np.searchsorted(reached, mass)) + 1])
        size *= 8


def _softmax(scaled: Floats) -> Floats:
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def _typical(scaled: Floats, mass: float) -> NDArray[np.int64]:
    """Locally typical sampling (Meister et al. 2022): places whose surprise is closest to the entropy, up to `mass`."""
    probabilities = _softmax(scaled)
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    entropy = float((probabilities * surprise).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), mass)) + 1
    return np.sort(order[:count])
