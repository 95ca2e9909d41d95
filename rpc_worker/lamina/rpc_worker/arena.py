"""The arena of one stage: every scratch and input buffer, allocated once, addresses never change (B-27).

Owned by the compute thread. Knows names and shapes from `lamina.spec.memory`, nothing of what the model does with them.
"""

from collections.abc import Iterable

from lamina.kernels.backend import Backend
from lamina.kernels.buffer import Buffer, DType, Extent
from lamina.spec.errors import CapacityExceeded
from lamina.spec.memory import ArenaBuffer

_DTYPES = {"f32": DType.F32, "i32": DType.I32}


class Arena:
    """Named buffers of one backend. `staged` is what those that the host writes before each step are parts of.

    `staged_parts` are these, in order and without gaps.
    """

    def __init__(self, backend: Backend, layout: Iterable[ArenaBuffer]) -> None:
        """Allocate all of `layout`. Raises CapacityExceeded with a byte breakdown; nothing stays allocated (B-29)."""
        self._backend = backend
        self._allocated: list[Buffer] = []
        self._buffers: dict[str, Buffer] = {}
        layout = tuple(layout)
        self.staged_parts = tuple(item for item in layout if item.staged)
        try:
            self.staged = self._allocate_staged()
            for item in layout:
                if not item.staged:
                    self._buffers[item.name] = self._allocate(shape_of(item), _DTYPES[item.dtype], Extent(item.extent))
        except CapacityExceeded as error:
            self.free()
            parts = ", ".join(f"{item.name} {item.num_bytes / 2**20:.1f}" for item in layout)
            raise CapacityExceeded(f"the arena does not fit (MiB: {parts}): {error}") from None
        self.num_bytes = sum(item.num_bytes for item in layout)

    def __getitem__(self, name: str) -> Buffer:
        return self._buffers[name]

    def __contains__(self, name: str) -> bool:
        return name in self._buffers

    def free(self) -> None:
        """Give all buffers back."""
        for buffer in self._allocated:
            self._backend.free(buffer)
        self._allocated.clear()
        self._buffers.clear()

    def _allocate(self, shape: tuple[int, ...], dtype: DType, extent: Extent) -> Buffer:
        buffer = self._backend.alloc(shape, dtype, extent)
        self._allocated.append(buffer)
        return buffer

    def _allocate_staged(self) -> Buffer | None:
        sizes = [item.rows * item.columns for item in self.staged_parts]
        if not sizes:
            return None
        whole = self._allocate((sum(sizes),), DType.I32, Extent.FIXED)
        start = 0
        for item, size in zip(self.staged_parts, sizes, strict=True):
            self._buffers[item.name] = whole.part(start, shape_of(item), _DTYPES[item.dtype], Extent(item.extent))
            start += size
        return whole


def shape_of(item: ArenaBuffer) -> tuple[int, ...]:
    """Of the buffer: a vector, or a matrix where rows have several columns."""
    return (item.rows, item.columns) if item.columns > 1 else (item.rows,)
