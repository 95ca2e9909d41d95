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
    """Named buffers of one backend."""

    def __init__(self, backend: Backend, layout: Iterable[ArenaBuffer]) -> None:
        """Allocate all of `layout`. Raises CapacityExceeded with a byte breakdown; nothing stays allocated (B-29)."""
        self._backend = backend
        self._buffers: dict[str, Buffer] = {}
        layout = tuple(layout)
        try:
            for item in layout:
                shape = (item.rows, item.columns) if item.columns > 1 else (item.rows,)
                self._buffers[item.name] = backend.alloc(shape, _DTYPES[item.dtype], Extent(item.extent))
        except CapacityExceeded as error:
            self.free()
            parts = ", ".join(f"{item.name} {item.num_bytes / 2**20:.1f}" for item in layout)
            raise CapacityExceeded(f"the arena does not fit (MiB: {parts}): {error}") from None
        self.num_bytes = sum(item.num_bytes for item in layout)

    def __getitem__(self, name: str) -> Buffer:
        return self._buffers[name]

    def free(self) -> None:
        """Give all buffers back."""
        for buffer in self._buffers.values():
            self._backend.free(buffer)
        self._buffers.clear()
