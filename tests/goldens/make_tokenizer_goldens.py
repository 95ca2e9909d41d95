"""Has llama.cpp tokenise the awkward texts with every golden vocabulary and writes the ids as JSON.

    python tests/goldens/make_tokenizer_goldens.py --out tests/goldens/tokenizer.json \
        models/SmolLM2-135M-Instruct.Q4_1.gguf tests/data/vocab_llama_bpe.gguf tests/data/vocab_qwen2.gguf

README.md beside this file describes the result.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from golden_texts import AWKWARD_TEXTS
from llama_peer import PeerModel, file_facts, peer_facts


def golden_of(model: PeerModel, text: str) -> dict[str, Any]:
    """The ids of one text: `plain` and `special` (parse_special false, true), and what differs from the obvious.

    `special` is left out where it equals `plain`; `text_plain`/`text_special` (hex bytes) only where joining the
    pieces of the ids, control tokens spelt out, does not give the text back.
    """
    plain = model.tokenize(text, add_special=False, parse_special=False)
    special = model.tokenize(text, add_special=False, parse_special=True)
    golden: dict[str, Any] = {"plain": plain}
    if special != plain:
        golden["special"] = special
    for key, ids in (("text_plain", plain), ("text_special", special)):
        spelt = model.detokenize(ids, keep_special=True)
        if spelt != text.encode():
            golden[key] = spelt.hex()
    return golden


def golden_bos(model: PeerModel) -> dict[str, Any]:
    """How the vocabulary treats `add_special`: the flag, and ids of three texts with it."""
    texts = ["", "Hello world", "<|begin_of_text|>x", "<|im_start|>x", "<|endoftext|>x"]
    ids = {text: model.tokenize(text, add_special=True, parse_special=True) for text in texts}
    return {"adds_bos": model.adds_bos(), "ids_with_add_special": ids}


def golden_vocab(path: Path) -> dict[str, Any]:
    """All goldens of one vocabulary."""
    model = PeerModel(path, vocab_only=True)
    return {
        "file": file_facts(path),
        "num_tokens": model.num_tokens,
        "bos": golden_bos(model),
        "texts": {name: golden_of(model, text) for name, text in AWKWARD_TEXTS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files; the stem up to the first '-' is the key")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    goldens = {
        "format": 1,
        "peer": peer_facts(),
        "texts": AWKWARD_TEXTS,
        "vocabs": {path.stem.split("-")[0].lower(): golden_vocab(path) for path in arguments.models},
    }
    arguments.out.write_text(json.dumps(goldens, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes, {len(AWKWARD_TEXTS)} texts")


if __name__ == "__main__":
    main()
