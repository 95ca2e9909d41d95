"""Predicts gpt-oss-20b over a GTX 1080 Ti and an RTX 4080 Mobile on 1 GbE from bandwidths: arithmetic, no measurement.

Somebody runs that pair with llama.cpp's RPC backend and published what it does. Every assumption is a constant here,
with where it comes from; the figures in docs/performance.md are this script's output.

    python benchmarks/seed_pair.py
"""

from dataclasses import dataclass

# The model: gpt-oss-20b, from its published configuration.
LAYERS, HIDDEN, VOCAB = 24, 2880, 201088
HEADS, KV_HEADS, HEAD_DIM, WINDOW = 64, 8, 64, 128  # every second layer has the window
EXPERTS, EXPERTS_USED, EXPERT_FF = 32, 4, 2880
CONTEXT = 131072

# The file, Q4_K_M: experts stay MXFP4; embedding, attention and head are of mixed types, 10.8 GiB in all as published.
EXPERT_BITS, OTHER_BITS = 4.25, 6.5
KV_BYTES = 2  # f16

# The link: a hop is a frame on the wire, two event loops (0.25 ms beside a computing stage, serving-quick.json) and
# the network's own delay.
LINK_BYTES_PER_S, LINK_DELAY_S, HOP_HOST_S = 117e6, 0.15e-3, 0.25e-3

# Of the read bandwidth that a card's data sheet names, the CUDA backend turned 57 % into weights read on an H200
# (7B shape, cuda-all.json); what a layer costs beside bytes there, 15 microseconds, is taken twice where kernels
# cannot be launched ahead of their predecessor's end (before 9.0), and thrice for the older card.
READ_SHARE = 0.57


@dataclass(frozen=True, slots=True)
class Card:
    """A card as its data sheet has it, and what a layer's launches cost on it."""

    name: str
    bytes_per_s: float
    memory_bytes: float
    layer_s: float
    flops_per_s: float  # of the type that large products multiply in: f32, bf16 on tensor cores
    compute_bytes: int


PASCAL = Card("GTX 1080 Ti", 484e9, 11 * 2**30, 45e-6, 11.3e12, 4)
ADA = Card("RTX 4080 Mobile", 432e9, 12 * 2**30, 30e-6, 99e12, 2)


def expert_bytes() -> float:
    """One expert of one layer: gate, up and down."""
    return 3 * HIDDEN * EXPERT_FF * EXPERT_BITS / 8


def attention_bytes() -> float:
    """Query, key, value and output projections of one layer."""
    return HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) * OTHER_BITS / 8


def head_bytes() -> float:
    """The output matrix; the embedding has as many."""
    return VOCAB * HIDDEN * OTHER_BITS / 8


def kv_bytes(layer: int, context: int) -> float:
    """Keys and values of a sequence in one layer; a window layer keeps its window."""
    return 2 * KV_HEADS * HEAD_DIM * KV_BYTES * (min(context, WINDOW) if layer % 2 == 0 else context)


@dataclass(frozen=True, slots=True)
class Stage:
    """Half-open layers of the model on a card; the first has the embedding, the last the head."""

    card: Card
    start: int
    stop: int

    def memory_bytes(self) -> float:
        """Weights, and the cache of one sequence of full length."""
        layers = range(self.start, self.stop)
        ends = head_bytes() * ((self.start == 0) + (self.stop == LAYERS))
        weights = len(layers) * (EXPERTS * expert_bytes() + attention_bytes())
        return ends + weights + sum(kv_bytes(layer, CONTEXT) for layer in layers)

    def token_s(self, context: int, share: float) -> float:
        """One token of one stream: bytes read at `share` of the card's bandwidth, and the launches."""
        layers = range(self.start, self.stop)
        num_bytes = len(layers) * (EXPERTS_USED * expert_bytes() + attention_bytes())
        num_bytes += head_bytes() * (self.stop == LAYERS) + sum(kv_bytes(layer, context) for layer in layers)
        return num_bytes / (share * self.card.bytes_per_s) + len(layers) * self.card.layer_s


