"""The vocabulary of a byte-level BPE model: token strings, kinds, bytes, and the ids that begin or end a text.

Owns what GGUF metadata says about tokens and llama.cpp's rules for tokens known by name (llama-vocab.cpp). Knows
nothing of splitting or merging text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from lamina.spec.errors import InvalidCheckpoint

Scalar = TypeVar("Scalar", str, int, bool)

# Names that end a generation, whatever the file says (llama.cpp's special_eog_ids).
_END_NAMES = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
# The same for padding, repository and file separators, of which llama.cpp takes one each.
_FILL_IN_END_NAMES = (
    ("fim_pad", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep", ("<|file_sep|>",)),
)
_FILL_IN_NAMES = frozenset((
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
    "<|prefix|>", "<|suffix|>", "<|middle|>",
))  # fmt: skip
# llama.cpp makes these user-defined so that they are printed. Here they are printed too, but stay control tokens: text
# of a user must not be able to open a channel or a message of its own.
_PRINTED_CONTROL_NAMES = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
# In harmony, which has all three, the last ends a message of several; llama.cpp has the same rule.
_HARMONY_NAMES = ("<|return|>", "<|call|>", "<|end|>")


class TokenKind(IntEnum):
    """GGUF's token types."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in id order. `eos_ids` end a generation; a missing `bos_id`, `eos_id` is None.

    `hidden_ids` are the tokens left out of text shown to a user: control and unknown ones.
    """

    texts: tuple[str, ...]
    kinds: tuple[TokenKind, ...]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    hidden_ids: frozenset[int]

    @property
    def guarded_ids(self) -> tuple[int, ...]:
        """Ids whose strings become tokens only where special tokens are parsed."""
        return self._ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN)

    @property
    def user_defined_ids(self) -> tuple[int, ...]:
        """Ids whose strings always become tokens."""
        return self._ids_of(TokenKind.USER_DEFINED)

    def _ids_of(self, *kinds: TokenKind) -> tuple[int, ...]:
        return tuple(index for index, kind in enumerate(self.kinds) if kind in kinds)

    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes of every token, in id order; empty for unused and undefined ones."""
        table = byte_of_char()
        return tuple(_bytes_of(text, kind, table) for text, kind in zip(self.texts, self.kinds, strict=True))


def char_of_byte() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes, in order of the byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (index for index in range(256) if index not in printable)
    spare = {byte: 256 + order for order, byte in enumerate(others)}
    return [chr(spare.get(byte, byte)) for byte in range(256)]


def byte_of_char() -> dict[int, int]:
    """The inverse of `char_of_byte` for `str.translate` and Latin-1; a character without a byte is unencodable."""
    table = dict.fromkeys(range(256), 0xFFFF)
    table.update({ord(char): byte for byte, char in enumerate(char_of_byte())})
    return table


def _bytes_of(text: str, kind: TokenKind, table: Mapping[int, int]) -> bytes:
    match kind:
        case TokenKind.NORMAL:
            try:
                return text.translate(table).encode("latin-1")
            except UnicodeEncodeError:  # an added token in plain text, not in GPT-2's alphabet
                return text.encode("utf-8", "surrogateescape")
        case TokenKind.BYTE:
            return bytes([int(text[3:5], 16)])
        case TokenKind.UNUSED | TokenKind.UNDEFINED:
            return b""
        case _:
            return text.encode("utf-8", "surrogateescape")


def read_vocabulary(metadata: Mapping[str, object], where: str) -> Vocabulary:
    """The vocabulary in GGUF `metadata`. Raises InvalidCheckpoint that names `where` if it is not sound."""
    texts = _read_texts(metadata, where)
    kinds = _read_kinds(metadata, texts, where)
    id_of = {text: index for index, text in enumerate(texts)}
    if len(id_of) != len(texts):
        twice = next(text for index, text in enumerate(texts) if id_of[text] != index)
        raise InvalidCheckpoint(f"{where}: the token {twice!r} occurs twice; convert the model again")
    for name in _FILL_IN_NAMES | _END_NAMES | {name for _, names in _FILL_IN_END_NAMES for name in names}:
        if name in id_of:
            kinds[id_of[name]] = TokenKind.CONTROL
    hidden = {index for index, kind in enumerate(kinds) if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN)}
    return Vocabulary(
        texts=texts,
        kinds=tuple(kinds),
        bos_id=_special_id(metadata, "bos", len(texts), where),
        eos_id=_special_id(metadata, "eos", len(texts), where),
        eos_ids=_end_ids(metadata, id_of, where),
        hidden_ids=frozenset(hidden - {id_of[name] for name in _PRINTED_CONTROL_NAMES if name in id_of})
        - _message_ends(id_of),
    )


