"""What the goldens cannot show: unsound metadata, control tokens against plain text, bounds, missing bytes."""

import time
from collections.abc import Callable, Mapping

import pytest

from lamina.coordinator.text.tokenizer import Tokenizer
from lamina.spec.errors import InvalidCheckpoint, InvalidRequest, UnsupportedModel
from support.tiny_tokenizer import byte_alphabet

MakeMetadata = Callable[..., dict[str, object]]
MakeTokenizer = Callable[..., Tokenizer]

PAIRS = (("t", "h"), ("th", "e"), ("Ġ", "the"))


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


def texts_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.vocabulary.texts[token] for token in ids]


def test_another_model_or_pre_tokenizer_is_refused_by_name(make_metadata: MakeMetadata) -> None:
    """The message says what was found and what would do."""
    with pytest.raises(UnsupportedModel, match=r"f\.gguf: tokenizer model 'llama' .* supported: gpt2"):
        Tokenizer.from_metadata(make_metadata(model="llama"), "f.gguf")
    with pytest.raises(UnsupportedModel, match=r"f\.gguf: pre-tokenizer 'tekken' .*smollm, llama-bpe.*qwen2.*gpt-4o"):
        Tokenizer.from_metadata(make_metadata(pre="tekken"), "f.gguf")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model": None}, "there is no tokenizer"),
        ({"tokens": None}, "tokens must be an array of strings"),
        ({"tokens": ()}, "tokens is empty"),
        ({"tokens": (1, 2)}, "tokens must be an array of strings"),
        ({"tokens": ("a", "b", "a")}, "the token 'a' occurs twice"),
        ({"token_type": (1,)}, "token_type must have one entry for each token"),
        ({"merges": None}, "merges must be an array of strings"),
        ({"merges": ("th",)}, "merge 'th' is not a pair"),
        ({"merges": ("t ",)}, "merge 't ' is not a pair"),
        ({"merges": ("q z",)}, "merge 'q z' names a token that the vocabulary lacks"),
        ({"bos_token_id": 256}, "bos_token_id is 256, but there are 256 tokens"),
        ({"eot_token_id": "x"}, "eot_token_id must be of type int, got 'x'"),
        ({"add_bos_token": True}, "bos_token_id is not set"),
        ({"add_eos_token": True}, "eos_token_id is not set"),
        ({"add_bos_token": 1}, "add_bos_token must be of type bool, got 1"),
    ],
)
def test_unsound_metadata_is_an_invalid_checkpoint(
    make_metadata: MakeMetadata, overrides: Mapping[str, object], message: str
) -> None:
    """P-15: a hostile or broken file gets one line that names it, not a traceback."""
    with pytest.raises(InvalidCheckpoint, match=message) as caught:
        Tokenizer.from_metadata(make_metadata(**overrides), "f.gguf")
    assert str(caught.value).startswith("f.gguf: ")
    assert "\n" not in str(caught.value)


def test_byte_tokens_must_look_like_bytes(make_metadata: MakeMetadata) -> None:
    """A byte token's string holds its value, so nothing else is taken for one."""
    good = make_metadata(tokens=("a", "<0x0A>"), token_type=(1, 6), merges=())
    assert Tokenizer.from_metadata(good, "f").token_bytes(1) == b"\n"
    for text in ("<0x0G>", "<0xA>", "x", "<0x+1>"):
        with pytest.raises(InvalidCheckpoint, match="byte token"):
            Tokenizer.from_metadata(make_metadata(tokens=("a", text), token_type=(1, 6), merges=()), "f")


def test_first_of_equal_merges_counts(make_metadata: MakeMetadata) -> None:
    """llama.cpp gives a pair that occurs twice its first rank."""
    metadata = make_metadata(normal=("bc", "ab"), merges=("b c", "a b", "b c"))
    tokenizer = Tokenizer.from_metadata(metadata, "test")
    assert texts_of(tokenizer, plain(tokenizer, "abc")) == ["a", "bc"]


def test_lowest_rank_wins_and_then_the_leftmost(make_tokenizer: MakeTokenizer) -> None:
    """The merge rule by hand: (b, c) has a lower rank than (a, b); of two equal pairs the left one goes first."""
    tokenizer = make_tokenizer(pairs=(("b", "c"), ("a", "b"), ("x", "x")))
    assert texts_of(tokenizer, plain(tokenizer, "abc")) == ["a", "bc"]
    assert texts_of(tokenizer, plain(tokenizer, "abx")) == ["ab", "x"]
    assert texts_of(tokenizer, plain(tokenizer, "xxx")) == ["xx", "x"]


