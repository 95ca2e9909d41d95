"""Random damage to a whole small model: typed errors only, in bounded time and memory (P-15)."""

import random
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import gguf
import pytest

from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from support.tiny import write_tiny_llama

NUM_CASES = 2000
INTERESTING = [0, 1, 2**8 - 1, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def damage(content: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """One to four byte flips, an interesting integer, a truncation, a deletion or a duplication inside the header."""
    damaged = bytearray(content)
    at = rng.randrange(header_bytes)
    match rng.randrange(5):
        case 0:
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(header_bytes)] = rng.randrange(256)
        case 1:
            width = rng.choice([1, 2, 4, 8])
            damaged[at : at + width] = (rng.choice(INTERESTING) % (1 << 8 * width)).to_bytes(width, "little")
        case 2:
            del damaged[at:]
        case 3:
            del damaged[at : at + rng.randint(1, 32)]
        case 4:
            damaged[at:at] = damaged[at : at + rng.randint(1, 32)]
    return bytes(damaged)


def read_outcome(path: Path) -> tuple[str, str]:
    """How reading ended, and what was said; an error that is not typed gets through."""
    try:
        return "read", model_spec(read_gguf(path), "d").name
    except (InvalidCheckpoint, UnsupportedModel) as error:
        return type(error).__name__, str(error)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    kind = gguf.GGMLQuantizationType.Q4_0
    return write_tiny_llama(path, matrix_type=kind, hidden=32, ff=32, layers=1, heads=2, kv_heads=1, vocab=272)


def test_damaged_headers_give_typed_errors_only(tiny_model: Path, tmp_path: Path) -> None:
    """P-15"""
    model = read_gguf(tiny_model)
    assert model_spec(model, "d").num_layers == 1
    content, rng, path, outcomes = tiny_model.read_bytes(), random.Random(15), tmp_path / "m.gguf", Counter[str]()
    slowest_s = 0.0
    tracemalloc.start()
    try:
        for _ in range(NUM_CASES):
            path.write_bytes(damage(content, model.header_bytes, rng))
            start = time.process_time()
            outcome, message = read_outcome(path)
            outcomes[outcome] += 1
            assert "\n" not in message
            assert message.encode()  # no lone surrogates
            slowest_s = max(slowest_s, time.process_time() - start)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert outcomes["InvalidCheckpoint"] > NUM_CASES / 4
    assert outcomes["UnsupportedModel"] > 0
    assert outcomes["read"] > 0  # damage to a token or a score is no matter of ours
    assert slowest_s < 1
    assert peak_bytes < 32 << 20
