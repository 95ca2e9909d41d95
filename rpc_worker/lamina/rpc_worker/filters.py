"""What sampling does to one row of logits on the host, in the order that `SamplingParams` documents (B-31).

Penalties first; the filters and the draw are those of `kernels.reference.sampling`, which every device's `sample` op
follows too; log-probabilities are of the raw row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.reference import sampling
from lamina.spec.sampling import SamplingParams

Logits = NDArray[np.float32]


def has_penalties(params: SamplingParams) -> bool:
    """Whether any penalty differs from its neutral value."""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def apply_penalties(logits: Logits, history: Sequence[int], num_generated: int, params: SamplingParams) -> None:
    """In place. Repetition (Keskar et al. 2019) over prompt and output, presence and frequency (OpenAI) over output.

    `penalty_window` >= 0 limits both to the last tokens. A logit is divided by the repetition penalty if positive,
    multiplied otherwise; then lowered by frequency * count + presence. `history` may lack first tokens that are not
    looked at (`SamplingParams.num_looked_back`).
    """
    if not has_penalties(params):
        return
    generated = history[max(0, len(history) - num_generated) :] if num_generated else []
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
    filters = sampling.Filters(
        params.temperature, params.top_k, params.top_p, params.min_p, params.top_n_sigma, params.typical_p
    )
    return sampling.draw(logits, filters, uniform)


def logprob(raw: Logits, token: int) -> float:
    """Natural log-probability of `token` under softmax of the logits; NaN where they are not finite."""
    with np.errstate(invalid="ignore"):
        shifted = raw - raw.max()
        return float(shifted[token] - np.log(np.exp(shifted).sum(dtype=np.float64)))


def logprobs(raw: Logits, token: int, num_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of `token`, and of the `num_top` most likely, under softmax of the raw logits."""
    shifted = raw - raw.max()
    log_sum = np.log(np.exp(shifted).sum(dtype=np.float64))
    top = sampling.largest(raw, num_top)[:num_top] if num_top else np.zeros(0, np.int64)
    top = top[raw[top] > -np.inf]
    return float(shifted[token] - log_sum), tuple((int(t), float(shifted[t] - log_sum)) for t in top)
