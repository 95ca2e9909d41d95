"""C-17: a word in the prompt must not crash anything. Vocabulary, special strings, long runs, odd characters, harmony
tags: each completes with ids of the vocabulary that spell the text, or gets a typed error."""

import time
from functools import cache
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.coordinator.text.chat import ChatEncoder
from lamina.coordinator.text.detokenizer import Detokenizer
from lamina.coordinator.text.template import CHATML, ChatTemplate
from lamina.coordinator.text.tokenizer import Tokenizer
from lamina.spec.errors import InvalidRequest

FUZZED = settings(derandomize=True, deadline=None)

VOCABS = ("smollm2", "vocab_llama_bpe", "vocab_qwen2")

HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>", "analysis")
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<think>",
    "</think>",
    "[INST]",
    "</s>",
    "<0x0A>",
)
CONTROLS = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0xAD, 0x200B, 0x200E, 0x202E, 0x2028, 0xFEFF, 0xFFFE]))
NEWLINES = ("\r\n", "\n", "\r", " \n ", "\t", "   ")

pieces = st.one_of(
    st.sampled_from((*HARMONY, *SPECIAL, *NEWLINES, "'s", "'LL", "<|", "|>", "１２３", "ﬁ", "e\u0301", "👩\u200d🚀")),
    st.text(CONTROLS, max_size=5),
    st.text(max_size=8),
    st.builds(lambda char, count: char * count, st.characters(codec="utf-8"), st.integers(1, 300)),
)
prompts = st.lists(pieces, max_size=12).map("".join)

# One word without a break for the splitter, white space that never ends, and breaks everywhere.
LONG_RUNS = (
    "a",
    "ab",
    "Aé漢",
    "漢",
    "😀",
    "0",
    "!",
    "'",
    "<",
    "<|im_end|>",
    " ",
    "\n",
    " \n",
    "\t ",
    "\u3000",
    "\u0301",
    "\0",
)


def missing_bytes_removed(tokenizer: Tokenizer, text: str) -> bytes:
    """The text's bytes that the vocabulary can spell: SmolLM2 has no token for 21 bytes."""
    return text.encode().translate(None, delete=missing_bytes(tokenizer))


@cache
def missing_bytes(tokenizer: Tokenizer) -> bytes:
    spelt = {tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    return bytes(value for value in range(256) if bytes([value]) not in spelt)


@pytest.mark.parametrize("vocab", VOCABS)
@FUZZED
@given(text=prompts)
def test_any_prompt_is_spelt_by_its_ids(vocab_tokenizers: dict[str, Tokenizer], vocab: str, text: str) -> None:
    """C-17: with special tokens parsed or not, the ids' bytes are the text's, and streamed they are the same text."""
    tokenizer = vocab_tokenizers[vocab]
    expected = missing_bytes_removed(tokenizer, text)
    for parse_special in (False, True):
        ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
        assert b"".join(map(tokenizer.token_bytes, ids)) == expected
        detokenizer = Detokenizer(tokenizer, skip_special=False)
        streamed = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
        assert streamed == expected.decode("utf-8", "replace")


@pytest.mark.parametrize("vocab", VOCABS)
@FUZZED
@given(text=prompts)
def test_plain_prompts_hold_no_control_token(vocab_tokenizers: dict[str, Tokenizer], vocab: str, text: str) -> None:
    """C-17: a user's text cannot end an answer or open a message."""
    tokenizer = vocab_tokenizers[vocab]
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert not [token for token in ids if tokenizer.is_special(token)]


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_whole_vocabulary_as_a_prompt(vocab_tokenizers: dict[str, Tokenizer], vocab: str) -> None:
    """C-17: every token's text, beside the next one's and in lines, comes back."""
    tokenizer = vocab_tokenizers[vocab]
    words = iter([data.decode("utf-8", "replace") for data in map(tokenizer.token_bytes, range(tokenizer.vocab_size))])
    while chunk := list(islice(words, 2000)):
        for text in ("".join(chunk), "\n".join(chunk)):
            ids = tokenizer.encode(text, add_special=False, parse_special=True)
            assert b"".join(map(tokenizer.token_bytes, ids)) == missing_bytes_removed(tokenizer, text)


@pytest.mark.parametrize(
    ("vocab", "num_chars"), [("smollm2", 100_000), ("vocab_llama_bpe", 30_000), ("vocab_qwen2", 30_000)]
)
@pytest.mark.parametrize("unit", LONG_RUNS, ids=ascii)
def test_long_runs_take_linear_time(
    vocab_tokenizers: dict[str, Tokenizer], vocab: str, num_chars: int, unit: str
) -> None:
    """C-17: 100,000 characters take tenths of a second; quadratic merging would take minutes."""
    tokenizer = vocab_tokenizers[vocab]
    text = unit * (num_chars // len(unit))
    start = time.process_time()
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert time.process_time() - start < 5
    assert b"".join(map(tokenizer.token_bytes, ids)) == missing_bytes_removed(tokenizer, text)


@FUZZED
@given(
    contents=st.lists(prompts, min_size=1, max_size=3),
    roles=st.lists(st.sampled_from(("system", "user", "assistant", "tool", "<|im_end|>")), min_size=3, max_size=3),
    junk=st.recursive(st.none() | st.booleans() | st.integers() | prompts, st.lists, max_leaves=5),
)
def test_any_conversation_completes_or_gets_a_typed_error(
    chat_encoders: dict[str, ChatEncoder], contents: list[str], roles: list[str], junk: object
) -> None:
    """C-17: whatever a client sends as messages, the coordinator stays up."""
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    messages[-1]["name"] = junk  # type: ignore[assignment]
    for encoder in chat_encoders.values():
        if "<|im_end|>" in roles[: len(contents)]:
            with pytest.raises(InvalidRequest, match="role must be one of"):
                encoder.encode(messages)
        else:
            assert encoder.encode(messages)


@pytest.fixture(scope="module")
def chat_encoders(vocab_tokenizers: dict[str, Tokenizer]) -> dict[str, ChatEncoder]:
    template = ChatTemplate(CHATML, "", "")
    return {name: ChatEncoder(tokenizer, template) for name, tokenizer in vocab_tokenizers.items()}
