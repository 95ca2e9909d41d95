"""Streamed text equals the text decoded at once, and never ends within a character."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.coordinator.text.detokenizer import Detokenizer
from lamina.coordinator.text.tokenizer import Tokenizer
from lamina.spec.errors import InvalidRequest

FUZZED = settings(derandomize=True, deadline=None)

MakeTokenizer = Callable[..., Tokenizer]

# Bytes that begin, continue, break or forbid characters of each length, and some ASCII.
TRICKY_BYTES = b"a\n\x80\xbf\xc0\xc2\xc3\xe0\xa0\xed\x9f\xe2\x82\xac\xf0\x90\xf4\x8f\xf5\xff"


@pytest.fixture(scope="module")
def byte_tokenizer(make_tokenizer: MakeTokenizer) -> Tokenizer:
    return make_tokenizer(control=("<end>",))


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    ids = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    return [ids[bytes([value])] for value in data]


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [detokenizer.push(ids[start:end]) for start, end in pairwise(edges)]


@FUZZED
@given(
    data=st.one_of(st.binary(max_size=30), st.lists(st.sampled_from(TRICKY_BYTES), max_size=30).map(bytes)),
    cuts=st.lists(st.integers(0, 30), max_size=30),
)
def test_any_bytes_in_any_pieces_decode_as_at_once(byte_tokenizer: Tokenizer, data: bytes, cuts: list[int]) -> None:
    """Invalid bytes become U+FFFD exactly as Python replaces them in the whole."""
    detokenizer = Detokenizer(byte_tokenizer)
    pieces = stream(detokenizer, ids_of(byte_tokenizer, data), cuts)
    assert "".join(pieces) + detokenizer.flush() == data.decode("utf-8", "replace")


@FUZZED
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_any_tokens_one_by_one_decode_as_at_once(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    """With the real vocabulary, control tokens shown or left out."""
    detokenizer = Detokenizer(smollm2, skip_special=skip)
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == smollm2.decode(ids, skip_special=skip)


@FUZZED
@given(st.text(max_size=20))
def test_valid_text_never_shows_half_a_character(byte_tokenizer: Tokenizer, text: str) -> None:
    """Byte by byte, every piece is a stretch of the text, and nothing is left for the flush."""
    detokenizer = Detokenizer(byte_tokenizer)
    shown = ""
    for token in ids_of(byte_tokenizer, text.encode()):
        shown += detokenizer.push([token])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.flush() == ""


def test_an_unfinished_character_waits_for_the_flush(byte_tokenizer: Tokenizer) -> None:
    """Three bytes of four are held back, then replaced by one U+FFFD; a control token between them does not count."""
    detokenizer = Detokenizer(byte_tokenizer)
    first, *rest = ids_of(byte_tokenizer, "😀".encode())
    end = byte_tokenizer.vocab_size - 1
    assert detokenizer.push([first, end, *rest[:2]]) == ""
    assert detokenizer.push(rest[2:]) == "😀"
    assert detokenizer.push([first, *rest[:2]]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.push(ids_of(byte_tokenizer, b"ok")) == "ok"


def test_control_tokens_are_shown_on_demand(byte_tokenizer: Tokenizer) -> None:
    """They are left out of what a user sees, and spelt out where a caller asks."""
    end = byte_tokenizer.vocab_size - 1
    assert Detokenizer(byte_tokenizer).push([end]) == ""
    assert Detokenizer(byte_tokenizer, skip_special=False).push([end]) == "<end>"


def test_an_id_outside_of_the_vocabulary_is_refused(byte_tokenizer: Tokenizer) -> None:
    """It would mean that a worker has another vocabulary."""
    with pytest.raises(InvalidRequest, match="token id 257 is outside"):
        Detokenizer(byte_tokenizer).push([257])
