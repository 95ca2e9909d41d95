"""Trains three small byte-level BPE vocabularies and writes them as GGUF files without tensors.

Owns tests/data/vocab_llama_bpe.gguf, vocab_qwen2.gguf and vocab_gpt_4o.gguf; must not know the product's tokenizer. The
files hold what a tokenizer can get wrong and SmolLM2's own vocabulary does not: other split expressions, control and
user-defined tokens, one a prefix of another, whole words that no merge reaches, and two ways of saying whether a BOS
token is added (no key, which means true for `llama-bpe`; false). Harmony's `<|start|>`, `<|message|>`, `<|channel|>`
and `<|end|>` (beside `<|call|>`) are in no vocabulary: llama.cpp turns control tokens of these names into user-defined
ones, which plain text then forms, and goldens must not ask for that.

    python tests/goldens/make_vocabs.py --out-dir tests/data
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import gguf
from golden_texts import AWKWARD_TEXTS
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

# The split expressions that llama.cpp attaches to the two names (llama-vocab.cpp).
LLAMA_BPE_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA_BPE_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# What the tokenizer.json of the o200k family declares; llama.cpp rewrites it for its own expression engine.
GPT_4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# No merge list produces this word: only a vocabulary that ignores merges for whole words finds it.
UNREACHABLE_WORDS = ("lamination", "\u0120lamination")


@dataclass(frozen=True, slots=True)
class VocabDesign:
    """What one vocabulary is to contain; `add_bos` None leaves the key out of the file."""

    file_name: str
    architecture: str
    pre: str
    split: str
    num_trained: int
    control: tuple[str, ...]
    user_defined: tuple[str, ...]
    bos: str
    eos: str
    add_bos: bool | None


DESIGNS = (
    VocabDesign(
        file_name="vocab_llama_bpe.gguf",
        architecture="llama",
        pre="llama-bpe",
        split=LLAMA_BPE_SPLIT,
        num_trained=1200,
        control=(
            "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
            "<|end|>", "<|return|>", "<|fim|>", "<|fim|>x",
        ),
        user_defined=("[INST]",),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        add_bos=None,
    ),
    VocabDesign(
        file_name="vocab_qwen2.gguf",
        architecture="qwen2",
        pre="qwen2",
        split=QWEN2_SPLIT,
        num_trained=1100,
        control=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        user_defined=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        bos="<|endoftext|>",
        eos="<|im_end|>",
        add_bos=False,
    ),
    VocabDesign(
        file_name="vocab_gpt_4o.gguf",
        architecture="gpt-oss",
        pre="gpt-4o",
        split=GPT_4O_SPLIT,
        num_trained=1150,
        control=("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>"),
        user_defined=("<|reserved_200013|>",),
        bos="<|startoftext|>",
        eos="<|return|>",
        add_bos=None,
    ),
)  # fmt: skip


def corpus() -> list[str]:
    """The training texts: Python's own help topics, and the awkward texts for bytes beyond ASCII."""
    return [topics[name] for name in sorted(topics)] + list(AWKWARD_TEXTS.values()) * 3


def train(design: VocabDesign, texts: list[str]) -> tuple[list[str], list[str]]:
    """The byte-level tokens in id order and the merges ("left right") in rank order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(design.split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=design.num_trained,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=16,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def write_vocab(design: VocabDesign, out_dir: Path) -> Path:
    """Writes one vocabulary and returns its path."""
    trained, merges = train(design, corpus())
    normal = trained + [word for word in UNREACHABLE_WORDS if word not in trained]
    tokens = [*normal, *design.control, *design.user_defined]
    types = (
        [gguf.TokenType.NORMAL] * len(normal)
        + [gguf.TokenType.CONTROL] * len(design.control)
        + [gguf.TokenType.USER_DEFINED] * len(design.user_defined)
    )
    path = out_dir / design.file_name
    writer = gguf.GGUFWriter(path, design.architecture)
    writer.add_name(path.stem)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(design.pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(design.bos))
    writer.add_eos_token_id(tokens.index(design.eos))
    if design.add_bos is not None:
        writer.add_add_bos_token(design.add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out-dir", type=Path, required=True, help="folder for the .gguf files")
    out_dir: Path = parser.parse_args().out_dir
    for design in DESIGNS:
        path = write_vocab(design, out_dir)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
