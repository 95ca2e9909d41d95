"""Filtering one row of logits and drawing a token from what is left, in float64: the specification of `ops.sample`.

The worker draws with it too where the device cannot (penalties, grammars, log-probabilities). Filters work on
candidates in order of token id; each keeps at least one, and of equal ones the first. Nothing sorts the whole
vocabulary unless it must: that would take longer than the layers of a small model.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_FIRST_NUCLEUS = 256  # tokens looked at first for top_p; most distributions have their mass there


@dataclass(frozen=True, slots=True)
class Filters:
    """What narrows a distribution; the defaults leave the softmax as it is. `temperature` > 0."""

    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0  # 0 = off
    typical_p: float = 1.0  # has no place in `ops.sample`; comes before min_p


def draw(logits: Logits, filters: Filters, uniform: float) -> int:
    """The token that a number in [0, 1) picks from the filtered row; order and rules as `ops.sample` documents them.

    The number picks by cumulative probability in order of token id, so that a rounding error between two nearly equal
    logits does not swap them.
    """
    values = logits.astype(np.float64)
    tokens = np.arange(len(values))
    if 0 < filters.top_k < len(values):  # first, since it is a threshold as well as top_n_sigma, and leaves few
        tokens = np.sort(largest(logits, filters.top_k)[: filters.top_k])
    lowest = np.finfo(np.float64).min
    if filters.top_n_sigma > 0:
        lowest = values.max() - filters.top_n_sigma * values[np.isfinite(values)].std()
    tokens = tokens[values[tokens] >= lowest]
    scaled = (values[tokens] - values.max()) / max(filters.temperature, 1e-6)
    if filters.typical_p < 1:
        kept = _typical(scaled, filters.typical_p)
        tokens, scaled = tokens[kept], scaled[kept]
    if filters.min_p > 0:
        kept = np.flatnonzero(scaled >= scaled.max() + np.log(filters.min_p))
        tokens, scaled = tokens[kept], scaled[kept]
    probabilities = _softmax(scaled)
    if filters.top_p < 1:
        kept = _nucleus(probabilities, filters.top_p)
        tokens, probabilities = tokens[kept], probabilities[kept]
    cumulative = np.cumsum(probabilities)
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(tokens[min(place, len(tokens) - 1)])


def largest(values: Logits | Floats, count: int) -> Ints:
    """Where the `count` largest values are, and all that equal the last of them: largest first, equal ones by place."""
    places = np.arange(len(values))
    if count < len(values):
        places = np.flatnonzero(values >= np.partition(values, len(values) - count)[len(values) - count])
    return places[np.argsort(-values[places], kind="stable")]


def _nucleus(probabilities: Floats, mass: float) -> Ints:
    """The fewest most likely tokens that reach `mass` together (Holtzman et al. 2020), in order of place."""
    size = _FIRST_NUCLEUS
    while True:
        order = largest(probabilities, size)
        reached = np.cumsum(probabilities[order])
        if reached[-1] >= mass or len(order) == len(probabilities):
            return np.sort(order[: int(np.searchsorted(reached, mass)) + 1])
        size *= 8


def _softmax(scaled: Floats) -> Floats:
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def _typical(scaled: Floats, mass: float) -> Ints:
    """Locally typical sampling (Meister et al. 2022): places whose surprise is closest to the entropy, up to `mass`."""
    probabilities = _softmax(scaled)
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    entropy = float((probabilities * surprise).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), mass)) + 1
    return np.sort(order[:count])
