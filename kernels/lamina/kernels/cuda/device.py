"""What the backend needs of a GPU: memory by address, kernels, matrix products, capture, events. A narrow waist.

`CudaDevice` implements it on a real card; tests implement it on the host and run the very same kernels there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import EventProbe
from lamina.kernels.buffer import DType
from lamina.kernels.cuda.policy import ComputeCapability
from lamina.kernels.cuda.programs import Program

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A zeroed allocation of the device: where it starts and how long it is; `handle` is the device's own."""

    address: int
    num_bytes: int
    handle: Any = field(default=None, repr=False)


class Span(NamedTuple):
    """`num_rows` runs of `row_bytes` bytes, `pitch_bytes` apart, from `offset` on in a memory."""

    memory: Memory
    offset: int
    num_rows: int
    row_bytes: int
    pitch_bytes: int

    @property
    def address(self) -> int:
        return self.memory.address + self.offset

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.row_bytes

    @property
    def contiguous(self) -> bool:
        return self.num_rows <= 1 or self.pitch_bytes == self.row_bytes


@dataclass(frozen=True, slots=True)
class Matrix:
    """A row-major matrix of f32, f16 or bf16 in device memory; `offset` in bytes, `stride` in elements."""

    memory: Memory
    offset: int
    rows: int
    columns: int
    stride: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch of a program; arguments flattened, see `programs`."""

    program: Program
    grid: tuple[int, int, int]
    num_threads: int
    args: tuple[int | float, ...]
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ProductCall:
    """out [n, m] = x [n, k] @ weight [m, k]^T (+ out if accumulate); x and weight of one dtype, out f32."""

    x: Matrix
    weight: Matrix
    out: Matrix
    accumulate: bool


Call = KernelCall | ProductCall


class ExecutableGraph(Protocol):
    """A captured, instantiated graph."""

    def launch(self) -> None: ...

    def destroy(self) -> None: ...


class Transfer(Protocol):
    """Copies the first bytes of one memory to another, in stream order."""

    def upload(self, num_bytes: int) -> None:
        """To the device; the host's bytes must not change until it is done."""

    def download(self, num_bytes: int) -> None:
        """To the host."""


class Device(Protocol):
    """One GPU and its default stream. All work is ordered by that stream."""

    name: str
    compute_capability: ComputeCapability
    num_multiprocessors: int
    uuid: str  # of the card; "" where nobody could look it up

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes now."""

    def allocate(self, num_bytes: int) -> Memory:
        """Zeroed memory. Raises CapacityExceeded if the device has none left."""

    def release(self, memory: Memory) -> None:
        """Give it back."""

    def upload(self, span: Span, values: Bytes) -> None:
        """Host bytes [num_rows, row_bytes] into the span; they may be changed afterwards."""

    def download(self, span: Span) -> Bytes:
        """The span's bytes [num_rows, row_bytes], after the work launched so far."""

    def transfer(self, span: Span, host: Bytes) -> Transfer:
        """Between a contiguous span and page-locked host memory as long."""

    def copy(self, source: Span, target: Span) -> None:
        """Within the device, same number of rows and bytes."""

    def reaches(self, other: "Device") -> bool:
        """Whether `copy_from` and `follow` understand what another device made."""

    def copy_from(self, owner: "Device", source: Span, target: Span) -> None:
        """From another device's memory, in the order of this one's stream; same number of rows and bytes."""

    def prepare(self, programs: Sequence[Program]) -> None:
        """Compile and load, so that running them needs no compiler and no allocation."""

    def run(self, call: Call) -> None:
        """Launch."""

    def capture(self, calls: Sequence[Call]) -> ExecutableGraph:
        """Record calls as a graph without running them. Raises GraphError, leaving no capture open."""

    def synchronize(self) -> None:
        """Wait for everything launched."""

    def bind_to_thread(self) -> None:
        """Make the device current for the calling thread."""

    def alloc_pinned(self, num_bytes: int) -> Bytes:
        """Zeroed page-locked host memory."""

    def create_event(self, *, timed: bool = False) -> Any:
        """An event for those below."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Between two timed events that are done."""

    def record_event(self, event: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def event_done(self, event: Any) -> bool: ...

    def event_probe(self, event: Any) -> EventProbe | None:
        """How native code asks `event_done`; None where it cannot."""

    def follow(self, event: Any) -> None:
        """What is launched from now on runs after the event, which may be another device's."""

    def close(self) -> None: ...
