"""llama.cpp on an H200, tokens/s: what figures of the CUDA benchmarks are compared with.

It cannot be built on every machine that these run on, so its figures are not of the same run: build of 1 October 2026,
CUDA backend, flash attention on, the same kind of card, shapes and types; two RPC servers that share the card for
`rpc`, where 195 to 230 and 529 to 554 were seen.
"""

NOTE = "peer: llama.cpp of 1 October on the same kind of card, not of this run"

PEER = {
    "cuda.decode.qwen7b.b1.d0": 282.0,
    "cuda.decode.qwen7b.b1.d8192": 257.0,
    "cuda.decode.qwen7b.b1.d8000": 257.0,  # at 8,192
    "cuda.decode.qwen7b.b8.d0": 955.0,
    "cuda.decode.qwen7b.b32.d0": 3308.0,
    "cuda.prefill.qwen7b.p512": 9723.0,
    "cuda.rpc.decode.qwen7b": 212.0,
    "cuda.decode.llama1b.b1.d0": 904.0,
    "cuda.prefill.llama1b.p512": 38362.0,
    "cuda.rpc.decode.llama1b": 541.0,
    "cuda.decode.llama8b.b1.d0": 276.0,
    "cuda.prefill.llama8b.p512": 9689.0,
}


def peer_of(name: str) -> float | None:
    """The peer's tokens/s for a figure of a worker, or of the backend alone under its own name."""
    return PEER.get(name.replace("cuda.backend.", "cuda."))
