"""Token ids equal llama.cpp's on awkward texts, for four vocabularies with four pre-tokenizers."""

import json
from pathlib import Path
from typing import Any

import pytest

from lamina.coordinator.text.tokenizer import Tokenizer

GOLDENS: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "goldens" / "tokenizer.json").read_text(encoding="utf-8")
)
CASES = [(vocab, name) for vocab, golden in GOLDENS["vocabs"].items() for name in golden["texts"]]


def test_goldens_cover_every_vocabulary() -> None:
    """A golden file without cases would let the tests below pass."""
    assert {vocab for vocab, _ in CASES} == {"smollm2", "vocab_gpt_4o", "vocab_llama_bpe", "vocab_qwen2"}
    assert len(CASES) >= 4 * 60


@pytest.mark.parametrize(("vocab", "name"), CASES)
def test_ids_and_bytes_equal_llama_cpp(vocab_tokenizers: dict[str, Tokenizer], vocab: str, name: str) -> None:
    """C-17: awkward text gives llama.cpp's ids, with and without special tokens, and llama.cpp's bytes back."""
    tokenizer, text = vocab_tokenizers[vocab], GOLDENS["texts"][name]
    golden = GOLDENS["vocabs"][vocab]["texts"][name]
    for key, parse_special in (("plain", False), ("special", True)):
        ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
        assert ids == golden.get(key, golden["plain"]), key
        spelt = golden.get(f"text_{key}")
        expected = text.encode() if spelt is None else bytes.fromhex(spelt)
        assert b"".join(tokenizer.token_bytes(token) for token in ids) == expected, key
        assert tokenizer.decode(ids) == expected.decode("utf-8", "replace"), key


@pytest.mark.parametrize("vocab", GOLDENS["vocabs"])
def test_bos_equals_llama_cpp(vocab_tokenizers: dict[str, Tokenizer], vocab: str) -> None:
    """A BOS token is added where the file, or failing that the pre-tokenizer, says so."""
    tokenizer, golden = vocab_tokenizers[vocab], GOLDENS["vocabs"][vocab]
    assert tokenizer.vocab_size == golden["num_tokens"]
    assert tokenizer.adds_bos is golden["bos"]["adds_bos"]
    for text, ids in golden["bos"]["ids_with_add_special"].items():
        assert tokenizer.encode(text, add_special=True, parse_special=True) == ids


def test_end_tokens_equal_llama_cpp(vocab_tokenizers: dict[str, Tokenizer]) -> None:
    """What llama.cpp's llama_vocab_is_eog says of every id of the four files (release of 2026-10-01)."""
    ends = {name: sorted(tokenizer.eos_ids) for name, tokenizer in vocab_tokenizers.items()}
    assert ends == {
        "smollm2": [0, 2, 4],
        "vocab_llama_bpe": [1203, 1206, 1207, 1208],
        "vocab_qwen2": [1102, 1104],
        "vocab_gpt_4o": [1153, 1154, 1155],
    }
