"""A minimal byte-level BPE tokenizer, written into GGUF metadata as llama.cpp's converter would write it.

Owns the vocabulary of the tiny test models: 256 byte tokens in gpt2's alphabet, a few merges of frequent pairs, special
tokens, and filler up to the wanted size. Must not import anything of lamina.
"""

from gguf import GGUFWriter, TokenType

MERGES = (
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("Ġ", "a"),
    ("e", "r"),
    ("o", "n"),
    ("in", "g"),
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
)

BOS, EOS, EOT, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|pad|>"
SPECIALS = (BOS, EOS, EOT, PAD)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable character that gpt2's byte-level BPE uses for each of the 256 bytes, in order of the byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def byte_vocabulary(vocab: int) -> tuple[list[str], list[TokenType]]:
    """Tokens and their types: bytes 0..255, merges from 256, specials after them, then fillers up to `vocab`."""
    tokens = byte_alphabet() + [left + right for left, right in MERGES]
    types = [TokenType.NORMAL] * len(tokens)
    tokens += SPECIALS
    types += [TokenType.CONTROL] * len(SPECIALS)
    num_fillers = vocab - len(tokens)
    if num_fillers < 0:
        raise ValueError(f"the tiny tokenizer needs a vocabulary of at least {len(tokens)} tokens, got {vocab}")
    tokens += [f"<|unused_{index}|>" for index in range(num_fillers)]
    types += [TokenType.UNUSED] * num_fillers
    return tokens, types


def add_byte_tokenizer(writer: GGUFWriter, vocab: int, *, pre: str, add_bos: bool = False) -> None:
    """Add the tokenizer keys for `vocab` tokens; `pre` names the pre-tokenizer ('llama-bpe' or 'qwen2')."""
    tokens, types = byte_vocabulary(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in MERGES])
    writer.add_bos_token_id(tokens.index(BOS))
    writer.add_eos_token_id(tokens.index(EOS))
    writer.add_eot_token_id(tokens.index(EOT))
    writer.add_pad_token_id(tokens.index(PAD))
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)
