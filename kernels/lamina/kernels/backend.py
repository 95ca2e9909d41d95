"""The Backend interface: memory, op launches, streams, graphs, events. One conformance suite tests every backend.

Required methods are abstract; optional ones have a default that raises `Unsupported` or does nothing, and a flag in
`Capabilities` says so (B-02). A backend object belongs to one compute thread; nothing here locks.

A step is recorded once and replayed: `capture(fn)` records the ops `fn` launches *without running them*, and
`replay(graph, shape)` runs them. Row counts, positions, lengths, block tables and tokens are read at replay, from the
`StepShape` and from buffers, never baked in.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.buffer import Buffer, DType, Extent, HostTensor, KvCache, StepLimits, StepShape, Weight
from lamina.kernels.op_checks import validate_args
from lamina.kernels.ops import Args, OpSpec
from lamina.spec.device import DeviceHealth
from lamina.spec.errors import CapacityExceeded, LaminaError
from lamina.spec.quant import GgmlType, quant_format


class Unsupported(LaminaError):
    """An optional concern that this backend does not have; its capability flag is false."""


class GraphError(LaminaError):
    """A recording is misused: capture within a capture, replay after destroy, or work that cannot be recorded."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond the required methods, and what it promises."""

    graphs: bool = False  # replay costs less than launching the ops one by one
    streams: bool = False
    events: bool = False
    pinned_memory: bool = False
    asynchronous: bool = False  # launches and the copies of a `HostCopy` return before they are done; events tell when
    batch_invariant: bool = False  # a token's result does not depend on its company
    kv_dtypes: frozenset[DType] = frozenset({DType.F32})
    compute_dtype: str = "f32"  # that large matrix products multiply in unless `set_compute` says otherwise
    compute_dtypes: tuple[str, ...] = ("f32",)  # that they may multiply in, best first
    kernel: str = ""  # which kernel family serves the linears, for the capability table
    num_threads: int = 0  # that compute; 0 where the host's cores have no part in it, or nobody chose how many


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device behind a backend: kind ("cpu", "cuda", "mock"), human name, memory in bytes."""

    kind: str
    name: str
    total_bytes: int
    free_bytes: int


class GraphMode(Enum):
    """The operator's wish, per worker or for the cluster (C-14)."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class GraphDecision:
    """Whether steps are recorded, and why; `probe`: kept only where a trial proves them equal and faster."""

    enabled: bool
    reason: str
    probe: bool = False


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What serves an op on operands of a type (of weight or cache) at so many rows, and why that."""

    op: str
    operand: str
    rows: str
    kernel: str
    why: str


class Graph(ABC):
    """A recording of ops that can be replayed. Destroyed explicitly."""

    num_launches: int
    num_bytes: int = 0  # on the device, beside the buffers it refers to; 0 where nobody can tell

    @abstractmethod
    def destroy(self) -> None:
        """Free what the recording holds; replaying it afterwards is an error."""


class Stream:
    """An ordered queue of device work; backends with real streams derive from it."""


class Event:
    """A point in a stream; backends with real events derive from it."""


class EventProbe(NamedTuple):
    """How native code asks whether an event is done: `function(event)`, by address, says `pending` until it is."""

    function: int
    event: int
    pending: int


class HostCopy:
    """The host's side of a buffer: `values` of its shape and dtype, whose first rows go up and down in stream order.

    On an asynchronous backend they are page-locked, and stay as they are after an upload, or are not there yet after a
    download, until an event recorded later is done.
    """

    values: NDArray[np.generic]

    def __init__(self, backend: "Backend", buffer: Buffer) -> None:
        self._backend = backend
        self._buffer = buffer
        self.values = np.zeros(buffer.shape, buffer.dtype.host_dtype)

    def upload(self, num_rows: int) -> None:
        """Copy the first rows to the buffer's. Raises ValueError for more than there are."""
        self._check(num_rows)
        self._backend.upload(self._buffer, self.values[:num_rows])

    def download(self, num_rows: int) -> None:
        """Copy the buffer's first rows here. Raises ValueError for more than there are."""
        self._check(num_rows)
        self.values[:num_rows] = self._backend.download(self._buffer, num_rows)

    def _check(self, num_rows: int) -> None:
        if not 0 <= num_rows <= len(self.values):
            raise ValueError(f"transfer of {num_rows} rows, there are {len(self.values)}")


