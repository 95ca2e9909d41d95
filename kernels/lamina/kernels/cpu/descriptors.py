"""What crosses the C ABI: ctypes mirrors of kernels/native/include/lamina/tape.h, field by field.

Owns layouts only. `library` checks the size of OpDesc and the ABI version against the loaded library.
"""

import ctypes
from ctypes import Structure, Union, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import ClassVar

ABI_VERSION = 3

Fields = list[tuple[str, type]]


class Isa(IntEnum):
    """Instruction sets, best last within an architecture. AMX is AVX512 with tile registers for many rows."""

    SCALAR = 0
    AVX2 = 1
    AVX512 = 2
    NEON = 3
    AMX = 4


class OpKind(IntEnum):
    """Ops of the tape; ROPE_TABLE is made by the recorder, EXPERTS serves both expert ops of lamina.kernels.ops."""

    EMBED = 0
    RMS_NORM = 1
    LINEAR = 2
    ROPE_TABLE = 3
    ROPE = 4
    KV_WRITE = 5
    ATTENTION = 6
    ADD = 7
    SOFTCAP = 8
    GATHER_ROWS = 9
    ARGMAX = 10
    SAMPLE = 11
    ROUTE = 12
    EXPERTS = 13


class LinearMode(IntEnum):
    """What a linear does with its result."""

    STORE = 0
    ACCUMULATE = 1
    GATE_SILU = 2
    GATE_GELU_TANH = 3
    GATE_SWIGLU_CLAMPED = 4


class Matrix(Structure):
    """Address of a row-major view, row stride in elements, columns, rows."""

    _fields_: ClassVar[Fields] = [
        ("data", c_void_p),
        ("stride", c_int64),
        ("columns", c_int32),
        ("num_rows", c_int32),
    ]


class PackedPart(Structure):
    """One matrix of a weight in the layout of its (instruction set, type)."""

    _fields_: ClassVar[Fields] = [("type", c_int32), ("rows", c_int32), ("cols", c_int32), ("data", c_void_p)]


class WeightDesc(Structure):
    """Parts stacked by rows, and their bias or null."""

    _fields_: ClassVar[Fields] = [
        ("parts", ctypes.POINTER(PackedPart)),
        ("bias", c_void_p),
        ("num_parts", c_int32),
        ("num_rows", c_int32),
    ]


class KvDesc(Structure):
    """A paged cache."""

    _fields_: ClassVar[Fields] = [
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("num_kv_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("type", c_int32),
    ]


class EmbedArgs(Structure):
    _fields_: ClassVar[Fields] = [("tokens", Matrix), ("out", Matrix), ("table", c_void_p), ("scale", c_float)]


class RmsNormArgs(Structure):
    _fields_: ClassVar[Fields] = [
        ("x", Matrix),
        ("out", Matrix),
        ("weight", c_void_p),
        ("group", c_int32),
        ("eps", c_float),
    ]


class LinearArgs(Structure):
    _fields_: ClassVar[Fields] = [("x", Matrix), ("out", Matrix), ("weight", c_void_p), ("mode", c_int32)]


class RopeTableArgs(Structure):
    _fields_: ClassVar[Fields] = [
        ("positions", Matrix),
        ("inv_freq", c_void_p),
        ("table", c_void_p),
        ("pairs", c_int32),
        ("magnitude", c_float),
    ]


class RopeArgs(Structure):
    _fields_: ClassVar[Fields] = [
        ("x", Matrix),
        ("table", c_void_p),
        ("pairs", c_int32),
        ("head_dim", c_int32),
        ("neox", c_int32),
    ]


class KvWriteArgs(Structure):
    _fields_: ClassVar[Fields] = [("k", Matrix), ("v", Matrix), ("slots", Matrix), ("cache", c_void_p)]


class AttentionArgs(Structure):
    _fields_: ClassVar[Fields] = [
        ("q", Matrix),
        ("out", Matrix),
        ("positions", Matrix),
        ("row_starts", Matrix),
        ("block_table", Matrix),
        ("cache", c_void_p),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
    ]


class AddArgs(Structure):
    _fields_: ClassVar[Fields] = [("x", Matrix), ("y", Matrix), ("out", Matrix)]


class SoftcapArgs(Structure):
    _fields_: ClassVar[Fields] = [("x", Matrix), ("cap", c_float)]


class GatherRowsArgs(Structure):
    _fields_: ClassVar[Fields] = [("x", Matrix), ("indices", Matrix), ("out", Matrix)]


class ArgmaxArgs(Structure):
    _fields_: ClassVar[Fields] = [("x", Matrix), ("out", Matrix)]


class SampleArgs(Structure):
    _fields_: ClassVar[Fields] = [("x", Matrix), ("params", Matrix), ("out", Matrix)]


class RouteArgs(Structure):
    _fields_: ClassVar[Fields] = [
        ("x", Matrix),
        ("experts", Matrix),
        ("shares", Matrix),
        ("of_selected", c_int32),
        ("normalise", c_int32),
        ("scale", c_float),
    ]


class ExpertArgs(Structure):
    _fields_: ClassVar[Fields] = [
        ("x", Matrix),
        ("experts", Matrix),
        ("shares", Matrix),
        ("out", Matrix),
        ("weight", c_void_p),
        ("mode", c_int32),
    ]


OpArgs = (
    EmbedArgs
    | RmsNormArgs
    | LinearArgs
    | RopeTableArgs
    | RopeArgs
    | KvWriteArgs
    | AttentionArgs
    | AddArgs
    | SoftcapArgs
    | GatherRowsArgs
    | ArgmaxArgs
    | SampleArgs
    | RouteArgs
    | ExpertArgs
)


class OpUnion(Union):
    _fields_: ClassVar[Fields] = [
        ("embed", EmbedArgs),
        ("rms_norm", RmsNormArgs),
        ("linear", LinearArgs),
        ("rope_table", RopeTableArgs),
        ("rope", RopeArgs),
        ("kv_write", KvWriteArgs),
        ("attention", AttentionArgs),
        ("add", AddArgs),
        ("softcap", SoftcapArgs),
        ("gather_rows", GatherRowsArgs),
        ("argmax", ArgmaxArgs),
        ("sample", SampleArgs),
        ("route", RouteArgs),
        ("experts", ExpertArgs),
    ]


class OpDesc(Structure):
    """One op of a tape: rows are read from `extent` at replay, `barrier` says that what came before must be done."""

    _fields_: ClassVar[Fields] = [
        ("kind", c_int32),
        ("extent", c_int32),
        ("fixed_rows", c_int32),
        ("barrier", c_int32),
        ("args", OpUnion),
    ]


class ReplayReport(Structure):
    """How a replay went: the threads that ran it, and how often one waited long for another."""

    _fields_: ClassVar[Fields] = [("num_threads", c_int32), ("num_long_waits", c_int32)]