def test_whole_words_only_where_merges_are_ignored(make_tokenizer: MakeTokenizer) -> None:
    """llama-bpe takes a word that is a token, though no merge leads to it; qwen2 does not."""
    for pre, expected in (("llama-bpe", ["lama"]), ("llama3", ["lama"]), ("qwen2", ["l", "a", "m", "a"])):
        tokenizer = make_tokenizer(pre=pre, normal=("lama",), add_bos_token=False)
        assert texts_of(tokenizer, plain(tokenizer, "lama")) == expected


def test_plain_text_never_becomes_a_control_token(make_tokenizer: MakeTokenizer) -> None:
    """Neither through a merge nor as a whole word, even where the file would allow both."""
    tokenizer = make_tokenizer(
        pre="llama-bpe",
        pairs=PAIRS,
        control=("stop", "en"),
        add_bos_token=False,
    )
    merged = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": ("e", "n", "d", "en", "end"),
            "tokenizer.ggml.token_type": (1, 1, 1, 1, 3),
            "tokenizer.ggml.merges": ("e n", "en d"),
        },
        "test",
    )
    assert texts_of(tokenizer, plain(tokenizer, "stop")) == list("stop")
    assert tokenizer.encode("stop", add_special=False, parse_special=True) == [tokenizer.vocab_size - 2]
    assert texts_of(merged, plain(merged, "end")) == ["en", "d"]


def test_user_defined_tokens_are_always_recognised(make_tokenizer: MakeTokenizer) -> None:
    """Control tokens only with parse_special, user-defined ones always, the longest first."""
    tokenizer = make_tokenizer(control=("<end>", "<end>x"), user_defined=("<think>",))
    text = "<think>a<end>x<end>"
    assert texts_of(tokenizer, plain(tokenizer, text)) == ["<think>", "a", *"<end>x<end>"]
    parsed = tokenizer.encode(text, add_special=False, parse_special=True)
    assert texts_of(tokenizer, parsed) == ["<think>", "a", "<end>x", "<end>"]


def test_a_mark_breaks_control_tokens_and_nothing_else(make_tokenizer: MakeTokenizer) -> None:
    """Marks leave the ids of the plain text: words are merged across them, user-defined tokens found across them."""
    tokenizer = make_tokenizer(pairs=PAIRS, control=("<end>",), user_defined=("<think>",))
    marked = tokenizer.encode("t|he <end> <|end> <|think>", add_special=False, parse_special=True, mark="|")
    assert texts_of(tokenizer, marked) == ["the", "Ġ", "<end>", "Ġ", *"<end>", "Ġ", "<think>"]
    assert marked == [
        *plain(tokenizer, "the "),
        *tokenizer.encode("<end>", add_special=False, parse_special=True),
        *plain(tokenizer, " <end> <think>"),
    ]


def test_names_that_llama_cpp_knows_are_control_tokens(make_tokenizer: MakeTokenizer) -> None:
    """A file that forgets to mark `</s>` or `<|im_end|>` as control tokens cannot make a user end the answer."""
    tokenizer = make_tokenizer(normal=("</s>", "<|im_end|>", "<|fim_prefix|>"))
    for text in ("</s>", "<|im_end|>", "<|fim_prefix|>"):
        (token,) = tokenizer.encode(text, add_special=False, parse_special=True)
        assert tokenizer.is_special(token)
        assert (token in tokenizer.eos_ids) is (text != "<|fim_prefix|>")
        assert token not in plain(tokenizer, text)


def test_declared_end_tokens_end_whatever_their_name(make_tokenizer: MakeTokenizer) -> None:
    """eos, eot, eom and the fill-in-the-middle fillers of the metadata; without them only known names."""
    first = 256
    names = [f"<{letter}>" for letter in "abcdef"]
    keys = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    declared = {f"{key}_token_id": first + index for index, key in enumerate(keys)}
    assert make_tokenizer(control=names, **declared).eos_ids == frozenset(range(first, first + 6))
    assert make_tokenizer(control=names).eos_ids == frozenset()


def test_harmony_frames_are_printed_but_not_for_users_to_write(make_tokenizer: MakeTokenizer) -> None:
    """C-17: harmony tags stay visible in output, yet a user's `<|start|>` is ordinary text (llama.cpp differs)."""
    tokenizer = make_tokenizer(control=("<|start|>", "<|channel|>", "<|return|>"))
    start = 256
    assert plain(tokenizer, "<|start|>") != [start]
    assert tokenizer.encode("<|start|>", add_special=False, parse_special=True) == [start]
    assert tokenizer.decode([start, start + 2], skip_special=True) == "<|start|>"


