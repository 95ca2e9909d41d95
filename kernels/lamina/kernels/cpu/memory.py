"""Native memory behind buffers, weights and caches: aligned, zeroed, on huge pages where the system has them.

Owns allocation and packing; counts nothing (the backend's ledger does). A buffer's storage is a numpy array over native
memory, a weight's a `PackedWeight`, a cache's a `CacheMemory`.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.buffer import DType, HostTensor
from lamina.kernels.cpu.descriptors import Isa, KvDesc, PackedPart, WeightDesc
from lamina.kernels.quant.dequantize import dequantize
from lamina.spec.errors import CapacityExceeded, InvalidCheckpoint
from lamina.spec.quant import GgmlType, row_bytes

ALIGNMENT_BYTES = 64
KV_TYPES = {DType.F32: 0, DType.F16: 1, DType.BF16: 2, DType.Q8_0: 3}
_DECODE_VALUES = 1 << 22  # decoded at a time where a type has no kernel of its own


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight in one allocation; `desc` points into `parts`, both are read by the tape."""

    memory: NDArray[np.uint8]
    parts: ctypes.Array[PackedPart]
    desc: WeightDesc


@dataclass(frozen=True, slots=True, eq=False)
class CacheMemory:
    """A layer's pages and the descriptor that the tape reads."""

    memory: NDArray[np.uint8]
    desc: KvDesc


def allocate(functions: ctypes.CDLL, num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes at a multiple of 64. Raises CapacityExceeded if the system has none."""
    size = max(1, num_bytes)
    address = functions.lamina_allocate(size)
    if not address:
        raise CapacityExceeded(f"the system refused {num_bytes / 2**20:.1f} MiB")
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def release(functions: ctypes.CDLL, memory: NDArray[np.generic]) -> None:
    """Give back what `allocate` gave, or a whole view of it."""
    functions.lamina_release(memory.ctypes.data, memory.nbytes)


def stored_type(functions: ctypes.CDLL, isa: Isa, kind: GgmlType) -> GgmlType:
    """The type that a matrix is packed as: its own if this instruction set has a kernel for it, else F32."""
    return kind if functions.lamina_linear_supports(isa, kind) else GgmlType.F32


def part_offsets(functions: ctypes.CDLL, isa: Isa, parts: Sequence[HostTensor], num_bias: int) -> list[int]:
    """Where each part begins in the weight's allocation, then where the bias does, then the total in bytes."""
    offsets = [0]
    for part in parts:
        size = functions.lamina_packed_bytes(isa, stored_type(functions, isa, part.type), part.rows, part.cols)
        offsets.append(offsets[-1] + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return [*offsets, offsets[-1] + 4 * num_bias]


def pack_weight(
    functions: ctypes.CDLL, team: int, isa: Isa, parts: Sequence[HostTensor], bias: NDArray[np.float32] | None
) -> PackedWeight:
    """Pack matrices straight from the checkpoint's bytes, with all threads.

    Raises InvalidCheckpoint if a part's data are not what its type and shape say.
    """
    for part in parts:
        _check_blocks(part)
    offsets = part_offsets(functions, isa, parts, 0 if bias is None else len(bias))
    memory = allocate(functions, offsets[-1])
    base = memory.ctypes.data
    packed = (PackedPart * len(parts))()
    for i, part in enumerate(parts):
        kind = stored_type(functions, isa, part.type)
        packed[i] = PackedPart(kind, part.rows, part.cols, base + offsets[i])
        _pack_part(functions, team, part, kind, packed[i])
    if bias is not None:
        memory[offsets[-2] :].view(np.float32)[: len(bias)] = bias
    bias_address = None if bias is None else base + offsets[-2]
    num_rows = sum(part.rows for part in parts)
    return PackedWeight(memory, packed, WeightDesc(packed, bias_address, len(parts), num_rows))


def _check_blocks(part: HostTensor) -> None:
    wanted = (part.rows, row_bytes(part.type, part.cols))
    if part.data.shape != wanted or part.data.dtype != np.uint8:
        raise InvalidCheckpoint(
            f"a {part.type.name} matrix of {part.rows} x {part.cols} takes uint8 {list(wanted)}, "
            f"the data are {part.data.dtype} {list(part.data.shape)}"
        )


def _pack_part(functions: ctypes.CDLL, team: int, part: HostTensor, kind: GgmlType, target: PackedPart) -> None:
    if kind is part.type:
        data = part.data if part.data.strides[1] == 1 else np.ascontiguousarray(part.data)
        functions.lamina_pack(team, data.ctypes.data, data.strides[0], 0, part.rows, ctypes.byref(target))
        return
    step = max(16, _DECODE_VALUES // part.cols // 16 * 16)
    for begin in range(0, part.rows, step):
        end = min(begin + step, part.rows)
        values = dequantize(replace(part, rows=end - begin, data=part.data[begin:end]))
        origin = values.ctypes.data - begin * values.strides[0]
        functions.lamina_pack(team, origin, values.strides[0], begin, end, ctypes.byref(target))
