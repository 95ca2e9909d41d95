"""The backends that the conformance suite runs against, what each promises, and a bench to try an op on.

A new backend is one entry of BACKENDS. `compute` is false where ops compute nothing: numeric tests are skipped there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from lamina.kernels.backend import Backend, Unsupported
from lamina.kernels.buffer import Buffer, DType, Extent, HostTensor, StepShape, Weight
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.device import Memory
from lamina.kernels.ledger import LedgerBackend
from lamina.kernels.mock import MockBackend
from lamina.kernels.reference import ReferenceBackend
from lamina.spec.quant import GgmlType
from support.cuda_emulated import EmulatedDevice
from support.tiny import random_blocks

EXACT_OPS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class BackendUnderTest:
    """How to make a backend (argument: memory limit in bytes or None) and how far its results may be off.

    Tolerances are relative errors ||a - b|| / ||b|| by op name; EXACT_OPS_TOLERANCE for an op not named. `address` and
    `num_allocations` look behind the interface (B-27).
    """

    create: Callable[[int | None], Backend]
    compute: bool = True
    strict: bool = False  # refuses freed operands, steps larger than buffers, and indices out of range
    tolerances: Mapping[str, float] = field(default_factory=dict)
    address: Callable[[Buffer], int] = lambda buffer: id(buffer.storage)
    num_allocations: Callable[[Backend], int] | None = None
    marks: Sequence[pytest.MarkDecorator] = ()

    def tolerance(self, op: str) -> float:
        return self.tolerances.get(op, EXACT_OPS_TOLERANCE)


def _reference(max_memory_bytes: int | None) -> Backend:
    return ReferenceBackend(max_memory_bytes=max_memory_bytes)


def _mock(max_memory_bytes: int | None) -> Backend:
    return MockBackend() if max_memory_bytes is None else MockBackend(total_bytes=max_memory_bytes)


def _array_address(buffer: Buffer) -> int:
    assert isinstance(buffer.storage, np.ndarray)
    return int(buffer.storage.ctypes.data) + buffer.offset * buffer.dtype.itemsize


def _ledger_allocations(backend: Backend) -> int:
    assert isinstance(backend, LedgerBackend)
    return backend.ledger.num_allocations


def _cuda(max_memory_bytes: int | None) -> Backend:
    return CudaBackend(max_memory_bytes=max_memory_bytes)


def _cuda_emulated(max_memory_bytes: int | None) -> Backend:
    return CudaBackend(max_memory_bytes=max_memory_bytes, device=EmulatedDevice())


def _cuda_address(buffer: Buffer) -> int:
    assert isinstance(buffer.storage, Memory)
    return buffer.storage.address + buffer.offset * buffer.dtype.itemsize


# int8 activations for few rows, bf16 products for many; 16-bit queries and probabilities in attention
_CUDA_TOLERANCES = {
    "linear": 1.5e-2,
    "gated_linear": 2.5e-2,
    "expert_linear": 1.5e-2,
    "expert_gated_linear": 2.5e-2,
    "attention": 5e-3,
}


def _cpu(max_memory_bytes: int | None) -> Backend:
    from lamina.kernels.cpu.backend import CpuBackend

    return CpuBackend(threads=2, max_memory_bytes=max_memory_bytes)


# Activations are rounded to 8 bits per block.
_EIGHT_BIT_ACTIVATIONS = {"linear": 0.01, "gated_linear": 0.025, "expert_linear": 0.01, "expert_gated_linear": 0.025}


BACKENDS: dict[str, BackendUnderTest] = {
    "reference": BackendUnderTest(_reference, strict=True, address=_array_address, num_allocations=_ledger_allocations),
    "cuda": BackendUnderTest(
        _cuda,
        tolerances=_CUDA_TOLERANCES,
        address=_cuda_address,
        num_allocations=_ledger_allocations,
        marks=(pytest.mark.gpu,),
    ),
    "cuda_emulated": BackendUnderTest(
        _cuda_emulated, tolerances=_CUDA_TOLERANCES, address=_cuda_address, num_allocations=_ledger_allocations
    ),
    "cpu": BackendUnderTest(
        _cpu,
        strict=True,
        tolerances=_EIGHT_BIT_ACTIVATIONS,
        address=_array_address,
        num_allocations=_ledger_allocations,
    ),
    "mock": BackendUnderTest(_mock, compute=False, strict=True, num_allocations=_ledger_allocations),
}


def create_or_skip(entry: BackendUnderTest, max_memory_bytes: int | None = None) -> Backend:
    """The backend, or a skip that says why this machine cannot have it."""
    try:
        return entry.create(max_memory_bytes)
    except (Unsupported, ImportError) as error:
        pytest.skip(str(error))


def host_tensor(kind: GgmlType, rows: int, cols: int, rng: np.random.Generator) -> HostTensor:
    """A random matrix as it would lie in a checkpoint."""
    return HostTensor(kind, rows, cols, random_blocks(GGMLQuantizationType(kind.value), rows, cols, rng))


class Bench:
    """One backend with helpers that move numpy arrays in and out. Buffers are ROWS unless said otherwise."""

    def __init__(self, backend: Backend, entry: BackendUnderTest, rng: np.random.Generator) -> None:
        self.backend = backend
        self.entry = entry
        self.rng = rng

    def step(self, rows: int, seqs: int = 1, logit_rows: int = 0) -> StepShape:
        """Set the shape of the launches that follow."""
        shape = StepShape(rows, seqs, logit_rows)
        self.backend.set_shape(shape)
        return shape

    def floats(self, values: NDArray[np.generic], extent: Extent = Extent.ROWS, *, view: bool = False) -> Buffer:
        """A float32 buffer of `values`; with `view`, columns within a wider buffer of garbage."""
        return self._put(np.asarray(values, np.float32), DType.F32, extent, view)

    def ints(self, values: object, extent: Extent = Extent.ROWS) -> Buffer:
        """An int32 buffer of `values`."""
        return self._put(np.asarray(values, np.int32), DType.I32, extent, False)

    def vector(self, values: object) -> Buffer:
        """A float32 vector such as a norm's weight."""
        return self.floats(np.asarray(values, np.float32), Extent.FIXED)

    def normal(self, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        return self.rng.normal(0.0, scale, shape).astype(np.float32)

    def output(self, rows: int, columns: int, extent: Extent = Extent.ROWS, *, view: bool = False) -> Buffer:
        """A buffer full of garbage, so that a result that was never written shows."""
        return self.floats(self.normal(rows, columns, scale=100.0), extent, view=view)

    def read(self, buffer: Buffer) -> NDArray[np.generic]:
        """All rows."""
        return self.backend.download(buffer, buffer.shape[0])

    def weight(
        self, *parts: tuple[GgmlType, int], cols: int, bias: bool = False
    ) -> tuple[Weight, list[HostTensor], NDArray[np.float32] | None]:
        """Random stacked parts (type, rows): the weight, its parts and its bias."""
        tensors = [host_tensor(kind, rows, cols, self.rng) for kind, rows in parts]
        offset = self.normal(sum(tensor.rows for tensor in tensors), scale=0.1) if bias else None
        return self.backend.load_weight(tensors, offset), tensors, offset

    def assert_close(self, op: str, found: NDArray[np.generic], wanted: NDArray[np.generic]) -> None:
        """Relative error of the whole within the backend's tolerance for this op."""
        error = relative_error(found, wanted)
        assert error <= self.entry.tolerance(op), f"{op}: relative error {error:.2e}"

    def _put(self, values: NDArray[np.generic], dtype: DType, extent: Extent, view: bool) -> Buffer:
        if not view:
            buffer = self.backend.alloc(values.shape, dtype, extent)
            self.backend.upload(buffer, values)
            return buffer
        rows, columns = values.shape
        wide = self.backend.alloc((rows, columns + 12), dtype, extent)
        self.backend.upload(wide, self.normal(rows, columns + 12, scale=100.0))
        buffer = wide.columns(4, 4 + columns)
        self.backend.upload(buffer, values)
        return buffer


def relative_error(found: NDArray[np.generic], wanted: NDArray[np.generic]) -> float:
    """||found - wanted|| / ||wanted||, infinite where a shape differs or a value is not finite."""
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return float("inf")
    exact = wanted.astype(np.float64)
    size = float(np.linalg.norm(exact))
    return float(np.linalg.norm(found.astype(np.float64) - exact)) / (size or 1.0)
