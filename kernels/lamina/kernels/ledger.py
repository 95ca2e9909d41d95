"""Book-keeping of a backend's memory: what is live, how many bytes, and double frees. Holds no memory itself.

`MemoryLedger` is owned by one backend and used by its compute thread alone; `LedgerBackend` is what `reference` and
`mock` share: every memory method checked against the ledger, and refused inside a capture.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Backend, Unsupported, require_free
from lamina.kernels.buffer import Buffer, DType, HostTensor, KvCache, StepShape, Weight
from lamina.kernels.ops import ALL_OPS, Args, LaunchError, OpSpec
from lamina.kernels.recording import RecordingBackend, operand_rows

_ALLOCATED = (Buffer, Weight, KvCache)  # a union in the expression would be made anew for every operand


class MemoryLedger:
    """Live allocations by the identity of their storage."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.num_allocations = 0  # ever made; flat while a serve runs (B-27)
        self._live: dict[int, tuple[object, int]] = {}  # keeps the storage, so that its id is not reused

    def add(self, storage: object, num_bytes: int) -> None:
        """Enter an allocation."""
        self._live[id(storage)] = (storage, num_bytes)
        self.used_bytes += num_bytes
        self.num_allocations += 1

    def remove(self, storage: object, what: str) -> None:
        """Strike out an allocation. Raises ValueError if it is not live here (freed before, or another backend's)."""
        if id(storage) not in self._live:
            raise ValueError(f"{what} was freed before, or belongs to another backend")
        _, num_bytes = self._live.pop(id(storage))
        self.used_bytes -= num_bytes

    def require_live(self, what: str, operands: Iterable[object]) -> None:
        """Raise LaunchError if a buffer, weight or cache among `operands` is not live here."""
        for operand in operands:
            if isinstance(operand, _ALLOCATED) and id(operand.storage) not in self._live:
                raise LaunchError(f"{what}: {type(operand).__name__} was freed, or belongs to another backend")


class LedgerBackend(RecordingBackend):
    """A RecordingBackend that knows what it has allocated and refuses freed or foreign operands."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = MemoryLedger()

    def free(self, buffer: Buffer) -> None:
        """Raises ValueError if it was freed before."""
        self._release(buffer.storage, f"the buffer of {buffer.shape}")

    def free_weight(self, weight: Weight) -> None:
        """Raises ValueError if it was freed before."""
        self._release(weight.storage, f"the weight of {weight.out_features} x {weight.in_features}")

    def free_kv(self, cache: KvCache) -> None:
        """Raises ValueError if it was freed before."""
        self._release(cache.storage, f"the KV cache of {cache.num_blocks} blocks")

    def upload(self, buffer: Buffer, values: NDArray[np.generic]) -> None:
        """Raises ValueError for another dtype, other columns or too many rows."""
        self._require_usable("upload", buffer)
        allowed = {buffer.dtype.host_dtype}
        if buffer.dtype in (DType.F16, DType.BF16):
            allowed.add(np.dtype(np.float32))
        if values.dtype not in allowed:
            raise ValueError(f"upload of {values.dtype} into a {buffer.dtype.value} buffer")
        if values.ndim != len(buffer.shape) or values.shape[1:] != buffer.shape[1:] or len(values) > buffer.shape[0]:
            raise ValueError(f"upload of {list(values.shape)} values into a buffer of {list(buffer.shape)}")
        self._upload(buffer, values)

    def download(self, buffer: Buffer, num_rows: int) -> NDArray[np.generic]:
        """Raises ValueError for more rows than the buffer has."""
        self._require_usable("download", buffer)
        _require_rows("download", buffer, num_rows)
        return self._download(buffer, num_rows)

    def copy(self, source: Buffer, target: Buffer, num_rows: int) -> None:
        """Raises ValueError if dtype or columns differ, GraphError inside a capture: it would bake in a row count."""
        self._require_usable("copy", source, target)
        _require_alike(source, target, num_rows)
        self._copy(source, target, num_rows)

    def copy_from(self, owner: Backend, source: Buffer, target: Buffer, num_rows: int) -> None:
        """Raises like `copy`, and Unsupported for a backend that this one does not reach."""
        if owner is self:
            self.copy(source, target, num_rows)
            return
        if not isinstance(owner, LedgerBackend) or not self.reaches(owner):
            raise Unsupported(f"{self.name} cannot copy from {owner.name}")
        self._require_usable("copy", target)
        owner.ledger.require_live("copy", [source])
        _require_alike(source, target, num_rows)
        self._copy_from(owner, source, target, num_rows)

    def _copy_from(self, owner: Backend, source: Buffer, target: Buffer, num_rows: int) -> None:
        raise Unsupported(f"{self.name} cannot copy from {owner.name}")  # reaches nobody else

    def supports(self, op: OpSpec) -> bool:
        return ALL_OPS.get(op.name) is op

    def _run(self, op: OpSpec, args: Args, shape: StepShape) -> None:
        self.ledger.require_live(op.name, args.values())
        num_rows = operand_rows(op, args, shape)
        if num_rows:
            self._compute(op, args, shape, num_rows)

    def _reserve(self, what: str, num_bytes: int) -> None:
        """Before an allocation: raises CapacityExceeded, or GraphError inside a capture."""
        self._require_no_capture("an allocation")
        require_free(what, num_bytes, self.device_facts())

    def _release(self, storage: object, what: str) -> None:
        self._require_no_capture("free")
        self.ledger.remove(storage, what)

    def _require_usable(self, what: str, *operands: object) -> None:
        self._require_no_capture(what)
        self.ledger.require_live(what, operands)

    @abstractmethod
    def _upload(self, buffer: Buffer, values: NDArray[np.generic]) -> None: ...

    @abstractmethod
    def _download(self, buffer: Buffer, num_rows: int) -> NDArray[np.generic]: ...

    @abstractmethod
    def _copy(self, source: Buffer, target: Buffer, num_rows: int) -> None: ...

    @abstractmethod
    def _compute(self, op: OpSpec, args: Args, shape: StepShape, num_rows: int) -> None:
        """Run one launch whose operands are live and large enough."""


def stacked_rows(parts: Sequence[HostTensor], bias: NDArray[np.float32] | None) -> tuple[int, tuple[int, ...]]:
    """in_features and rows of each part of a weight. Raises ValueError if columns differ or `bias` does not fit."""
    widths = {part.cols for part in parts}
    part_rows = tuple(part.rows for part in parts)
    if len(widths) != 1:
        raise ValueError(f"parts of a weight must have equal columns, not {sorted(widths)}")
    if bias is not None and bias.shape != (sum(part_rows),):
        raise ValueError(f"bias of {list(bias.shape)} values for {sum(part_rows)} rows")
    return widths.pop(), part_rows


def _require_rows(what: str, buffer: Buffer, num_rows: int) -> None:
    if not 0 <= num_rows <= buffer.shape[0]:
        raise ValueError(f"{what} of {num_rows} rows, the buffer has {buffer.shape[0]}")


def _require_alike(source: Buffer, target: Buffer, num_rows: int) -> None:
    if source.dtype is not target.dtype or source.shape[1:] != target.shape[1:]:
        raise ValueError(f"copy of {source.dtype.value} {source.shape} to {target.dtype.value} {target.shape}")
    _require_rows("copy", source, num_rows)
    _require_rows("copy", target, num_rows)
