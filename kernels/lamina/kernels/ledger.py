"""Book-keeping of a backend's memory: what is live, how many bytes, and double frees. Holds no memory itself.

Owned by one backend, used by its compute thread alone.
"""

from collections.abc import Iterable

from lamina.kernels.buffer import Buffer, KvCache, Weight
from lamina.kernels.ops import LaunchError


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
            if isinstance(operand, Buffer | Weight | KvCache) and id(operand.storage) not in self._live:
                raise LaunchError(f"{what}: {type(operand).__name__} was freed, or belongs to another backend")
