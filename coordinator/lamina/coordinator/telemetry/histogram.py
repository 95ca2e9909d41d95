"""A histogram cheap enough for every token: an increment, no lock. Owned by the coordinator's loop."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values by bucket; a value equal to a bound counts below it, as Prometheus has it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def num_values(self) -> int:
        """Values counted."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._sum

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), the last one "+Inf"."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets
