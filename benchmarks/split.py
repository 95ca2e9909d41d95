"""A split that gives every stage about the same number of bytes to read for a token, or the same measured time.

python benchmarks/split.py      commands on standard input, answers on standard output
"""

from collections.abc import Sequence
from pathlib import Path

from contest import serve_commands

from lamina.coordinator.planner.split_file import parse_split
from lamina.spec.checkpoint import TensorIndex
from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.model import LayerRange, ModelSpec, stage_tensor_names


def balanced_ranges(spec: ModelSpec, tensors: TensorIndex, num_stages: int) -> tuple[LayerRange, ...]:
    """The contiguous split whose largest stage reads the fewest bytes for a token: layers and head, no embedding."""

    def read_bytes(layers: LayerRange) -> int:
        looked_up = {"token_embd.weight"} if layers.stop < spec.num_layers else set()
        return sum(
            tensors[name].num_bytes for name in stage_tensor_names(spec, layers, tensors) if name not in looked_up
        )

    best: dict[tuple[int, int], tuple[int, tuple[LayerRange, ...]]] = {(0, 0): (0, ())}
    for stage in range(1, num_stages + 1):
        for stop in range(stage, spec.num_layers + 1):
            options = []
            for start in range(stage - 1, stop):
                if (stage - 1, start) in best:
                    largest, ranges = best[stage - 1, start]
                    layers = LayerRange(start, stop)
                    options.append((max(largest, read_bytes(layers)), (*ranges, layers)))
            best[stage, stop] = min(options, key=lambda option: option[0])
    return best[num_stages, spec.num_layers][1]


def timed_ranges(ranges: Sequence[LayerRange], step_s: Sequence[float]) -> tuple[LayerRange, ...]:
    """Two stages with the boundary where both take the same time, given what a step took with it at `ranges`.

    Layers are taken to be alike; what the last stage takes beyond its layers is its head's, wherever the boundary lies.
    """
    first, last = ranges
    layer_s = step_s[0] / len(first)
    head_s = max(0.0, step_s[1] - layer_s * len(last))
    num_layers = last.stop
    even = (num_layers * layer_s + head_s) / 2 / layer_s
    boundary = min(num_layers - 1, max(1, round(even)))
    return LayerRange(0, boundary), LayerRange(boundary, num_layers)


def spell(ranges: Sequence[LayerRange]) -> str:
    """As `coordinator --split` takes it."""
    return ",".join(f"{layers.start}-{layers.stop - 1}" for layers in ranges)


def timed(split: str, step_s: Sequence[float]) -> str:
    """`timed_ranges` for a split of two stages as `spell` writes it."""
    return spell(timed_ranges(parse_split(split), step_s))


def balanced(model: str, num_stages: int) -> str:
    """The split as `coordinator --split` takes it."""
    file = read_gguf(Path(model))
    return spell(balanced_ranges(model_spec(file, model_digest(file)), file.tensors, num_stages))


if __name__ == "__main__":
    serve_commands({"balanced": balanced, "timed": timed})
