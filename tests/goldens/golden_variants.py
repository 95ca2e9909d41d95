"""Measures how far llama.cpp is from itself under other settings: the noise floor of the logit goldens.

For each variant every golden run is teacher-forced over its continuation and compared by the full KL divergence over
the whole vocabulary and by the bucketed one that the file allows, so that both the tolerance and the loss by bucketing
are known figures.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import llama_cpp  # type: ignore[import-not-found]
import numpy as np
import numpy.typing as npt
from llama_peer import PeerContext, PeerModel, log_softmax


class GoldenRun(Protocol):
    """What is compared: prompt, continuation and the logits [positions, vocabulary] that predicted it."""

    @property
    def prompt(self) -> list[int]: ...
    @property
    def continuation(self) -> list[int]: ...
    @property
    def logits(self) -> npt.NDArray[np.float32]: ...


def full_kl(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """KL(p || q) in nats per row, p and q log-probabilities [rows, vocabulary]."""
    result: npt.NDArray[np.float64] = (np.exp(p) * (p - q)).sum(axis=-1)
    return result


def bucketed_kl(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64], num_top: int) -> npt.NDArray[np.float64]:
    """KL of p's `num_top` likeliest tokens and one bucket for the rest; at most `full_kl` (log-sum inequality)."""
    top = np.argsort(-p, axis=-1, kind="stable")[:, :num_top]
    p_top, q_top = np.take_along_axis(p, top, axis=-1), np.take_along_axis(q, top, axis=-1)
    p_rest = np.log1p(-np.exp(p_top).sum(axis=-1, keepdims=True))
    q_rest = np.log1p(-np.exp(q_top).sum(axis=-1, keepdims=True))
    return full_kl(np.concatenate([p_top, p_rest], axis=-1), np.concatenate([q_top, q_rest], axis=-1))


def force(context: PeerContext, run: GoldenRun, *, one_batch: bool) -> npt.NDArray[np.float32]:
    """Logits for each position of the continuation, the golden tokens being fed."""
    context.clear()
    forced = run.continuation[:-1]
    if one_batch:
        return context.feed(run.prompt + forced, num_logits=len(run.continuation))
    return np.concatenate([context.feed(run.prompt), *(context.feed([token]) for token in forced)])


def compare(runs: Sequence[GoldenRun], others: Sequence[npt.NDArray[np.float32]], num_top: int) -> dict[str, float]:
    """Agreement of other logits with the goldens over all positions; KL and margins in nats.

    `flipped_margin_max` is the largest lead of the golden's first token over its second where the other's first token
    is another one: beyond it top-1 was always equal.
    """
    p = log_softmax(np.concatenate([run.logits for run in runs]))
    q = log_softmax(np.concatenate(others))
    full, bucketed = full_kl(p, q), bucketed_kl(p, q, num_top)
    equal = p.argmax(axis=-1) == q.argmax(axis=-1)
    second, first = np.partition(p, -2, axis=-1)[:, -2:].T
    return {
        "top1_equal": round(float(equal.mean()), 5),
        "flipped_margin_max": round(float((first - second)[~equal].max(initial=0.0)), 5),
        "kl_full_mean": rounded(full.mean()),
        "kl_bucketed_mean": rounded(bucketed.mean()),
        "kl_full_max": rounded(full.max()),
        "kl_bucketed_max": rounded(bucketed.max()),
    }


def rounded(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")


def dequantise(source: Path, target: Path) -> None:
    """Writes the model with every tensor as float32, by llama.cpp's own quantiser."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if status:
        raise RuntimeError(f"{source}: llama_model_quantize answered {status}")


def f32_context(path: Path) -> PeerContext:
    """A context on the dequantised model, attention in float32 too: the sharpest oracle that llama.cpp can be."""
    with tempfile.TemporaryDirectory() as folder:
        f32_path = Path(folder) / "f32.gguf"
        dequantise(path, f32_path)
        model = PeerModel(f32_path, vocab_only=False)  # mapped: outlives the folder's entry
    return PeerContext(model, flash_attention=False, cache_type=llama_cpp.GGML_TYPE_F32)


def measure_variants(model: PeerModel, runs: Sequence[GoldenRun], num_top: int) -> dict[str, dict[str, float]]:
    """Compares the golden runs with other settings of llama.cpp on the same file."""
    settings: dict[str, tuple[dict[str, bool], bool]] = {
        "again": ({}, False),
        "one_batch": ({}, True),
        "no_flash_attention": ({"flash_attention": False}, False),
        "no_flash_attention_f32_cache": ({"flash_attention": False, "cache_type": llama_cpp.GGML_TYPE_F32}, False),
    }
    results = {}
    for name, (options, one_batch) in settings.items():
        context = PeerContext(model, **options)
        results[name] = compare(runs, [force(context, run, one_batch=one_batch) for run in runs], num_top)
    return results
