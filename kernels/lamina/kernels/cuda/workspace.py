"""Scratch memory that ops share beyond the arena: named regions that only ever grow, and device-side constants.

A region that grew leaves its old memory alive, since a captured graph may still point at it. `reserve` sizes all of
them once, before the first launch, so that nothing is allocated while serving.
"""

from collections.abc import Mapping

import numpy as np

from lamina.kernels.buffer import StepLimits
from lamina.kernels.cuda.device import Device, Memory, Span

MAX_BYTE_ROWS = 64  # rows up to which linears work on int8 activations (tensor cores), see planner
MAX_SPLITS = 32  # MAX_PARTS of attention_few.cu
_NUM_CONSTANTS = 1024
_LARGEST_PARTIAL_BYTES = (16 * 256 + 32) * 4  # a partial result of attention at the largest head


def slice_bytes(total_memory_bytes: int) -> int:
    """How much of a weight is decoded at a time for cuBLAS: large slices keep it busy, small ones spare memory."""
    return min(288 << 20, max(16 << 20, total_memory_bytes // 256))


def max_attention_parts(num_multiprocessors: int) -> int:
    """Partial results that attention may hold at once: splits are chosen to stay below (see attention_plan)."""
    return 8 * num_multiprocessors


class Workspace:
    """See the module docstring; owned by one planner."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._regions: dict[str, Memory] = {}
        self._retired: list[Memory] = []
        self._constants: dict[int, int] = {}

    def region(self, name: str, num_bytes: int) -> Memory:
        """The region of this name, at least this large; zeroed when new."""
        memory = self._regions.get(name)
        if memory is None or memory.num_bytes < num_bytes:
            grown = self._device.allocate(num_bytes)  # may be refused: nothing has changed then
            if memory is not None:
                self._retired.append(memory)
            memory = self._regions[name] = grown
        return memory

    def constant(self, value: int) -> int:
        """Address of an int that holds `value` (row counts of buffers whose shape is fixed)."""
        memory = self.region("constants", 4 * _NUM_CONSTANTS)
        if value not in self._constants:
            if len(self._constants) == _NUM_CONSTANTS:
                raise ValueError(f"more than {_NUM_CONSTANTS} fixed row counts in use; use buffers of one extent")
            self._constants[value] = 4 * len(self._constants)
            bytes_of_value = np.array([[value]], np.int32).view(np.uint8)
            self._device.upload(Span(memory, self._constants[value], 1, 4, 4), bytes_of_value)
        return memory.address + self._constants[value]

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Allocate every region at its size."""
        for name, num_bytes in sizes.items():
            self.region(name, num_bytes)

    def close(self) -> None:
        """Release everything."""
        for memory in (*self._regions.values(), *self._retired):
            self._device.release(memory)
        self._regions.clear()
        self._retired.clear()
        self._constants.clear()


def region_sizes(
    limits: StepLimits,
    max_in: int,
    max_out: int,
    total_memory_bytes: int,
    num_multiprocessors: int,
    compute_bytes: int = 2,
) -> dict[str, int]:
    """Bytes of every region for steps and weights of at most these sizes; `compute_bytes` of a value of theirs."""
    padded_in = max(256, -(-max_in // 256) * 256)
    rows = min(limits.max_rows, MAX_BYTE_ROWS)
    sizes = {
        "constants": 4 * _NUM_CONSTANTS,
        "counts": 16,
        "maxima": 16 * max(limits.max_logit_rows, limits.max_rows, 1),
        "tickets": 4 * max_attention_parts(num_multiprocessors),
        "partial": max_attention_parts(num_multiprocessors) * _LARGEST_PARTIAL_BYTES,
        "product": 4 * rows * max_out,
    }
    for side in range(2):
        sizes[f"codes.{side}"] = MAX_BYTE_ROWS * padded_in
        sizes[f"scales.{side}"] = MAX_BYTE_ROWS * padded_in // 64 * 16
        sizes[f"squares.{side}"] = padded_in // 8
    if limits.max_rows > MAX_BYTE_ROWS:
        slice_rows = min(max_out, max(16, slice_bytes(total_memory_bytes) // (compute_bytes * padded_in)))
        sizes["halves"] = 2 * limits.max_rows * max_in
        sizes["slice"] = compute_bytes * (slice_rows + 16) * padded_in
        sizes["product"] = max(sizes["product"], 4 * limits.max_rows * (slice_rows + 16))
    return sizes
