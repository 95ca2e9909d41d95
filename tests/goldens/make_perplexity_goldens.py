"""llama.cpp's log-probabilities of `tests/data/persuasion.txt`, chunk by chunk as its `llama-perplexity` takes them.

Per KV dtype: chunks of 512 tokens, each in an empty context; what follows tokens 256 to 510 is scored. Flash attention
is on, as a quantised cache of values needs it, but off for f32, which llama.cpp's flash attention casts to f16 first.
See README.md for the environment.

    python tests/goldens/make_perplexity_goldens.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf \
      --out tests/goldens/smollm2_perplexity.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np
from llama_peer import PeerContext, PeerModel, file_facts, log_softmax, peer_facts

TEXT = Path(__file__).parents[1] / "data" / "persuasion.txt"
CHUNK = 512
GGML_TYPE_BF16 = 30  # the bindings leave it out
MAX_CHUNKS = 64
CACHE_TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "f32": llama_cpp.GGML_TYPE_F32,
    "bf16": GGML_TYPE_BF16,
}


def cut_chunks(model: PeerModel, num_chunks: int) -> list[list[int]]:
    """The token ids of each chunk; where the vocabulary adds a BOS token, it replaces a chunk's first."""
    tokens = model.tokenize(TEXT.read_text(), add_special=True, parse_special=False)
    chunks = [tokens[CHUNK * i : CHUNK * (i + 1)] for i in range(num_chunks)]
    if len(chunks[-1]) < CHUNK:
        raise ValueError(f"{TEXT} has {len(tokens)} tokens, {CHUNK * num_chunks} are needed")
    if model.adds_bos():
        bos = llama_cpp.llama_vocab_bos(model.vocab)
        chunks = [[bos, *chunk[1:]] for chunk in chunks]
    return chunks


def loss_of(context: PeerContext, chunk: list[int]) -> tuple[float, float]:
    """Sum and sum of squares of the negative log-probabilities (nats) of the second half, but for its first token."""
    context.clear()
    first = CHUNK // 2
    logprobs = log_softmax(context.feed(chunk[:-1], num_logits=CHUNK - 1 - first))
    losses = -logprobs[np.arange(CHUNK - 1 - first), chunk[first + 1 :]]
    return float(losses.sum()), float((losses**2).sum())


def measure(model: PeerModel, chunks: list[list[int]], cache_type: int, num_threads: int) -> dict[str, Any]:
    """Perplexity and its standard error over all chunks, and each chunk's sum of losses."""
    flash = cache_type != llama_cpp.GGML_TYPE_F32
    context = PeerContext(model, num_ctx=CHUNK, flash_attention=flash, cache_type=cache_type, num_threads=num_threads)
    sums = np.array([loss_of(context, chunk) for chunk in chunks])
    llama_cpp.llama_free(context.handle)
    return figures_of(sums)


def figures_of(sums: np.ndarray) -> dict[str, Any]:
    """From `loss_of` of each chunk, float64 [chunks, 2]."""
    count = len(sums) * (CHUNK - 1 - CHUNK // 2)
    mean, mean_square = sums.sum(axis=0) / count
    value = float(np.exp(mean))
    error = value * float(np.sqrt((mean_square - mean**2) / (count - 1)))
    losses = [round(loss, 4) for loss in sums[:, 0]]
    return {"perplexity": value, "standard_error": error, "num_scored": count, "loss_by_chunk": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; other KV dtypes in it are kept")
    parser.add_argument("--kv-dtype", action="append", choices=sorted(CACHE_TYPES), help="only this one; repeatable")
    parser.add_argument("--chunks", type=int, default=MAX_CHUNKS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    model = PeerModel(arguments.model, vocab_only=False)
    chunks = cut_chunks(model, arguments.chunks)
    held = json.loads(arguments.out.read_text())["by_kv_dtype"] if arguments.out.exists() else {}
    for name in arguments.kv_dtype or CACHE_TYPES:
        held[name] = measure(model, chunks, CACHE_TYPES[name], arguments.threads)
        print(name, held[name]["perplexity"], flush=True)
        goldens = {
            "format": 1,
            "peer": peer_facts(),
            "model": file_facts(arguments.model),
            "text": file_facts(TEXT),
            "chunk": CHUNK,
            "by_kv_dtype": held,
        }
        arguments.out.write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
