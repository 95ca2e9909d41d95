"""Tokenizers that the tests of text share: SmolLM2's own, and small ones of bytes and what a test adds."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from lamina.coordinator.text.tokenizer import Tokenizer
from lamina.spec.gguf import read_gguf
from support.models import smollm2_path
from support.tiny_tokenizer import byte_alphabet

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

MakeMetadata = Callable[..., dict[str, object]]
MakeTokenizer = Callable[..., Tokenizer]


@pytest.fixture(scope="session")
def smollm2_metadata() -> Mapping[str, object]:
    return read_gguf(smollm2_path()).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Mapping[str, object]) -> Tokenizer:
    return Tokenizer.from_metadata(smollm2_metadata, "SmolLM2")


@pytest.fixture(scope="session")
def vocab_tokenizers(smollm2: Tokenizer) -> dict[str, Tokenizer]:
    """One tokenizer for each vocabulary of tests/goldens/tokenizer.json."""
    data = Path(__file__).resolve().parents[2] / "data"
    small = {
        name: Tokenizer.from_metadata(read_gguf(data / f"{name}.gguf").metadata, name)
        for name in ("vocab_llama_bpe", "vocab_qwen2", "vocab_gpt_4o")
    }
    return {"smollm2": smollm2, **small}


@pytest.fixture(scope="session")
def make_metadata() -> MakeMetadata:
    """Metadata of 256 byte tokens (ids 0 to 255 are not the bytes' values: the alphabet's order is), then others."""

    def make(
        *,
        pre: str = "qwen2",
        pairs: Sequence[tuple[str, str]] = (),
        control: Sequence[str] = (),
        user_defined: Sequence[str] = (),
        normal: Sequence[str] = (),
        without: Sequence[str] = (),
        **overrides: object,
    ) -> dict[str, object]:
        plain = [char for char in byte_alphabet() if char not in without]
        plain += [left + right for left, right in pairs] + [*normal]
        tokens = [*plain, *control, *user_defined]
        types = [NORMAL] * len(plain) + [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined)
        metadata: dict[str, object] = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tuple(tokens),
            "tokenizer.ggml.token_type": tuple(types),
            "tokenizer.ggml.merges": tuple(f"{left} {right}" for left, right in pairs),
        }
        metadata.update({f"tokenizer.ggml.{key}": value for key, value in overrides.items()})
        return {key: value for key, value in metadata.items() if value is not None}

    return make


@pytest.fixture(scope="session")
def make_tokenizer(make_metadata: MakeMetadata) -> MakeTokenizer:
    """A tokenizer from `make_metadata`'s arguments; `max_input_chars` goes to the tokenizer."""

    def make(*, max_input_chars: int = 1 << 16, **options: object) -> Tokenizer:
        return Tokenizer.from_metadata(make_metadata(**options), "test", max_input_chars=max_input_chars)

    return make
