"""Text to token ids and back, equal to llama.cpp's token for token, from the vocabulary in a GGUF file.

Owns the split expressions of the supported pre-tokenizers, the recognition of special tokens and the bound on input.
Merging is the `tokenizers` library's. Knows no chat template, no model and no sequence. A Tokenizer never changes after
it was built: any thread may use it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tokenizers
from tokenizers import models, pre_tokenizers

from lamina.spec.errors import InvalidCheckpoint, InvalidRequest, UnsupportedModel
from lamina.spec.vocabulary import (
    Vocabulary,
    char_of_byte,
    read_optional,
    read_strings,
    read_vocabulary,
)

DEFAULT_MAX_INPUT_CHARS = 1 << 20  # costs up to 3 s and 400 MB, and is more than 128k tokens of any prose

_Fragment: TypeAlias = str | int  # a stretch of text, or a special token already recognised


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family splits text into words before merging; names and expressions are those of llama-vocab.cpp.

    `splits` are applied one after the other, each within the pieces of the one before; what an expression does not
    match is a piece too. With `ignore_merges` a word that is a token is not merged from parts.
    """

    names: tuple[str, ...]
    splits: tuple[str, ...]
    ignore_merges: bool
    adds_bos: bool


_SURROGATE = re.compile("[\ud800-\udfff]")

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
# llama.cpp's stand-ins for upper and lower case: letters outside ASCII are both
_NOT_LOWER, _NOT_UPPER = r"(?=\p{L})[^a-z]", r"(?=\p{L})[^A-Z]"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

PRE_TOKENIZERS = (
    PreTokenizer(
        names=("smollm",),
        splits=(r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        ignore_merges=False,
        adds_bos=False,
    ),
    PreTokenizer(
        names=("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        splits=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}",),
        ignore_merges=True,
        adds_bos=True,
    ),
    PreTokenizer(
        names=("qwen2", "deepseek-r1-qwen", "megrez"),
        splits=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS_AND_SPACES}",),
        ignore_merges=False,
        adds_bos=False,
    ),
    PreTokenizer(
        names=("gpt-4o", "llama4", "kanana2"),
        splits=(
            rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_NOT_LOWER})*(?:{_NOT_UPPER})+{_CONTRACTIONS}?"
            rf"|[^\r\n\p{{L}}\p{{N}}]?(?:{_NOT_LOWER})+(?:{_NOT_UPPER})*{_CONTRACTIONS}?"
            rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges=False,
        adds_bos=False,
    ),
)


class Tokenizer:
    """Encodes and decodes for one model. Build it with `from_metadata`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        words: tokenizers.Tokenizer,
        *,
        adds_bos: bool,
        adds_eos: bool,
        max_input_chars: int,
    ) -> None:
        self.vocabulary = vocabulary
        self.adds_bos = adds_bos
        self.adds_eos = adds_eos
        self.max_input_chars = max_input_chars
        self._words = words
        self._token_bytes = vocabulary.token_bytes()
        self._guarded = self._longest_first(vocabulary.guarded_ids)
        self._user_defined = self._longest_first(vocabulary.user_defined_ids)
        self._all_special = self._longest_first((*vocabulary.guarded_ids, *vocabulary.user_defined_ids))

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, object], where: str, *, max_input_chars: int = DEFAULT_MAX_INPUT_CHARS
    ) -> "Tokenizer":
        """The tokenizer that GGUF `metadata` describes; `where` names the file in messages.

        Raises UnsupportedModel for another tokenizer model or pre-tokenizer, InvalidCheckpoint for unsound metadata.
        `tokenizer.ggml.add_space_prefix` has no effect on these models, in llama.cpp neither.
        """
        pre = _choose_pre_tokenizer(metadata, where)
        vocabulary = read_vocabulary(metadata, where)
        declared_bos = read_optional(metadata, "tokenizer.ggml.add_bos_token", bool, where)
        adds_bos = pre.adds_bos if declared_bos is None else declared_bos
        adds_eos = read_optional(metadata, "tokenizer.ggml.add_eos_token", bool, where) or False
        for adds, name, token in ((adds_bos, "bos", vocabulary.bos_id), (adds_eos, "eos", vocabulary.eos_id)):
            if adds and token is None:
                raise InvalidCheckpoint(f"{where}: every text gets a {name} token, but {name}_token_id is not set")
        words = _build_words(pre, vocabulary, read_strings(metadata, "tokenizer.ggml.merges", where), where)
        return cls(vocabulary, words, adds_bos=adds_bos, adds_eos=adds_eos, max_input_chars=max_input_chars)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.texts)

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return self.vocabulary.eos_ids

    @property
    def bos_text(self) -> str:
        """The string of the bos token, "" where there is none."""
        return "" if self.vocabulary.bos_id is None else self.vocabulary.texts[self.vocabulary.bos_id]

    @property
    def eos_text(self) -> str:
        """The string of the eos token, "" where there is none."""
        return "" if self.vocabulary.eos_id is None else self.vocabulary.texts[self.vocabulary.eos_id]

    @property
    def guarded_texts(self) -> tuple[str, ...]:
        """Strings that `parse_special` turns into tokens: what a user's text must not be able to form."""
        return tuple(text for text, _ in self._guarded)

    def encode(self, text: str, *, add_special: bool, parse_special: bool, mark: str = "") -> list[int]:
        """The token ids of `text`.

        add_special: put the bos (eos) token before (after) it, if the model wants one.
        parse_special: strings of control tokens become those tokens. Never set it for a user's text; user-defined
        tokens (like <think>) are recognised without it.
        mark: a character (string) that takes no part in the text, and is dropped after control tokens were recognised;
        put inside such a string, it makes that string plain text.

        Raises InvalidRequest if the text is longer than `max_input_chars` or holds a lone surrogate.
        """
        self._check_input(text)
        ids = [self.vocabulary.bos_id] if add_special and self.adds_bos and self.vocabulary.bos_id is not None else []
        for fragment in self._fragments(text, parse_special, mark):
            if isinstance(fragment, int):
                ids.append(fragment)
            elif fragment:
                ids.extend(self._encode_words(fragment))
        if add_special and self.adds_eos and self.vocabulary.eos_id is not None:
            ids.append(self.vocabulary.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves control tokens out."""
        hidden = self.vocabulary.hidden_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(token) for token in ids if token not in hidden).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; a control token's are its name. Raises InvalidRequest outside the vocabulary."""
        if not 0 <= token < len(self._token_bytes):
            raise InvalidRequest(
                f"token id {token} is outside of the vocabulary; ids go from 0 to {self.vocab_size - 1}"
            )
        return self._token_bytes[token]

    def is_special(self, token: int) -> bool:
        """Whether the token is left out of text shown to a user (control and unknown tokens)."""
        return token in self.vocabulary.hidden_ids

    def _longest_first(self, ids: Iterable[int]) -> tuple[tuple[str, int], ...]:
        """(string, id) by falling length in bytes: the order in which llama.cpp looks for them."""
        return tuple(
            (self.vocabulary.texts[token], token)
            for token in sorted(ids, key=lambda token: -len(self._token_bytes[token]))
        )

    def _check_input(self, text: str) -> None:
        if len(text) > self.max_input_chars:
            raise InvalidRequest(f"the text has {len(text)} characters, at most {self.max_input_chars} are taken")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is not valid Unicode: half of a surrogate pair at character {error.start}; send it whole"
            ) from error

    def _fragments(self, text: str, parse_special: bool, mark: str) -> list[_Fragment]:
        if not mark:
            return _split_at(text, [text], self._all_special if parse_special else self._user_defined)
        guarded = _split_at(text, [text], self._guarded if parse_special else ())
        fragments = [part if isinstance(part, int) else part.replace(mark, "") for part in guarded]
        return _split_at(text.replace(mark, ""), fragments, self._user_defined)

    def _encode_words(self, text: str) -> list[int]:
        ids: list[int] = self._words.encode(text, add_special_tokens=False).ids
        missing = len(self._token_bytes)  # stands for a byte that no token has; llama.cpp skips it too
        return [token for token in ids if token != missing] if missing in ids else ids