def hop_s(num_rows: int) -> float:
    """A frame of float32 rows to the next stage."""
    return 4 * HIDDEN * num_rows / LINK_BYTES_PER_S + LINK_DELAY_S + HOP_HOST_S


def token_s(stages: tuple[Stage, ...], context: int, share: float) -> float:
    """One token of one stream: every stage in turn, a frame between them, and the token back to the first."""
    frames = (len(stages) - 1) * hop_s(1) + hop_s(0)
    return sum(stage.token_s(context, share) for stage in stages) + frames


def prefill_s(stage: Stage, num_rows: int) -> float:
    """A chunk of a prompt at the card's best: every expert decoded once to the type it multiplies in, then products.

    Decoding reads the packed expert, writes the plain one and reads it again. Attention is left out.
    """
    num_layers = stage.stop - stage.start
    values = 3 * HIDDEN * EXPERT_FF
    decoded = num_layers * EXPERTS * values * (EXPERT_BITS / 8 + 2 * stage.card.compute_bytes) / stage.card.bytes_per_s
    used = EXPERTS_USED * values + HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    return decoded + 2 * num_rows * num_layers * used / stage.card.flops_per_s


def best_split() -> tuple[Stage, Stage]:
    """The fastest for one stream of those that leave both cards a tenth of their memory."""
    splits = [(Stage(PASCAL, 0, cut), Stage(ADA, cut, LAYERS)) for cut in range(1, LAYERS)]
    fitting = [pair for pair in splits if all(s.memory_bytes() < 0.9 * s.card.memory_bytes for s in pair)]
    return min(fitting, key=lambda pair: token_s(pair, 2048, READ_SHARE))


def prediction() -> list[tuple[str, str]]:
    """The rows of docs/performance.md."""
    even = (Stage(PASCAL, 0, 12), Stage(ADA, 12, LAYERS))
    best = best_split()
    rows = [
        (
            "memory at context 131,072, layers 0-11 / 12-23",
            " / ".join(f"{s.memory_bytes() / 2**20:,.0f} MiB" for s in even),
        )
    ]
    for name, share in ((f"{READ_SHARE:.0%} of the bandwidth", READ_SHARE), ("all of it (the bound)", 1.0)):
        times = [stage.token_s(2048, share) for stage in even]
        total = token_s(even, 2048, share)
        parts = f"{1e3 * times[0]:.1f} + {1e3 * times[1]:.1f} + {1e3 * (total - sum(times)):.1f} ms"
        rows.append((f"decode at depth 2,048, {name}", f"{parts} = {1 / total:.0f} tokens/s"))
    slowest = max(stage.token_s(2048, READ_SHARE) for stage in even)
    rows.append(
        (
            "two streams that alternate, same share",
            f"{1 / max(slowest, token_s(even, 2048, READ_SHARE) / 2):.0f} tokens/s",
        )
    )
    rows.append(
        (
            "fastest split of one stream",
            f"layers 0-{best[0].stop - 1} / {best[0].stop}-23, {1 / token_s(best, 2048, READ_SHARE):.0f} tokens/s",
        )
    )
    chunk = [prefill_s(stage, 512) for stage in even]
    parts = f"{1e3 * chunk[0]:.0f} / {1e3 * chunk[1]:.0f} ms"
    rows.append(("a chunk of 512 rows on each card, at best", f"{parts}: {512 / max(chunk):,.0f} tokens/s at most"))
    rows.append(
        ("a chunk of 512 rows on the link", f"{1e3 * hop_s(512):.0f} ms, {512 / hop_s(512):,.0f} tokens/s at most")
    )
    return rows


if __name__ == "__main__":
    for figure, value in prediction():
        print(f"| {figure} | {value} |")
