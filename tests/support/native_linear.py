"""The native matrix code through its flat test interface: packs, multiplies and unpacks on any instruction set.

Owns the ctypes mirror of `lamina::LinearArgs`; knows nothing of backends. Arrays go in and come out as numpy float32.
"""

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from lamina.kernels.cpu.descriptors import Isa, LinearMode, PackedPart


class _LinearArgs(ctypes.Structure):
    _fields_ = (
        ("parts", ctypes.POINTER(PackedPart)),
        ("num_parts", ctypes.c_int32),
        ("bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("ldx", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("ldo", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("mode", ctypes.c_int),
        ("scratch", ctypes.c_void_p),
    )


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes at a multiple of 64."""
    raw = np.zeros(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes]


@dataclass(frozen=True, slots=True)
class Packed:
    """One weight matrix [rows, cols] in the packed layout of an instruction set."""

    isa: Isa
    type: GGMLQuantizationType
    rows: int
    cols: int
    data: NDArray[np.uint8]


class NativeLinear:
    """The loaded library. Pointers handed to it are plain numpy buffers that outlive the call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("lamina_test_packed_bytes", "lamina_test_scratch_bytes"):
            function = getattr(library, name)
            function.restype = ctypes.c_int64
        library.lamina_test_packed_bytes.argtypes = (ctypes.c_int, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)
        library.lamina_test_scratch_bytes.argtypes = (ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
        library.lamina_test_pack.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
            ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p,
        )  # fmt: skip
        library.lamina_test_unpack_row.argtypes = (
            ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p,
            ctypes.c_int64, ctypes.c_float, ctypes.c_void_p,
        )  # fmt: skip
        library.lamina_test_linear.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_LinearArgs))

    def pack(
        self,
        isa: Isa,
        tensor_type: GGMLQuantizationType,
        blocks: NDArray[np.uint8],
        cols: int,
        split: int | None = None,
    ) -> Packed:
        """Pack raw GGUF `blocks` [rows, row bytes]; with `split` the rows before and after it in two calls."""
        rows, row_bytes = blocks.shape
        data = aligned(self._library.lamina_test_packed_bytes(isa, tensor_type, rows, cols))
        bounds = [0, rows] if split is None else [0, split, rows]
        for begin, end in pairwise(bounds):
            self._library.lamina_test_pack(
                isa, blocks.ctypes.data, row_bytes, begin, end, tensor_type, rows, cols, data.ctypes.data
            )
        return Packed(isa, tensor_type, rows, cols, data)

    def unpack_row(self, weight: Packed, row: int, scale: float = 1.0) -> NDArray[np.float32]:
        """Row `row` of `weight` as float32 [cols], times `scale`."""
        out = np.empty(weight.cols, np.float32)
        self._library.lamina_test_unpack_row(
            weight.isa, weight.type, weight.rows, weight.cols, weight.data.ctypes.data, row, scale, out.ctypes.data
        )
        return out

    def linear(
        self,
        parts: list[Packed],
        x: NDArray[np.float32],
        *,
        mode: LinearMode = LinearMode.STORE,
        bias: NDArray[np.float32] | None = None,
        out: NDArray[np.float32] | None = None,
        threads: int = 1,
    ) -> NDArray[np.float32]:
        """x [rows, cols] times the stacked parts; `x` and `out` may have a larger row stride than they have columns."""
        gated = mode in (LinearMode.GATE_SILU, LinearMode.GATE_GELU_TANH)
        width = parts[0].rows if gated else sum(part.rows for part in parts)
        if out is None:
            out = np.full((len(x), width), np.nan, np.float32)
        isa = parts[0].isa
        scratch = aligned(self._library.lamina_test_scratch_bytes(isa, len(x), parts[0].cols, width))
        array = (PackedPart * len(parts))(*(PackedPart(p.type, p.rows, p.cols, p.data.ctypes.data) for p in parts))
        args = _LinearArgs(
            array, len(parts), None if bias is None else bias.ctypes.data, x.ctypes.data, x.strides[0] // 4,
            out.ctypes.data, out.strides[0] // 4, len(x), mode, scratch.ctypes.data,
        )  # fmt: skip
        self._library.lamina_test_linear(isa, threads, ctypes.byref(args))
        return out