def test_a_byte_that_no_token_has_is_dropped_without_joining_its_neighbours(make_tokenizer: MakeTokenizer) -> None:
    """As in llama.cpp: "t", the byte, "h" are not merged to "th"; SmolLM2 lacks 21 bytes."""
    bell = byte_alphabet()[7]
    tokenizer = make_tokenizer(pairs=PAIRS, without=(bell,))
    assert texts_of(tokenizer, plain(tokenizer, "t\x07he th")) == ["t", "h", "e", "Ġ", "th"]
    assert plain(tokenizer, "\x07\x07") == []


def test_text_without_unicode_meaning_and_long_text_are_refused(make_tokenizer: MakeTokenizer) -> None:
    """C-17: a lone surrogate (JSON can carry one) and too much text get a typed error."""
    tokenizer = make_tokenizer(max_input_chars=10)
    with pytest.raises(InvalidRequest, match="half of a surrogate pair at character 2"):
        plain(tokenizer, "ab\ud83d")
    assert len(plain(tokenizer, "a" * 10)) == 10
    with pytest.raises(InvalidRequest, match="the text has 11 characters, at most 10"):
        plain(tokenizer, "a" * 11)


def test_ids_outside_of_the_vocabulary_are_refused(make_tokenizer: MakeTokenizer) -> None:
    """A negative id must not count from the end."""
    tokenizer = make_tokenizer()
    for token in (-1, 256, 1 << 40):
        with pytest.raises(InvalidRequest, match=f"token id {token} is outside"):
            tokenizer.decode([token])


def test_every_byte_has_its_token(make_tokenizer: MakeTokenizer) -> None:
    """The byte table is GPT-2's: 256 tokens, 256 bytes, each once; text in plain letters keeps its own bytes."""
    tokenizer = make_tokenizer(normal=("zwei wörter", "ünused"))
    table = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    assert sorted(table[:256]) == [bytes([value]) for value in range(256)]
    assert table[256] == "zwei wörter".encode()
    assert tokenizer.decode(plain(tokenizer, "zwei wörter\n\x00\x7f")) == "zwei wörter\n\x00\x7f"


def test_bytes_that_are_not_utf8_survive_in_token_strings(make_metadata: MakeMetadata) -> None:
    """The GGUF reader keeps such bytes as surrogates; they are no word's, but are printed as they are."""
    metadata = make_metadata(tokens=("a", "\udcff", "\udcfe"), token_type=(1, 1, 3), merges=())
    tokenizer = Tokenizer.from_metadata(metadata, "f")
    assert list(map(tokenizer.token_bytes, range(3))) == [b"a", b"\xff", b"\xfe"]
    assert tokenizer.encode("a", add_special=False, parse_special=True) == [0]


def test_bos_and_eos_surround_a_text_once(make_tokenizer: MakeTokenizer) -> None:
    """add_special follows the metadata; the pre-tokenizer's own habit counts where it is silent."""
    ends = {"control": ("<s>", "</s>"), "bos_token_id": 256, "eos_token_id": 257}
    both = make_tokenizer(**ends, add_bos_token=True, add_eos_token=True)
    assert both.encode("a", add_special=True, parse_special=False) == [256, *plain(both, "a"), 257]
    assert both.encode("a", add_special=False, parse_special=False) == plain(both, "a")
    assert make_tokenizer(**ends, pre="llama-bpe").encode("", add_special=True, parse_special=False) == [256]
    assert make_tokenizer(**ends, pre="qwen2").encode("", add_special=True, parse_special=False) == []
    assert (both.bos_text, both.eos_text) == ("<s>", "</s>")
    assert (make_tokenizer().bos_text, make_tokenizer().eos_text) == ("", "")


def test_construction_is_quick(smollm2_metadata: Mapping[str, object]) -> None:
    """49,152 tokens take a quarter of a second of one core; ten times that is a failure."""
    start = time.process_time()
    tokenizer = Tokenizer.from_metadata(smollm2_metadata, "SmolLM2")
    assert time.process_time() - start < 2.5
    assert tokenizer.vocab_size == 49152


@pytest.mark.parametrize(
    ("names", "ends"), [(("<|return|>", "<|end|>"), 2), (("<|return|>", "<|call|>", "<|end|>"), 2)]
)
def test_the_end_of_a_harmony_message_is_not_the_end_of_the_answer(
    make_tokenizer: MakeTokenizer, names: tuple[str, ...], ends: int
) -> None:
    """llama.cpp's rule: beside <|return|> and <|call|>, <|end|> goes on, printed; elsewhere it ends."""
    tokenizer = make_tokenizer(control=names)
    found = {tokenizer.vocabulary.texts[token] for token in tokenizer.eos_ids}
    assert found == set(names[:ends])
