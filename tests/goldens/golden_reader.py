"""Reads the logit goldens for tests and compares logits with them; needs numpy only, never llama-cpp-python.

    goldens = load_logit_goldens(path)            # smollm2_logits.json or smollm2_f32_logits.json
    agreement = compare_with_goldens(goldens, {name: logits [32, vocabulary], ...})
    assert agreement.top1_equal >= 0.95 and agreement.kl_mean <= 0.01

`logits[i]` are those after the prompt and the first i tokens of the continuation, so the tokens to feed are
`golden.forced_ids`, and the last `len(golden.continuation)` rows are the ones to compare.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class LogitGolden:
    """One prompt. top_ids int [positions, num_top], likeliest first; log-probabilities in nats, float64."""

    name: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float64]  # [positions, num_top]
    rest_logprobs: npt.NDArray[np.float64]  # [positions], of all other tokens together

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """The prompt and all but the last token of the continuation: what teacher forcing feeds."""
        return self.prompt + self.continuation[:-1]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over all positions of all prompts compared; KL(golden || other) in nats, `flipped_margin_max` too.

    `flipped_margin_max` is the largest lead of the golden's first token over its second where the other's first token
    is another one, 0 if there is no such position.
    """

    num_positions: int
    top1_equal: float
    kl_mean: float
    kl_max: float
    flipped_margin_max: float


def load_logit_goldens(path: Path) -> dict[str, LogitGolden]:
    """The goldens of one file by the prompt's name."""
    content = json.loads(path.read_text())
    return {prompt["name"]: unpack(prompt, content["units_per_nat"]) for prompt in content["prompts"]}


def unpack(prompt: Mapping[str, Any], units_per_nat: int) -> LogitGolden:
    """One prompt of the file, its rounded log-probabilities normalised again.

    Without that the rounding enters the KL in first order (up to 5e-6 nats a position), with it in second (1e-11).
    """
    top = np.array(prompt["nlp"], dtype=np.float64) / -units_per_nat
    rest = np.array(prompt["rest"], dtype=np.float64) / -units_per_nat
    log_total = np.log(np.exp(top).sum(axis=-1) + np.exp(rest))
    return LogitGolden(
        name=prompt["name"],
        prompt=tuple(prompt["ids"]),
        continuation=tuple(prompt["cont"]),
        top_ids=np.array(prompt["top"], dtype=np.int64),
        top_logprobs=top - log_total[:, np.newaxis],
        rest_logprobs=rest - log_total,
    )


def kl_to_logits(golden: LogitGolden, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """KL(golden || softmax(logits)) per position, with all tokens outside the golden's top as one bucket.

    sum over top of p (log p - log q) + P (log P - log Q), where P = 1 - sum p and Q = 1 - sum q. By the log-sum
    inequality this is at most the KL over the whole vocabulary.
    """
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    q = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    q_top = np.take_along_axis(q, golden.top_ids, axis=-1)
    outside = np.exp(q)
    np.put_along_axis(outside, golden.top_ids, 0.0, axis=-1)
    q_rest = np.log(outside.sum(axis=-1))
    top = (np.exp(golden.top_logprobs) * (golden.top_logprobs - q_top)).sum(axis=-1)
    rest = np.exp(golden.rest_logprobs) * (golden.rest_logprobs - q_rest)
    result: npt.NDArray[np.float64] = top + rest
    return result


def compare_with_goldens(
    goldens: Mapping[str, LogitGolden], logits_by_name: Mapping[str, npt.NDArray[np.floating]]
) -> Agreement:
    """Compares the named prompts. Raises KeyError for a name without golden, ValueError for no name at all."""
    if not logits_by_name:
        raise ValueError("no logits to compare with the goldens: pass at least one prompt")
    names = list(logits_by_name)
    kl = np.concatenate([kl_to_logits(goldens[name], logits_by_name[name]) for name in names])
    first = np.concatenate([goldens[name].top_ids[:, 0] for name in names])
    margin = np.concatenate([goldens[name].top_logprobs[:, 0] - goldens[name].top_logprobs[:, 1] for name in names])
    equal = np.concatenate([logits_by_name[name].argmax(axis=-1) for name in names]) == first
    return Agreement(
        num_positions=len(kl),
        top1_equal=float(equal.mean()),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        flipped_margin_max=float(margin[~equal].max(initial=0.0)),
    )
