"""From recorded launches to the flat array of descriptors that the native interpreter walks.

Owns the translation of each op, where barriers go, shared rope tables, and how much scratch the ops need. Knows the
layout behind buffers, weights and caches; runs nothing.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.buffer import Buffer, Extent, KvCache, StepLimits, Weight
from lamina.kernels.cpu.descriptors import (
    AddArgs,
    ArgmaxArgs,
    AttentionArgs,
    EmbedArgs,
    ExpertArgs,
    GatherRowsArgs,
    Isa,
    KvWriteArgs,
    LinearArgs,
    LinearMode,
    Matrix,
    OpArgs,
    OpDesc,
    OpKind,
    PackedPart,
    RmsNormArgs,
    RopeArgs,
    RopeTableArgs,
    RouteArgs,
    SampleArgs,
    SoftcapArgs,
    WeightDesc,
)
from lamina.kernels.cpu.memory import CacheMemory, PackedWeight
from lamina.kernels.ops import Args, LaunchError, OpSpec

_EXTENTS = {Extent.FIXED: 0, Extent.ROWS: 1, Extent.SEQS: 2, Extent.LOGIT_ROWS: 3}
_GATES = {
    "silu": LinearMode.GATE_SILU,
    "gelu_tanh": LinearMode.GATE_GELU_TANH,
    "swiglu_clamped": LinearMode.GATE_SWIGLU_CLAMPED,
}
_SCRATCH = "scratch"  # what linears and attention share beside their operands

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Access:
    """Columns of some storage that an op reads or writes."""

    storage: object
    begin: int
    end: int
    written: bool

    def conflicts(self, other: "Access") -> bool:
        """Whether one must wait for the other."""
        overlap = self.storage is other.storage and self.begin < other.end and other.begin < self.end
        return overlap and (self.written or other.written)


@dataclass(frozen=True, slots=True)
class Tape:
    """Descriptors, what keeps their addresses valid, and the scratch they need in bytes (per thread, shared)."""

    ops: ctypes.Array[OpDesc]
    keep_alive: tuple[object, ...]
    own_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class _RopeTable:
    """A table of cosines and sines, what it was made from, and where it lies."""

    positions: Buffer
    inv_freq: Buffer
    magnitude: float
    values: NDArray[np.float32]


def expert_scratch_bytes(functions: ctypes.CDLL, isa: Isa, limits: StepLimits) -> int:
    """What each thread needs for the ops of `limits.experts` on the largest step."""
    sizes = limits.experts
    if sizes is None:
        return 0
    experts = Matrix(columns=sizes.num_selected, stride=sizes.num_selected, num_rows=limits.max_rows)
    found = []
    for parts_each, rows, cols, mode in (
        (2, sizes.intermediate, sizes.hidden, LinearMode.GATE_SILU),
        (1, sizes.hidden, sizes.intermediate, LinearMode.STORE),
    ):
        num_parts = parts_each * sizes.num_experts
        part = PackedPart(0, rows, cols, None)
        weight = WeightDesc(ctypes.pointer(part), None, num_parts, num_parts * rows)
        args = ExpertArgs(Matrix(), experts, Matrix(), Matrix(), ctypes.addressof(weight), mode)
        found.append(int(functions.lamina_experts_own_bytes(isa, ctypes.byref(args), limits.max_rows)))
    return max(found)


class TapeBuilder:
    """Collects launches in order; `finish` gives the tape. One builder makes one tape."""

    def __init__(self, functions: ctypes.CDLL, isa: Isa, num_threads: int) -> None:
        self._functions = functions
        self._isa = isa
        self._num_threads = num_threads
        self._ops: list[OpDesc] = []
        self._since_barrier: list[Access] = []
        self._tables: list[_RopeTable] = []
        self._keep_alive: list[object] = []
        self._own_bytes = 0
        self._shared_bytes = 0

    def add(self, op: OpSpec, args: Args) -> None:
        """Append one validated launch."""
        operands = _Operands(op, args)
        self._keep_alive.append(args)
        _TRANSLATE[op.name](self, operands)
        written = [a.storage for a in operands.accesses() if a.written]
        self._tables = [
            t
            for t in self._tables
            if all(s is not t.positions.storage and s is not t.inv_freq.storage for s in written)
        ]

    def finish(self) -> Tape:
        """The tape of everything added."""
        ops = (OpDesc * len(self._ops))(*self._ops)
        keep_alive = (*self._keep_alive, *self._tables)
        return Tape(ops, keep_alive, self._own_bytes, self._shared_bytes)

    def _append(self, kind: OpKind, rows_of: Buffer, accesses: Sequence[Access], args: OpArgs) -> None:
        barrier = any(new.conflicts(old) for new in accesses for old in self._since_barrier)
        if barrier:
            self._since_barrier.clear()
        self._since_barrier.extend(accesses)
        desc = OpDesc(kind, _EXTENTS[rows_of.extent], rows_of.shape[0], barrier)
        setattr(desc.args, kind.name.lower(), args)
        self._ops.append(desc)

    def embed(self, o: "_Operands") -> None:
        args = EmbedArgs(o.matrix("tokens"), o.matrix("out"), o.weight("table"), o.number("scale"))
        self._append(OpKind.EMBED, o.buffer("out"), o.accesses(), args)

    def rms_norm(self, o: "_Operands") -> None:
        weight = o.buffer("weight")
        args = RmsNormArgs(o.matrix("x"), o.matrix("out"), _address(weight), weight.shape[0], o.number("eps"))
        self._append(OpKind.RMS_NORM, o.buffer("out"), o.accesses(), args)

    def linear(self, o: "_Operands") -> None:
        self._linear(o, LinearMode.ACCUMULATE if o.args["accumulate"] else LinearMode.STORE)

    def gated_linear(self, o: "_Operands") -> None:
        self._linear(o, _GATES[str(o.args["activation"])])

    def _linear(self, o: "_Operands", mode: LinearMode) -> None:
        out, weight = o.buffer("out"), o.get("weight", Weight)
        needed = self._functions.lamina_linear_scratch_bytes(
            self._isa, out.shape[0], weight.in_features, weight.out_features
        )
        self._shared_bytes = max(self._shared_bytes, needed)
        args = LinearArgs(o.matrix("x"), o.matrix("out"), o.weight("weight"), mode)
        self._append(OpKind.LINEAR, out, [*o.accesses(), Access(_SCRATCH, 0, 1, True)], args)

    def route(self, o: "_Operands") -> None:
        of_selected = o.args["gating"] == "softmax_selected"
        matrices = (o.matrix(name) for name in ("x", "experts", "shares"))
        args = RouteArgs(*matrices, of_selected, bool(o.args["normalise"]), o.number("scale"))
        self._append(OpKind.ROUTE, o.buffer("x"), o.accesses(), args)

    def expert_gated_linear(self, o: "_Operands") -> None:
        self._experts(o, Matrix(), _GATES[str(o.args["activation"])])

    def expert_linear(self, o: "_Operands") -> None:
        self._experts(o, o.matrix("shares"), LinearMode.ACCUMULATE if o.args["accumulate"] else LinearMode.STORE)

    def _experts(self, o: "_Operands", shares: Matrix, mode: LinearMode) -> None:
        """Unlike a linear, it computes in the scratch of each thread."""
        out = o.buffer("out")
        args = ExpertArgs(o.matrix("x"), o.matrix("experts"), shares, o.matrix("out"), o.weight("weight"), mode)
        own = self._functions.lamina_experts_own_bytes(self._isa, ctypes.byref(args), out.shape[0])
        self._own_bytes = max(self._own_bytes, own)
        self._append(OpKind.EXPERTS, out, o.accesses(), args)

    def rope(self, o: "_Operands") -> None:
        x, table = o.buffer("x"), self._rope_table(o)
        pairs = o.buffer("inv_freq").shape[0]
        args = RopeArgs(o.matrix("x"), table.ctypes.data, pairs, o.integer("head_dim"), o.args["layout"] == "neox")
        columns = [_access(x, True), Access(table, 0, 1, False)]
        self._append(OpKind.ROPE, x, columns, args)

    def _rope_table(self, o: "_Operands") -> NDArray[np.float32]:
        """The table of this op: one that an earlier op made from the same positions and frequencies, or a new one."""
        x, positions, inv_freq = o.buffer("x"), o.buffer("positions"), o.buffer("inv_freq")
        magnitude = o.number("magnitude")
        for table in self._tables:
            same = table.positions is positions and table.inv_freq is inv_freq and table.magnitude == magnitude
            if same and len(table.values) >= x.shape[0]:
                return table.values
        values = np.empty((x.shape[0], 2, inv_freq.shape[0]), np.float32)
        self._tables.append(_RopeTable(positions, inv_freq, magnitude, values))
        self._keep_alive.append(values)
        args = RopeTableArgs(_matrix(positions), _address(inv_freq), values.ctypes.data, inv_freq.shape[0], magnitude)
        accesses = [_access(positions, False), _access(inv_freq, False), Access(values, 0, 1, True)]
        self._append(OpKind.ROPE_TABLE, x, accesses, args)
        return values

    def kv_write(self, o: "_Operands") -> None:
        args = KvWriteArgs(o.matrix("k"), o.matrix("v"), o.matrix("slots"), o.cache())
        self._append(OpKind.KV_WRITE, o.buffer("k"), o.accesses(), args)

    def attention(self, o: "_Operands") -> None:
        cache, q = o.get("cache", KvCache), o.buffer("q")
        group = q.num_columns // cache.key_dim // cache.num_kv_heads
        own = self._functions.lamina_attention_own_bytes(cache.key_dim, cache.value_dim)
        max_blocks = o.buffer("block_table").num_columns
        shared = self._functions.lamina_attention_shared_bytes(self._num_threads, group, cache.value_dim, max_blocks)
        self._own_bytes = max(self._own_bytes, own)
        self._shared_bytes = max(self._shared_bytes, shared)
        args = AttentionArgs(
            *(o.matrix(name) for name in ("q", "out", "positions", "row_starts", "block_table")),
            o.cache(),
            None if o.args["sinks"] is None else _address(o.buffer("sinks")),
            o.number("scale"),
            o.number("softcap"),
            o.integer("window"),
        )
        self._append(OpKind.ATTENTION, o.buffer("out"), [*o.accesses(), Access(_SCRATCH, 0, 1, True)], args)

    def add_rows(self, o: "_Operands") -> None:
        args = AddArgs(o.matrix("x"), o.matrix("y"), o.matrix("out"))
        self._append(OpKind.ADD, o.buffer("out"), o.accesses(), args)

    def softcap(self, o: "_Operands") -> None:
        self._append(OpKind.SOFTCAP, o.buffer("x"), o.accesses(), SoftcapArgs(o.matrix("x"), o.number("cap")))

    def gather_rows(self, o: "_Operands") -> None:
        args = GatherRowsArgs(o.matrix("x"), o.matrix("indices"), o.matrix("out"))
        self._append(OpKind.GATHER_ROWS, o.buffer("out"), o.accesses(), args)

    def argmax(self, o: "_Operands") -> None:
        self._append(OpKind.ARGMAX, o.buffer("out"), o.accesses(), ArgmaxArgs(o.matrix("x"), o.matrix("out")))

    def sample(self, o: "_Operands") -> None:
        own = self._functions.lamina_sample_own_bytes(o.buffer("x").num_columns)
        self._own_bytes = max(self._own_bytes, own)
        args = SampleArgs(o.matrix("x"), o.matrix("params"), o.matrix("out"))
        self._append(OpKind.SAMPLE, o.buffer("out"), o.accesses(), args)


_TRANSLATE: Mapping[str, Callable[[TapeBuilder, "_Operands"], None]] = {
    "embed": TapeBuilder.embed,
    "rms_norm": TapeBuilder.rms_norm,
    "linear": TapeBuilder.linear,
    "gated_linear": TapeBuilder.gated_linear,
    "route": TapeBuilder.route,
    "expert_gated_linear": TapeBuilder.expert_gated_linear,
    "expert_linear": TapeBuilder.expert_linear,
    "rope": TapeBuilder.rope,
    "kv_write": TapeBuilder.kv_write,
    "attention": TapeBuilder.attention,
    "add": TapeBuilder.add_rows,
    "softcap": TapeBuilder.softcap,
    "gather_rows": TapeBuilder.gather_rows,
    "argmax": TapeBuilder.argmax,
    "sample": TapeBuilder.sample,
}


class _Operands:
    """Typed access to the arguments of one launch."""

    def __init__(self, op: OpSpec, args: Args) -> None:
        self.op = op
        self.args = args

    def get(self, name: str, kind: type[T]) -> T:
        value = self.args[name]
        if not isinstance(value, kind):
            raise LaunchError(f"{self.op.name}: {name} must be {kind.__name__}, not {type(value).__name__}")
        return value

    def buffer(self, name: str) -> Buffer:
        return self.get(name, Buffer)

    def matrix(self, name: str) -> Matrix:
        return _matrix(self.get(name, Buffer))

    def number(self, name: str) -> float:
        return self.get(name, float)

    def integer(self, name: str) -> int:
        return self.get(name, int)

    def weight(self, name: str) -> int:
        storage = self.get(name, Weight).storage
        if not isinstance(storage, PackedWeight):
            raise LaunchError(f"{self.op.name}: {name} belongs to another backend")
        return ctypes.addressof(storage.desc)

    def cache(self) -> int:
        storage = self.get("cache", KvCache).storage
        if not isinstance(storage, CacheMemory):
            raise LaunchError(f"{self.op.name}: cache belongs to another backend")
        return ctypes.addressof(storage.desc)

    def accesses(self) -> list[Access]:
        """What the op reads and writes of buffers and caches; weights are never written."""
        found = []
        for name, value in self.args.items():
            if isinstance(value, Buffer):
                found.append(_access(value, self.op.args[name].written))
            elif isinstance(value, KvCache):
                found.append(Access(value.storage, 0, 1, self.op.args[name].written))
        return found


def _access(buffer: Buffer, written: bool) -> Access:
    begin = buffer.offset % buffer.row_stride
    return Access(buffer.storage, begin, begin + buffer.num_columns, written)


def _address(buffer: Buffer) -> int:
    if not isinstance(buffer.storage, np.ndarray):
        raise LaunchError("a buffer belongs to another backend")
    return int(buffer.storage.ctypes.data) + buffer.offset * buffer.dtype.itemsize


def _matrix(buffer: Buffer) -> Matrix:
    return Matrix(_address(buffer), buffer.row_stride, buffer.num_columns, buffer.shape[0])
