"""The default model against llama.cpp's logits on the same file (goldens; see tests/goldens/README.md)."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from goldens.golden_reader import LogitGolden, compare_with_goldens, load_logit_goldens
from numpy.typing import NDArray

from lamina.kernels.registry import create_backend
from lamina.spec.placement import StageSettings
from support.inprocess import InProcessModel
from support.models import smollm2_path

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def model() -> Iterator[InProcessModel]:
    backend = create_backend("reference")
    settings = StageSettings(max_rows=1024, max_seqs=20, max_logit_rows=20, max_context=704, kv_dtype="f32")
    model = InProcessModel(smollm2_path(), backend, settings=settings)
    yield model
    model.free()
    backend.close()


def teacher_forced(model: InProcessModel, goldens: Mapping[str, LogitGolden]) -> dict[str, NDArray[np.float32]]:
    """Logits after each prompt and after each further token of its continuation but the last, float32 [32, vocab].

    The continuations advance together, one row per prompt and step.
    """
    model.reset()
    rows = [[model.step({seq: golden.prompt})[0]] for seq, golden in enumerate(goldens.values())]
    for position in range(31):
        logits = model.step({seq: [golden.continuation[position]] for seq, golden in enumerate(goldens.values())})
        for seq, row in enumerate(logits):
            rows[seq].append(row)
    return {name: np.stack(rows[seq]) for seq, name in enumerate(goldens)}


def test_float32_logits_equal_llama_cpp(model: InProcessModel) -> None:
    """On float32 arithmetic both agree to rounding: every first choice, mean KL below 1e-7 nats."""
    goldens = load_logit_goldens(GOLDENS / "smollm2_f32_logits.json")
    agreement = compare_with_goldens(goldens, teacher_forced(model, goldens))
    assert agreement.kl_mean < 1e-7, agreement
    assert agreement.flipped_margin_max < 1e-3, agreement


def test_quantised_logits_are_close_to_llama_cpp(model: InProcessModel) -> None:
    """llama.cpp rounds activations to 8 bits: top-1 equal at >= 95 % of positions, mean KL <= 0.01 nats."""
    goldens = load_logit_goldens(GOLDENS / "smollm2_logits.json")
    agreement = compare_with_goldens(goldens, teacher_forced(model, goldens))
    assert agreement.num_positions == 20 * 32
    assert agreement.top1_equal >= 0.95, agreement
    assert agreement.kl_mean <= 0.01, agreement
