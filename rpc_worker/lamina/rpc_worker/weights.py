"""The weights of one stage on its backend, and the duty to free them. Owned by the compute thread."""

from dataclasses import dataclass, field
from typing import TypeVar

from lamina.kernels.backend import Backend
from lamina.kernels.buffer import Buffer, Weight

Owned = TypeVar("Owned", Buffer, Weight)


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """`gate_up` stacks gate and up."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """`gate_up` and `down` stack the experts' matrices as the expert ops want them."""

    router: Weight
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; `qkv` stacks query, key and value."""

    attention_norm: Buffer
    qkv: Weight
    query_norm: Buffer | None
    key_norm: Buffer | None
    inv_freq: Buffer
    sinks: Buffer | None
    output: Weight
    ffn_norm: Buffer
    ffn: DenseWeights | ExpertsWeights


@dataclass
class StageWeights:
    """All of a stage; `embedding` on the first only, `output_norm` and `head` on the last only."""

    backend: Backend
    layers: list[LayerWeights] = field(default_factory=list)
    embedding: Weight | None = None
    output_norm: Buffer | None = None
    head: Weight | None = None
    _owned: list[Buffer | Weight] = field(default_factory=list)

    def own(self, item: Owned) -> Owned:
        """Remember to free `item`."""
        self._owned.append(item)
        return item

    @property
    def num_bytes(self) -> int:
        """Bytes on the device: packed matrices and float32 vectors."""
        return sum(item.num_bytes if isinstance(item, Weight) else 4 * item.shape[0] for item in self._owned)

    def free(self) -> None:
        """Give everything back."""
        while self._owned:
            item = self._owned.pop()
            if isinstance(item, Weight):
                self.backend.free_weight(item)
            else:
                self.backend.free(item)
