"""What a worker says of itself and its devices. Figures are measured by the worker when asked, not remembered."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lamina.spec.ids import DeviceId, Epoch, PlacementId, WorkerName
from lamina.spec.model import LayerRange
from lamina.spec.quant import GgmlType

PROTOCOL_MAJOR = 1  # must be equal on both sides
PROTOCOL_MINOR = 0


@dataclass(frozen=True, slots=True)
class Version:
    """Release, protocol version and the digest of the wire schema."""

    product: str
    protocol_major: int
    protocol_minor: int
    schema_digest: bytes

    def __str__(self) -> str:
        digest = self.schema_digest.hex()[:8]
        return f"lamina {self.product} (protocol {self.protocol_major}.{self.protocol_minor}, schema {digest})"


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """What NVML says of a card now; 0 where it does not say. The maxima are what card and slot can do together."""

    pcie_generation: int = 0
    pcie_width: int = 0
    max_pcie_generation: int = 0
    max_pcie_width: int = 0
    temperature_c: float = 0.0
    power_w: float = 0.0
    clock_mhz: int = 0  # of the multiprocessors
    memory_clock_mhz: int = 0
    busy_ratio: float = 0.0  # share of the last moments in which a kernel ran


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device: memory in bytes (free: now, under the worker's cap) and what its backend can do."""

    id: DeviceId
    kind: str
    name: str
    total_bytes: int
    free_bytes: int
    kernel: str
    compute_dtype: str
    kv_dtypes: tuple[str, ...]
    graphs: bool
    threads: int
    weight_bits: Mapping[GgmlType, float]  # bits per value of a matrix of this type once loaded
    health: DeviceHealth | None = None  # None where nothing measures it


GRAPH_VETOES = ("step too large", "capture failed", "no memory", "too many bytes", "results differ", "not faster")


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """Recorded steps of a stage since it was loaded; `vetoes` are steps run op by op though recordings are on."""

    captures: int = 0
    replays: int = 0
    evictions: int = 0
    held: int = 0
    held_bytes: int = 0
    vetoes: Mapping[str, int] = field(default_factory=dict)  # by reason, of GRAPH_VETOES


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage that a worker holds now; `busy_s` is time inside ops since it was loaded."""

    placement: PlacementId
    epoch: Epoch
    stage: int
    device: int
    layers: LayerRange
    model_digest: str
    settings_digest: bytes
    weight_bytes: int
    cache_bytes: int
    arena_bytes: int
    controlled: bool
    num_steps: int
    busy_s: float
    num_sequences: int
    graphs: GraphCounts = field(default_factory=GraphCounts)
    compute_dtype: str = ""  # of its large matrix products, now
    num_prefill_steps: int = 0  # of num_steps, those with a prompt's chunk in them; the others only decode
    prefill_busy_s: float = 0.0  # of busy_s, in those
    link_bytes: int = 0  # sent on the edge to the next stage since it was opened; 0 within one process
    link_queue_depth: int = 0  # messages that wait on it now
    link_kind: str = ""  # direct or grpc; empty within one process, and while there is none


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """A worker's answer to Describe."""

    version: Version
    name: WorkerName
    advertise: str
    devices: tuple[DeviceProfile, ...]
    stages: tuple[LoadedStage, ...]
    uptime_s: float