def read_strings(metadata: Mapping[str, object], key: str, where: str) -> Sequence[str]:
    """The array of strings under `key`, which must be there."""
    values = metadata.get(key)
    if not isinstance(values, Sequence) or isinstance(values, str) or not all(isinstance(v, str) for v in values):
        raise InvalidCheckpoint(f"{where}: {key} must be an array of strings; convert the model again")
    return values


def read_optional(metadata: Mapping[str, object], key: str, kind: type[Scalar], where: str) -> Scalar | None:
    """The scalar under `key`, or None where the key is absent."""
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not kind:
        raise InvalidCheckpoint(
            f"{where}: {key} must be of type {kind.__name__}, got {value!r}; convert the model again"
        )
    return value


def _read_texts(metadata: Mapping[str, object], where: str) -> tuple[str, ...]:
    texts = read_strings(metadata, "tokenizer.ggml.tokens", where)
    if not texts:
        raise InvalidCheckpoint(f"{where}: tokenizer.ggml.tokens is empty; convert the model again")
    return tuple(text or f"[EMPTY_{index}]" for index, text in enumerate(texts))


def _read_kinds(metadata: Mapping[str, object], texts: Sequence[str], where: str) -> list[TokenKind]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [TokenKind.NORMAL] * len(texts)
    if not isinstance(types, Sequence) or len(types) < len(texts):
        raise InvalidCheckpoint(f"{where}: tokenizer.ggml.token_type must have one entry for each token")
    by_value = {kind.value: kind for kind in TokenKind}
    kinds = [by_value.get(value, TokenKind.UNDEFINED) for value in types[: len(texts)]]
    for text, kind in zip(texts, kinds, strict=True):
        if kind is TokenKind.BYTE and not _is_byte_token(text):
            raise InvalidCheckpoint(f"{where}: byte token {text!r} is not of the form <0x0A>; convert the model again")
    return kinds


def _is_byte_token(text: str) -> bool:
    hex_digits = "0123456789abcdefABCDEF"
    return len(text) == 6 and text[:3] == "<0x" and text[5] == ">" and text[3] in hex_digits and text[4] in hex_digits


def _special_id(metadata: Mapping[str, object], name: str, num_tokens: int, where: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token = read_optional(metadata, key, int, where)
    if token is not None and not 0 <= token < num_tokens:
        raise InvalidCheckpoint(
            f"{where}: {key} is {token}, but there are {num_tokens} tokens; convert the model again"
        )
    return token


def _end_ids(metadata: Mapping[str, object], id_of: Mapping[str, int], where: str) -> frozenset[int]:
    ids: Iterable[int | None] = (_special_id(metadata, name, len(id_of), where) for name in ("eos", "eot", "eom"))
    ends = {*ids, *(id_of.get(name) for name in _END_NAMES)}
    for key, names in _FILL_IN_END_NAMES:
        declared = _special_id(metadata, key, len(id_of), where)
        named = (id_of[name] for name in names if name in id_of)
        ends.add(declared if declared is not None else next(named, None))
    return frozenset(token for token in ends if token is not None) - _message_ends(id_of)


def _message_ends(id_of: Mapping[str, int]) -> frozenset[int]:
    """Harmony's token that ends a message and not the generation; like the other marks of a message it is printed."""
    return frozenset({id_of[_HARMONY_NAMES[-1]]} if all(name in id_of for name in _HARMONY_NAMES) else ())
