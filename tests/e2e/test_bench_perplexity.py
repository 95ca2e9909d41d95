"""`coordinator bench perplexity` over real workers: the same figures as from logits in process, at any split."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lamina.coordinator.model_file import open_model_file
from lamina.kernels.registry import create_backend
from lamina.spec.placement import StageSettings
from support.cluster import addresses, coordinator, running_workers
from support.inprocess import InProcessModel

DATA = Path(__file__).parents[1] / "data"
MODEL = DATA / "tiny_llama3.gguf"
TEXT = (DATA / "persuasion.txt").read_text()[:700]
CHUNK = 40

pytestmark = pytest.mark.e2e


def expected_perplexity() -> tuple[float, float, int]:
    """Of the reference backend, from the logits of every position."""
    file = open_model_file(MODEL)
    tokens = file.tokenizer.encode(TEXT, add_special=True, parse_special=False)
    backend = create_backend("reference")
    settings = StageSettings(max_rows=8, max_seqs=1, max_logit_rows=1, max_context=64, kv_dtype="f32")
    model = InProcessModel(MODEL, backend, settings=settings)
    losses = []
    for start in range(0, len(tokens) - CHUNK + 1, CHUNK):
        window = list(tokens[start : start + CHUNK])
        if file.tokenizer.adds_bos and file.tokenizer.bos_id is not None:
            window[0] = file.tokenizer.bos_id
        model.reset()
        for position, token in enumerate(window[:-1]):
            logits = model.step({0: [token]})[0].astype(np.float64)
            if position >= CHUNK // 2:
                losses.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[window[position + 1]])
    model.free()
    backend.close()
    value = np.exp(np.mean(losses))
    return value, value * np.std(losses) / np.sqrt(len(losses) - 1), len(losses)


def test_perplexity_equals_that_of_the_logits(tmp_path: Path) -> None:
    """Over two workers and three; --json says what was measured, --max-chunks how much of it."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    value, error, num_scored = expected_perplexity()
    command = ["bench", "perplexity", str(MODEL), "--text", str(text), "--chunk", str(CHUNK), "--kv-dtype", "f32"]
    with running_workers(2, device="reference") as workers:
        for split in ("0,1-3", "0-2,3"):
            result = coordinator(*command, "--workers", addresses(workers), "--split", split, "--json", "-q")
            assert result.returncode == 0, result.stderr
            found = json.loads(result.stdout)
            assert found["perplexity"] == pytest.approx(value, rel=1e-5)
            assert found["standard_error"] == pytest.approx(error, rel=1e-4)
            assert found["num_scored"] == num_scored
            assert found["num_chunks"] * CHUNK == found["num_tokens"]
            assert found["kv_dtype"] == "f32"
            assert result.stderr == ""
        # As text, with progress; small steps, in which a window takes several.
        short = [*command, "--max-chunks", "3", "--max-rows", "7", "--workers", addresses(workers)]
        result = coordinator(*short)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^perplexity [\d.]+ ± [\d.]+\n3 chunks of 40, 57 of 120 tokens scored, f32", result.stdout)
    assert re.search(r"chunk 3 of 3: perplexity [\d.]+, \d+ tokens/s", result.stderr)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--chunk", "4K"], "more than the"),
        (["--chunk", "7"], "at least 8"),
        (["--text", "no-such-file"], "no-such-file: No such file"),
        (["--text", str(MODEL)], "is not UTF-8"),
        ([], "the text has"),
    ],
)
def test_what_cannot_be_measured_is_one_line(options: list[str], said: str) -> None:
    """Before a worker is asked for anything."""
    result = coordinator("bench", "perplexity", str(MODEL), "--workers", "127.0.0.1:1", *options, stdin="too short")
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


def test_no_workers_is_one_line() -> None:
    result = coordinator("bench", "perplexity", str(MODEL), stdin=TEXT)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "name them with --workers" in result.stderr