def _split_at(text: str, fragments: list[_Fragment], specials: Sequence[tuple[str, int]]) -> list[_Fragment]:
    """Cut every string of `specials` out of the text `fragments`, all of which are parts of `text`."""
    for special, token in specials:
        if special not in text:
            continue
        cut: list[_Fragment] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                cut.append(fragment)
                continue
            first, *others = fragment.split(special)
            cut.append(first)
            for other in others:
                cut += (token, other)
        fragments = cut
    return fragments


def _choose_pre_tokenizer(metadata: Mapping[str, object], where: str) -> PreTokenizer:
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model is None:
        raise InvalidCheckpoint(f"{where}: there is no tokenizer in the file (tokenizer.ggml.model is not set)")
    if model != "gpt2":
        raise UnsupportedModel(f"{where}: tokenizer model {model!r} is not supported; supported: gpt2 (byte-level BPE)")
    for candidate in PRE_TOKENIZERS:
        if pre in candidate.names:
            return candidate
    names = ", ".join(name for candidate in PRE_TOKENIZERS for name in candidate.names)
    raise UnsupportedModel(f"{where}: pre-tokenizer {pre!r} is not supported; supported: {names}")


def _build_words(pre: PreTokenizer, vocabulary: Vocabulary, merges: Sequence[str], where: str) -> tokenizers.Tokenizer:
    """The part without special tokens. Control tokens are left out of it, so that no plain text can form one."""
    guarded = frozenset(vocabulary.guarded_ids)
    vocab = {
        text: token
        for token, text in enumerate(vocabulary.texts)
        if token not in guarded and not _SURROGATE.search(text)  # bytes that are not UTF-8: no word equals them
    }
    missing_byte = "\0"  # not in GPT-2's alphabet, hence in no word
    has_all_bytes = all(char in vocab for char in char_of_byte())
    if not has_all_bytes:
        vocab[missing_byte] = len(vocabulary.texts)
    model = models.BPE(
        vocab,
        _read_merges(merges, vocab, {vocabulary.texts[token] for token in guarded}, where),
        unk_token=None if has_all_bytes else missing_byte,
        fuse_unk=False,
        ignore_merges=pre.ignore_merges,
    )
    words = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(tokenizers.Regex(expression), "isolated") for expression in pre.splits]
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return words


def _read_merges(
    merges: Sequence[str], vocab: Mapping[str, int], guarded: set[str], where: str
) -> list[tuple[str, str]]:
    """Pairs in rank order, the first of equal ones, without those that would make a control token."""
    pairs: dict[tuple[str, str], None] = {}
    for merge in merges:
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or not right:
            raise InvalidCheckpoint(f"{where}: merge {merge!r} is not a pair of tokens; convert the model again")
        if left in vocab and right in vocab and left + right in vocab:
            pairs[left, right] = None
        elif not guarded.intersection((left, right, left + right)):
            raise InvalidCheckpoint(f"{where}: merge {merge!r} names a token that the vocabulary lacks")
    return list(pairs)
