"""Recordings of the CUDA backend: which steps share one, and how large a step a recording admits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lamina.kernels.backend import Graph
from lamina.kernels.buffer import Buffer, Extent, StepShape
from lamina.kernels.cuda.device import ExecutableGraph
from lamina.kernels.ops import Args, OpSpec

MAX_GRAPH_ROWS = 4096


class Bucket(NamedTuple):
    """Sizes that a recording's grids are made for; `one_row_each`: every sequence has one row (decode)."""

    rows: int
    seqs: int
    logit_rows: int
    one_row_each: bool


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that the recorded buffers have room for."""

    rows: int
    seqs: int
    logit_rows: int

    def admits(self, shape: StepShape) -> bool:
        return shape.num_rows <= self.rows and shape.num_seqs <= self.seqs and shape.num_logit_rows <= self.logit_rows


@lru_cache(maxsize=1024)  # every step asks, and most are like the one before
def bucket_of(shape: StepShape, max_byte_rows: int) -> Bucket | None:
    """The bucket of a step, or None if it is too large to be worth a recording of its own.

    Powers of two up to `max_byte_rows` rows. Beyond, products by cuBLAS take most of the time and compute whole
    buckets: steps of 128 rows, later of 256.
    """
    seqs, logit_rows = _power_of_two(shape.num_seqs), _power_of_two(shape.num_logit_rows)
    one_row_each = shape.num_rows == shape.num_seqs
    if shape.num_rows <= max_byte_rows:
        return Bucket(_power_of_two(shape.num_rows), seqs, logit_rows, one_row_each)
    if shape.num_rows > MAX_GRAPH_ROWS:
        return None
    step = 128 if shape.num_rows <= 512 else 256
    return Bucket(-(-shape.num_rows // step) * step, seqs, logit_rows, one_row_each)


def bucket_capacity(bucket: Bucket, largest: LargestStep) -> StepShape:
    """The largest step of a bucket that the recorded buffers hold.

    A product computes that many rows at every replay: rows of `out` beyond the step's then hold nothing of use.
    """
    return StepShape(
        min(bucket.rows, largest.rows), min(bucket.seqs, largest.seqs), min(bucket.logit_rows, largest.logit_rows)
    )


def largest_step(launches: Sequence[tuple[OpSpec, Args]]) -> LargestStep:
    """From the leading dimensions of the operands, by extent."""
    largest = {Extent.ROWS: 1 << 30, Extent.SEQS: 1 << 30, Extent.LOGIT_ROWS: 1 << 30}
    for _, args in launches:
        for value in args.values():
            if isinstance(value, Buffer) and value.extent in largest:
                largest[value.extent] = min(largest[value.extent], value.shape[0])
    return LargestStep(largest[Extent.ROWS], largest[Extent.SEQS], largest[Extent.LOGIT_ROWS])


def _power_of_two(count: int) -> int:
    return 0 if count == 0 else 1 << (count - 1).bit_length()


class CudaGraph(Graph):
    """A captured step; `executable` is None if nothing was recorded."""

    def __init__(
        self,
        owner: object,
        executable: ExecutableGraph | None,
        num_launches: int,
        bucket: Bucket | None,
        largest: LargestStep | None,
    ) -> None:
        self.owner = owner
        self.num_launches = num_launches
        self.bucket = bucket
        self.largest = largest
        self.destroyed = False
        self._executable = executable

    def launch(self) -> None:
        if self._executable is not None:
            self._executable.launch()

    def destroy(self) -> None:
        """Free the graph on the device; a second time does nothing."""
        executable, self._executable, self.destroyed = self._executable, None, True
        if executable is not None:
            executable.destroy()
