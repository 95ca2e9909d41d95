"""Weights on the device: which parts a stacked matrix has there, and how they come to lie there.

A run of parts of one packed type is one packed part; two equal parts of one type are interleaved by 8 rows, so that a
gated linear finds both halves of a result in one lane. Float matrices stay row-major. Types without kernels are decoded
to f32, which is exact, and `explain` says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.buffer import HostTensor
from lamina.kernels.cuda.device import Device, KernelCall, Memory, Span
from lamina.kernels.cuda.formats import CHUNK_COLUMNS, DENSE_TYPES, GROUP_ROWS, PACKED_FORMATS, PackedFormat
from lamina.kernels.cuda.programs import program
from lamina.kernels.quant.dequantize import dequantize
from lamina.spec.quant import GgmlType, quant_format

_ALIGNMENT = 256
_RAW_CHUNK_BYTES = 32 << 20  # of a checkpoint's blocks on the device at a time
_WARPS = 8  # of a block of repack.cu


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows first .. first + rows - 1 in packed units at `offset`; half > 0: two interleaved parts of that many rows."""

    format: PackedFormat
    offset: int
    first: int
    rows: int
    half: int
    columns: int

    @property
    def num_groups(self) -> int:
        return -(-self.half // 8) if self.half else -(-self.rows // GROUP_ROWS)

    @property
    def num_chunks(self) -> int:
        """Chunks of 64 activations that its units span."""
        return self.format.num_units(self.columns) * self.format.chunks

    @property
    def num_bytes(self) -> int:
        return self.num_groups * self.format.group_bytes(self.columns)


@dataclass(frozen=True, slots=True)
class DensePart:
    """Rows first .. of a row-major float matrix at `offset`; `stride` elements apart, a multiple of 8."""

    type: GgmlType
    offset: int
    first: int
    rows: int
    columns: int
    stored_from: GgmlType

    @property
    def stride(self) -> int:
        return -(-self.columns // 8) * 8

    @property
    def itemsize(self) -> int:
        return 4 if self.type is GgmlType.F32 else 2

    @property
    def num_bytes(self) -> int:
        return self.rows * self.stride * self.itemsize


Part = PackedPart | DensePart


@dataclass(frozen=True, slots=True, eq=False)
class CudaWeight:
    """What lies behind a Weight: one memory with all parts and, at `bias_offset` if not None, the bias."""

    memory: Memory
    parts: tuple[Part, ...]
    bias_offset: int | None

    def address(self, part: Part) -> int:
        return self.memory.address + part.offset

    def bias_address(self, first: int) -> int:
        """Of the bias of row `first`; 0 if there is none."""
        return 0 if self.bias_offset is None else self.memory.address + self.bias_offset + 4 * first

    @property
    def paired(self) -> bool:
        """Whether one interleaved part holds both halves of a gated linear."""
        return len(self.parts) == 1 and isinstance(self.parts[0], PackedPart) and self.parts[0].half > 0

    def explain(self) -> str:
        """One line: how each part is kept."""
        return ", ".join(_explain(part) for part in self.parts)


def _explain(part: Part) -> str:
    if isinstance(part, PackedPart):
        return f"{part.rows} rows {part.format.name} packed" + (", gate and up interleaved" if part.half else "")
    if part.stored_from is not part.type:
        why = "gate and up of experts, of which one is float" if part.stored_from in PACKED_FORMATS else "this type"
        return f"{part.rows} rows {part.stored_from.name} decoded to {part.type.name}: no kernel for {why}"
    return f"{part.rows} rows {part.type.name} as they are"


def plan_weight(tensors: Sequence[HostTensor], has_bias: bool) -> tuple[tuple[Part, ...], int | None, int]:
    """(parts, bias offset, bytes in all) of a stacked weight."""
    parts: list[Part] = []
    offset = first = 0
    packs = not _alternates_with_float(tensors)
    for run in _runs(tensors):
        kind, rows, columns = run[0].type, sum(tensor.rows for tensor in run), run[0].cols
        part: Part
        if kind in PACKED_FORMATS and packs:
            paired = len(run) == len(tensors) == 2 and run[0].rows == run[1].rows
            part = PackedPart(PACKED_FORMATS[kind], offset, first, rows, rows // 2 if paired else 0, columns)
        else:
            part = DensePart(kind if kind in DENSE_TYPES else GgmlType.F32, offset, first, rows, columns, kind)
        parts.append(part)
        offset += -(-part.num_bytes // _ALIGNMENT) * _ALIGNMENT
        first += rows
    return tuple(parts), offset if has_bias else None, offset + (4 * first if has_bias else 0)


def store_weight(
    device: Device, weight: CudaWeight, tensors: Sequence[HostTensor], bias: NDArray[np.float32] | None
) -> None:
    """Unpack the checkpoint's blocks into the weight's memory."""
    for part, run in zip(weight.parts, _runs(tensors), strict=True):
        if isinstance(part, DensePart):
            _store_dense(device, weight.memory, part, run)
        elif part.half:
            _store_packed(device, weight.memory, part, [tensor.data for tensor in run])
        else:
            whole = run[0].data if len(run) == 1 else np.concatenate([tensor.data for tensor in run])
            _store_packed(device, weight.memory, part, [whole])
    if bias is not None and weight.bias_offset is not None:
        values = np.ascontiguousarray(bias, np.float32).view(np.uint8).reshape(1, -1)
        device.upload(Span(weight.memory, weight.bias_offset, 1, values.size, values.size), values)


def _runs(tensors: Sequence[HostTensor]) -> list[list[HostTensor]]:
    """Neighbours of one type together, unless matrices of experts would share groups of rows."""
    runs: list[list[HostTensor]] = []
    apart = len(tensors) > 2 and len({t.rows for t in tensors}) == 1 and tensors[0].rows % GROUP_ROWS != 0
    for tensor in tensors:
        if runs and runs[-1][0].type is tensor.type and not apart:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs


def _alternates_with_float(tensors: Sequence[HostTensor]) -> bool:
    """Whether these are gate and up of experts, one of them quantised and the other not: kernels take both or none."""
    first, second = tensors[0].type, tensors[-1].type
    one_of_each = (first in PACKED_FORMATS) != (second in PACKED_FORMATS)
    kinds = [tensor.type for tensor in tensors]
    return one_of_each and len(kinds) > 2 and kinds == [first, second] * (len(kinds) // 2)


def _row_chunks(num_rows: int, row_bytes: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Half-open row ranges of about _RAW_CHUNK_BYTES, all but the last a multiple long."""
    step = max(multiple, _RAW_CHUNK_BYTES // row_bytes // multiple * multiple)
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _store_packed(device: Device, memory: Memory, part: PackedPart, matrices: Sequence[NDArray[np.uint8]]) -> None:
    """Blocks of one matrix, or of two of as many rows to be interleaved, to packed units."""
    num_rows, row_bytes = matrices[0].shape
    num_blocks = row_bytes // quant_format(part.format.type, part.format.name).block_bytes
    group_rows = GROUP_ROWS // len(matrices)
    chunks = list(_row_chunks(num_rows, row_bytes, group_rows))
    chunk_bytes = (chunks[0][1] - chunks[0][0]) * row_bytes
    staging = device.allocate(len(matrices) * chunk_bytes)
    try:
        for start, stop in chunks:
            places = [staging.address + i * chunk_bytes for i in range(len(matrices))]
            for i, matrix in enumerate(matrices):
                device.upload(Span(staging, i * chunk_bytes, stop - start, row_bytes, row_bytes), matrix[start:stop])
            num_groups = -(-(stop - start) // group_rows)
            num_warps = num_groups * part.num_chunks
            target = memory.address + part.offset + start // group_rows * part.format.group_bytes(part.columns)
            args = (places[0], places[1] if len(places) > 1 else 0, target, stop - start, num_blocks, num_groups)
            entry = program("repack.cu", "repack", FORMAT=part.format.name)
            device.run(KernelCall(entry, (-(-num_warps // _WARPS), 1, 1), 32 * _WARPS, args))
    finally:
        device.release(staging)


def _store_dense(device: Device, memory: Memory, part: DensePart, run: list[HostTensor]) -> None:
    row_bytes, pitch = part.columns * part.itemsize, part.stride * part.itemsize
    row = 0
    for tensor in run:
        values = tensor.data if part.stored_from is part.type else dequantize(tensor).view(np.uint8)
        span = Span(memory, part.offset + row * pitch, tensor.rows, row_bytes, pitch)
        device.upload(span, np.ascontiguousarray(values).reshape(tensor.rows, row_bytes))
        row += tensor.rows


def activation_chunks(columns: int) -> int:
    """Chunks of 64 that hold a row of activations."""
    return -(-columns // CHUNK_COLUMNS)
