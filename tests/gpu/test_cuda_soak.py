"""Memory of the card and of the host over a long run of mixed requests, with recordings on."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.backend import Backend
from lamina.kernels.registry import create_backend
from lamina.spec.placement import StageSettings
from support.gpu import MIB, resident_bytes, used_bytes
from support.inprocess import InProcessModel
from support.tiny import write_tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SETTINGS = StageSettings(max_rows=512, max_seqs=8, max_logit_rows=8, max_context=512, kv_dtype="q8_0")
NUM_REQUESTS = 500
TOKENS_EACH = 41  # 20,500 in all
VOCAB = 300


@pytest.fixture
def cuda() -> Iterator[Backend]:
    backend = create_backend("cuda:0")
    yield backend
    backend.close()


def serve(model: InProcessModel, rng: random.Random, num_seqs: int) -> int:
    """A batch of requests of unlike lengths from prompt to last token; tokens decoded."""
    model.reset()
    for seq in range(num_seqs):  # prompts one after the other, in one or several chunks
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 7, 16, 33, 130, 400)))]
        cut = rng.randrange(len(prompt) + 1)
        for piece in (prompt[:cut], prompt[cut:]):
            if piece:
                model.step({seq: piece})
    decoded = 0
    for token in range(TOKENS_EACH):
        # the batch thins out towards the end
        alive = [seq for seq in range(num_seqs) if token < TOKENS_EACH - seq * (token % 3 == 0)]
        logits = model.step({seq: [rng.randrange(VOCAB)] for seq in alive})
        decoded += len(logits)
    return decoded


def test_memory_is_flat_over_500_requests(cuda: Backend, tmp_path: Path) -> None:
    """C-15: after warm-up, 500 requests and 20,000 tokens take less than 16 MiB of each memory, recordings are few."""
    path = write_tiny_llama(tmp_path / "model.gguf", matrix_type=GGMLQuantizationType.Q4_K, context=512)
    model = InProcessModel(path, cuda, (), SETTINGS)
    rng = random.Random(5)
    for num_seqs in (*range(1, 9), 8, 8, 8):
        serve(model, rng, num_seqs)
    captured = model.stages[0].facts.graphs.captures
    card, host = used_bytes(), resident_bytes()
    requests = tokens = 0
    while requests < NUM_REQUESTS or tokens < 20_000:
        num_seqs = rng.randint(1, 8)
        tokens += serve(model, rng, num_seqs)
        requests += num_seqs
    assert used_bytes() - card < 16 * MIB
    assert resident_bytes() - host < 16 * MIB
    graphs = model.stages[0].facts.graphs
    assert graphs.held <= 32
    assert graphs.captures - captured <= 64  # sizes that warm-up did not meet
    assert graphs.replays > 20 * graphs.captures
    assert not graphs.vetoes
    model.free()
