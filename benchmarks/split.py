"""A split that gives every stage about the same number of bytes to read for a token.

python benchmarks/split.py      commands on standard input, answers on standard output
"""

from pathlib import Path

from contest import serve_commands

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


def balanced(model: str, num_stages: int) -> str:
    """The split as `coordinator --split` takes it."""
    file = read_gguf(Path(model))
    ranges = balanced_ranges(model_spec(file, model_digest(file)), file.tensors, num_stages)
    return ",".join(f"{layers.start}-{layers.stop - 1}" for layers in ranges)


if __name__ == "__main__":
    serve_commands({"balanced": balanced})