class Backend(ABC):
    """One device. See the module docstring for the contract of recording and replay."""

    name: str
    capabilities: Capabilities

    # -- memory

    @abstractmethod
    def device_facts(self) -> DeviceFacts:
        """Name and memory of the device now (free memory is asked of the driver or OS, not remembered)."""

    def health(self) -> DeviceHealth | None:
        """Link, temperature, power and clocks now; None where nothing measures them. Any thread may ask."""
        return None

    @abstractmethod
    def alloc(self, shape: tuple[int, ...], dtype: DType, extent: Extent = Extent.FIXED) -> Buffer:
        """A zeroed buffer of shape (rows,) or (rows, columns). Raises CapacityExceeded with asked and free bytes."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Give the memory back; views of it become invalid."""

    @abstractmethod
    def upload(self, buffer: Buffer, values: NDArray[np.generic]) -> None:
        """Copy host values into the first rows of the buffer (dtype must match, or be f32 for f16/bf16 buffers)."""

    @abstractmethod
    def download(self, buffer: Buffer, num_rows: int) -> NDArray[np.generic]:
        """The first rows on the host, in a fresh array; waits for work that writes them."""

    def host_copy(self, buffer: Buffer) -> HostCopy:
        """A host's side for a buffer whose rows lie without gaps. Raises ValueError for another."""
        return HostCopy(self, buffer)

    @abstractmethod
    def copy(self, source: Buffer, target: Buffer, num_rows: int) -> None:
        """Device-to-device copy of the first rows, in stream order."""

    def reaches(self, other: "Backend") -> bool:
        """Whether `copy_from` and `follow` take what another backend of this process left on its device.

        Always so for itself. Any thread may ask.
        """
        return other is self

    def copy_from(self, owner: "Backend", source: Buffer, target: Buffer, num_rows: int) -> None:
        """Copy the first rows of a buffer of `owner`, which this backend `reaches`, in the order of its own stream.

        Called on this backend's thread. Whoever owns the source neither writes nor frees it meanwhile; what is to have
        written it before is said by `follow`.
        """
        if owner is not self:
            raise Unsupported(f"{self.name} cannot copy from another {owner.name} device")
        self.copy(source, target, num_rows)

    @abstractmethod
    def load_weight(self, parts: Sequence[HostTensor], bias: NDArray[np.float32] | None = None) -> Weight:
        """Stack matrices of equal `cols` by rows and lay them out for this device; one copy is kept.

        Serves `linear`, `gated_linear` and `embed` alike, and the expert ops with one part (or a gate and an up part)
        for each expert. `bias` is f32 [sum of rows]. Raises CapacityExceeded.
        """

    def weight_bits(self, tensor_type: GgmlType) -> float:
        """Bits per value that a matrix of this type occupies once loaded (B-42); as stored by default."""
        return quant_format(tensor_type, tensor_type.name).bits_per_value

    @abstractmethod
    def free_weight(self, weight: Weight) -> None:
        """Give the weight's memory back."""

    @abstractmethod
    def alloc_kv(self, num_blocks: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType) -> KvCache:
        """The paged cache of one layer. Raises Unsupported for a dtype or head size it has no kernel for (B-16)."""

    @abstractmethod
    def free_kv(self, cache: KvCache) -> None:
        """Give the cache's memory back."""

    @abstractmethod
    def kv_bytes_per_block(self, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType) -> int:
        """Exact bytes that one block of one layer occupies on this device, K and V together."""

    @abstractmethod
    def copy_kv_block(self, cache: KvCache, source: int, target: int) -> None:
        """Copy one block (a partly filled block is copied, never shared)."""

    @abstractmethod
    def read_kv(
        self, cache: KvCache, blocks: Sequence[int], num_tokens: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K [num_tokens, kv_heads, key_dim] and V [.., value_dim] of a block list, as float32 (tests, migration)."""

    def workspace_bytes(self, limits: StepLimits, max_in_features: int, max_out_features: int) -> int:
        """Bytes of private scratch that ops of these sizes need beyond the arena; 0 by default."""
        return 0

    def reserve_workspace(self, limits: StepLimits, max_in_features: int, max_out_features: int) -> None:
        """Allocate that scratch, once, before the first launch. Raises CapacityExceeded."""

    def alloc_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeroed page-locked host memory (B-10)."""
        raise Unsupported(f"{self.name} has no pinned memory")

    # -- op launches

    def launch(self, op: OpSpec, args: Args) -> None:
        """Validate the arguments (B-05), then run the op at the current shape, or record it while capturing."""
        validate_args(op, args)
        self._launch(op, args)

    @abstractmethod
    def _launch(self, op: OpSpec, args: Args) -> None:
        """Run or record one validated op."""

    def set_compute(self, dtype: DType) -> None:
        """What large matrix products multiply in from now on; recordings keep what they were made with.

        Raises Unsupported unless `capabilities.compute_dtypes` has it.
        """
        if dtype.value not in self.capabilities.compute_dtypes:
            raise Unsupported(
                f"{self.name} computes in {' or '.join(self.capabilities.compute_dtypes)}, not in {dtype.value}"
            )

    def explain(
        self, weights: Sequence[GgmlType], caches: Sequence[DType], experts: Sequence[GgmlType] = ()
    ) -> list[KernelChoice]:
        """Which kernel serves linears on these weight types, experts on those, and attention on these caches."""
        kernel = self.capabilities.kernel
        return [
            KernelChoice("every op", "any", "any", kernel, f"the {self.name} backend has one implementation of each")
        ]

    @abstractmethod
    def set_shape(self, shape: StepShape) -> None:
        """The sizes that ops launched from now on run at."""

    @abstractmethod
    def supports(self, op: OpSpec) -> bool:
        """Whether this backend has the op."""

    # -- streams

    def create_stream(self) -> Stream:
        """Another queue beside the default one."""
        raise Unsupported(f"{self.name} has one implicit stream")

    def synchronize(self) -> None:
        """Wait until all launched work is done; nothing to do where launches are synchronous."""

    def bind_to_thread(self) -> None:
        """Make the device current for the calling thread (B-04); nothing to do on hosts."""

    # -- graphs

    def graph_decision(self, cluster: GraphMode = GraphMode.AUTO) -> GraphDecision:
        """Whether steps are recorded here; `cluster` counts where the worker's own wish is auto (C-14).

        A tape of the host is no variable to remove: always, unless a backend says otherwise.
        """
        return GraphDecision(True, "steps are tapes of the host")

    @abstractmethod
    def capture(self, fn: Callable[[], None], shape: StepShape) -> Graph:
        """Record what `fn` launches without running it; a failure inside leaves no capture open (B-09).

        Only op launches can be recorded; a capture within a capture is a GraphError. `shape` is a shape of the bucket
        the graph will be replayed in.
        """

    @abstractmethod
    def replay(self, graph: Graph, shape: StepShape) -> None:
        """Run the recording at this shape, whatever `set_shape` said. Raises GraphError if it was destroyed."""

    def graph_bucket(self, shape: StepShape) -> Hashable | None:
        """Steps of equal bucket share one recording; None means run this shape op by op. One bucket by default."""
        return 0

    # -- events

    def create_event(self, *, timed: bool = False) -> Event:
        """A point in the default stream to wait for; `timed` ones can be told apart in time."""
        raise Unsupported(f"{self.name} has no events")

    def record_event(self, event: Event) -> None:
        """Mark the default stream's present end."""
        raise Unsupported(f"{self.name} has no events")

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds on the device between two timed events that are done."""
        raise Unsupported(f"{self.name} has no events")

    def wait_event(self, event: Event) -> None:
        """Block the calling thread until the event's work is done."""
        raise Unsupported(f"{self.name} has no events")

    def event_done(self, event: Event) -> bool:
        """Whether `wait_event` would return at once."""
        raise Unsupported(f"{self.name} has no events")

    def event_probe(self, event: Event) -> EventProbe | None:
        """How others than the interpreter ask `event_done`; None where they cannot."""
        return None

    def follow(self, event: Event) -> None:
        """What is launched from now on runs after an event recorded by a backend that this one `reaches`.

        The host does not wait. Recording the event again later changes nothing for those who follow it already.
        """
        raise Unsupported(f"{self.name} has no events")

    def close(self) -> None:
        """Give back what the backend itself holds (thread pool, workspace)."""


def require_free(what: str, asked_bytes: int, facts: DeviceFacts) -> None:
    """Raise CapacityExceeded with both numbers if `asked_bytes` is more than the device has free."""
    if asked_bytes > facts.free_bytes:
        raise CapacityExceeded(
            f"{what} needs {asked_bytes / 2**20:.1f} MiB, {facts.name} has {facts.free_bytes / 2**20:.1f} MiB free"
        )
