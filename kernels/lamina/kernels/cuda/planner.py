"""From ops to calls: which kernels an op becomes at a step shape, with their grids and arguments.

Owns the workspace and what is known between ops: activations already prepared for the next linear, and rotations not
yet launched, which join the cache write that follows them. Calls go to a sink: the device itself, or a list to capture.
Row counts are passed as addresses, so that a captured call serves every step of its bucket. One compute thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lamina.kernels.buffer import Buffer, DType, Extent, StepShape
from lamina.kernels.cuda.device import Call, Device, KernelCall, Matrix, Memory
from lamina.kernels.cuda.policy import BYTE_MMA, compute_dtype
from lamina.kernels.cuda.programs import Program, program
from lamina.kernels.cuda.shared_norm import Launches, NormAfter
from lamina.kernels.cuda.weights import activation_chunks
from lamina.kernels.cuda.workspace import MAX_BYTE_ROWS, Workspace, slice_bytes

NONE, BYTES, BF16S, F16S = 0, 1, 2, 3  # ActivationKind of common.cuh
_HALF_KINDS = {DType.BF16: BF16S, DType.F16: F16S, DType.F32: NONE}
_COUNT_INDEX = {Extent.ROWS: 0, Extent.SEQS: 1, Extent.LOGIT_ROWS: 2}
NO_TARGET = (0, 0, 0, 0, 0, NONE)
NO_NORM = (0, 0, 0, 0.0)  # NormBefore of linear_row.cu
BLOCK = 256


@dataclass(frozen=True, slots=True)
class Form:
    """How linears of a step read their activations; `slots` rows are interleaved in BYTES."""

    kind: int
    slots: int


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows a call is launched for, and where the device finds how many there really are."""

    capacity: int
    count_address: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What the activation regions hold: these columns of this memory."""

    memory: Memory
    offset: int
    columns: int
    count_address: int
    form: Form
    codes: int = field(default=0, compare=False)
    scales: int = field(default=0, compare=False)
    norm: tuple[int | float, ...] = field(default=NO_NORM, compare=False)  # yet to be applied


def address_of(buffer: Buffer) -> int:
    """Device address of a buffer's (or view's) first element."""
    return memory_of(buffer).address + buffer.offset * buffer.dtype.itemsize


def memory_of(buffer: Buffer) -> Memory:
    storage = buffer.storage
    if not isinstance(storage, Memory):
        raise TypeError(f"Buffer of {buffer.shape} belongs to another backend")
    return storage


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Planner:
    """See the module docstring."""

    def __init__(self, device: Device, compute: DType | None = None) -> None:
        self.device = device
        self.set_compute(compute or compute_dtype(device.compute_capability))
        self.workspace = Workspace(device)
        self.sink: Callable[[Call], None] = device.run
        self.shape = StepShape(0, 0, 0)  # sizes that calls are launched for
        self.exact = True  # whether `shape` is the very step, not the capacity of a recording
        self.one_row_each = False  # whether every sequence has at most a row or so: pure decode
        self.has_byte_mma = device.compute_capability >= BYTE_MMA
        self.slice_bytes = slice_bytes(device.memory_bytes()[1])
        self.following: Launches = ()  # the ops after the one being planned, as far as they are known
        self._side = 0  # codes alternate between two memories: who prepares the next may still read the last

    def set_compute(self, dtype: DType) -> None:
        """What products by cuBLAS multiply in from now on."""
        self.compute, self.half_kind = dtype, _HALF_KINDS[dtype]
        self._prepared: _Prepared | None = None

    # -- calls

    def call(
        self, entry: Program, grid: tuple[int, int, int], num_threads: int, *args: int | float, shared_bytes: int = 0
    ) -> None:
        """Send one kernel call to the sink."""
        self.sink(KernelCall(entry, grid, num_threads, args, shared_bytes))

    def rows_of(self, buffer: Buffer) -> Rows:
        """The rows in force for a buffer of this extent."""
        if buffer.extent is Extent.FIXED:
            return Rows(buffer.shape[0], self.workspace.constant(buffer.shape[0]))
        capacity = self.shape.rows_in_force(buffer.extent, 0)
        return Rows(capacity, self.counts_address() + 4 * _COUNT_INDEX[buffer.extent])

    def counts_address(self) -> int:
        """Where the device keeps (num_rows, num_seqs, num_logit_rows)."""
        return self.workspace.region("counts", 16).address

    def write_counts(self, shape: StepShape) -> None:
        """Tell the device the sizes of the steps that follow."""
        entry = program("rows.cu", "set_shape")
        counts = (shape.num_rows, shape.num_seqs, shape.num_logit_rows)
        self.device.run(KernelCall(entry, (1, 1, 1), 32, (self.counts_address(), *counts)))

    # -- activations

    def forget(self) -> None:
        """What buffers hold may have changed behind the planner's back."""
        self._prepared = None

    def wrote(self, buffer: Buffer) -> None:
        """An op of this step has written to this buffer's memory."""
        if self._prepared is not None and self._prepared.memory is memory_of(buffer):
            self._prepared = None

    @property
    def max_byte_rows(self) -> int:
        """Rows up to which linears on packed weights need no cuBLAS."""
        return MAX_BYTE_ROWS if self.has_byte_mma else 8

    def form_for(self, num_rows: int) -> Form:
        """int8 codes for few rows (the weights' bytes decide), 16 bits for cuBLAS beyond."""
        steps = (1, 8, 16, 32, 64) if self.has_byte_mma else (1, 2, 4, 8)
        for slots in steps:
            if num_rows <= slots:
                return Form(BYTES, slots)
        return Form(self.half_kind, 0)

    def target(self, rows: Rows, columns: int, form: Form) -> tuple[int, ...]:
        """The Activations argument that makes a kernel prepare `columns` columns in this form."""
        codes = scales = halves = 0
        if form.kind == BYTES:
            chunks = ceil_div(activation_chunks(columns), 4) * 4
            codes = self.workspace.region(f"codes.{self._side}", MAX_BYTE_ROWS * chunks * 64).address
            scales = self.workspace.region(f"scales.{self._side}", MAX_BYTE_ROWS * chunks * 16).address
        elif form.kind != NONE:
            halves = self.workspace.region("halves", 2 * rows.capacity * columns).address
        return (codes, scales, halves, form.slots, columns, form.kind)

    def offer(self, out: Buffer, rows: Rows, *, halves_only: bool = False) -> tuple[int, ...]:
        """For an op that writes `out` and can prepare it in passing: the target, remembered for the linear to come."""
        form = self.form_for(rows.capacity)
        # whole chunks only: what is left of a chunk would have to be zeroed by somebody
        if form.kind == NONE or (form.kind == BYTES and (halves_only or out.num_columns % 64)):
            return NO_TARGET
        self._side ^= 1
        target = self.target(rows, out.num_columns, form)
        codes, scales, *_ = target
        where = (memory_of(out), out.offset, out.num_columns, rows.count_address)
        self._prepared = _Prepared(*where, form, codes, scales)
        return target

    def offer_norm(self, norm: NormAfter, rows: Rows) -> tuple[int, ...]:
        """For a product of one row that does its share of a norm: NormAfter of linear_row.cu."""
        columns = norm.out.num_columns
        target = self.offer(norm.out, rows)
        squares = self.workspace.region(f"squares.{self._side}", columns // 8).address
        if self._prepared is not None:
            self._prepared = replace(self._prepared, norm=(squares, columns // 32, columns, norm.eps))
        return (*target, address_of(norm.gain), squares)

    def activations(self) -> tuple[int, int, tuple[int | float, ...]]:
        """Addresses of the codes and scales that were prepared last, and the norm that their reader has to apply."""
        if self._prepared is None:
            raise RuntimeError("no activations are prepared")
        return self._prepared.codes, self._prepared.scales, self._prepared.norm

    def prepare(self, x: Buffer, rows: Rows, form: Form) -> None:
        """Have the activation regions hold x in this form."""
        wanted = _Prepared(memory_of(x), x.offset, x.num_columns, rows.count_address, form)
        if self._prepared == wanted or form.kind == NONE:
            return
        self._side ^= 1
        target = self.target(rows, x.num_columns, form)
        blocks = ceil_div(ceil_div(x.num_columns, 128) * 32, BLOCK)
        grid = (blocks, rows.capacity, 1)
        self.call(program("rows.cu", "prepare"), grid, BLOCK, address_of(x), x.row_stride, rows.count_address, *target)
        self._prepared = replace(wanted, codes=target[0], scales=target[1])

    def activation_matrix(self, x: Buffer, rows: Rows) -> Matrix:
        """x as the left operand of a matrix product, in the form that `prepare` made."""
        if self.compute is DType.F32:
            return Matrix(memory_of(x), 4 * x.offset, rows.capacity, x.num_columns, x.row_stride, DType.F32)
        memory = self.workspace.region("halves", 2 * rows.capacity * x.num_columns)
        return Matrix(memory, 0, rows.capacity, x.num_columns, x.num_columns, self.compute)
