"""The split: which device runs which layers, and the settings every stage must share."""

import hashlib
from dataclasses import astuple, dataclass

from lamina.spec.errors import InvalidConfig, InvalidSplit
from lamina.spec.ids import DeviceId, Epoch, PlacementId
from lamina.spec.model import LayerRange
from lamina.spec.step import BLOCK_TOKENS

KV_DTYPES = ("f32", "f16", "bf16", "q8_0")
WIRE_DTYPES = ("f32", "bf16", "f16")
GRAPH_MODES = ("auto", "on", "off")
MAX_ROWS = 65535  # of tokens, or rows of logits, in a step: where the grid of a CUDA launch ends


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What all stages of a placement agree on; sizes the arena and the block tables."""

    max_rows: int = 512  # tokens in one step
    max_seqs: int = 64
    max_logit_rows: int = 64
    max_context: int = 8192  # tokens of one sequence
    kv_dtype: str = "f16"
    wire_dtype: str = "f32"
    block_tokens: int = BLOCK_TOKENS
    cuda_graphs: str = "auto"  # the cluster's wish, for workers whose own is auto

    def __post_init__(self) -> None:
        if self.block_tokens != BLOCK_TOKENS:
            raise InvalidConfig(f"block_tokens is {self.block_tokens}, this version has {BLOCK_TOKENS}")
        if self.kv_dtype not in KV_DTYPES:
            raise InvalidConfig(f"kv_dtype {self.kv_dtype!r} is none of {', '.join(KV_DTYPES)}")
        if self.wire_dtype not in WIRE_DTYPES:
            raise InvalidConfig(f"wire_dtype {self.wire_dtype!r} is none of {', '.join(WIRE_DTYPES)}")
        if self.cuda_graphs not in GRAPH_MODES:
            raise InvalidConfig(f"cuda_graphs {self.cuda_graphs!r} is none of {', '.join(GRAPH_MODES)}")
        limits = {"max_rows": MAX_ROWS, "max_seqs": MAX_ROWS, "max_logit_rows": MAX_ROWS, "max_context": 2**24}
        for name, limit in limits.items():
            if not 1 <= getattr(self, name) <= limit:
                raise InvalidConfig(f"{name} must be between 1 and {limit}, got {getattr(self, name)}")

    @property
    def max_blocks_per_seq(self) -> int:
        """Length of a block table row."""
        return -(-self.max_context // self.block_tokens)

    def digest(self) -> bytes:
        """SHA-256 over all values; compared in the handshake (B-44)."""
        return hashlib.sha256(repr(astuple(self)).encode()).digest()


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: its place in the pipeline, its device, its layers."""

    index: int
    device: DeviceId
    layers: LayerRange

    def __str__(self) -> str:
        return f"stage {self.index} ({self.device}, layers {self.layers})"


@dataclass(frozen=True, slots=True)
class Placement:
    """A model's layers over devices. The constructor checks that the stages tile [0, num_layers) in order."""

    id: PlacementId
    epoch: Epoch
    num_layers: int
    stages: tuple[StageSpec, ...]

    def __post_init__(self) -> None:
        check_tiling(self.num_layers, tuple(stage.layers for stage in self.stages))
        if [stage.index for stage in self.stages] != list(range(len(self.stages))):
            raise InvalidSplit(f"stages of placement {self.id} are not numbered 0..{len(self.stages) - 1}")


def check_tiling(num_layers: int, ranges: tuple[LayerRange, ...]) -> None:
    """Raise InvalidSplit, naming the first gap or overlap, unless the ranges tile [0, num_layers) in order."""
    expected = 0
    for layers in ranges:
        if layers.start != expected:
            problem = "overlap" if layers.start < expected else "leave a gap"
            raise InvalidSplit(f"layers {layers} {problem}: the next range must start at layer {expected}")
        expected = layers.stop
    if expected != num_layers:
        raise InvalidSplit(f"the split covers layers 0-{expected - 1}, the model has 0-{num_layers - 1}")
