"""Linears, gated linears and embeddings as calls.

Few rows: int8 activations against packed units, float activations against dense rows, a launch or two for all parts.
Many rows: slices of the weight are decoded to 16 bits and multiplied by cuBLAS into `out`, or, where a gate follows,
into scratch.
"""

from collections.abc import Iterator

from lamina.kernels.buffer import Buffer, DType, Weight
from lamina.kernels.cuda.byte_linear import plan_byte_linear, shareable_norm
from lamina.kernels.cuda.device import Matrix, ProductCall
from lamina.kernels.cuda.planner import (
    BLOCK,
    BYTES,
    NO_TARGET,
    Form,
    Planner,
    Rows,
    address_of,
    ceil_div,
    memory_of,
)
from lamina.kernels.cuda.programs import program
from lamina.kernels.cuda.shared_norm import NormAfter
from lamina.kernels.cuda.weights import CudaWeight, DensePart, PackedPart, Part
from lamina.spec.quant import GgmlType

ACCUMULATE, GATED, GATE_SHIFT = 1, 2, 2  # Flags of linear.cuh and rows.cu
GATES = {"silu": 0, "gelu_tanh": 1, "swiglu_clamped": 2}  # Gate of common.cuh
DENSE_ROWS = 8
ELEMENTS = {GgmlType.F32: 0, GgmlType.F16: 1, GgmlType.BF16: 2}  # ELEMENT of dense.cu
_DENSE_DTYPES = {GgmlType.F32: DType.F32, GgmlType.F16: DType.F16, GgmlType.BF16: DType.BF16}
_TARGETS = {DType.F32: 0, DType.BF16: 2, DType.F16: 3}  # Target of dequantise.cu


def storage_of(weight: Weight) -> CudaWeight:
    if not isinstance(weight.storage, CudaWeight):
        raise TypeError("Weight belongs to another backend")
    return weight.storage


def plan_linear(planner: Planner, x: Buffer, weight: Weight, out: Buffer, accumulate: bool) -> NormAfter | None:
    """out = x @ weight^T + bias (+ out). Returns the norm that follows if that is taken care of as well."""
    stored, rows, flags = storage_of(weight), planner.rows_of(out), ACCUMULATE if accumulate else 0
    norm = shareable_norm(planner, stored, out, rows)
    if norm is None:
        _multiply(planner, x, weight, out, rows, flags)
        planner.wrote(out)
        return None
    form = planner.form_for(rows.capacity)
    planner.prepare(x, rows, form)
    packed = [part for part in stored.parts if isinstance(part, PackedPart)]
    plan_byte_linear(planner, stored, packed, out, rows, form, flags, norm)
    return norm


def plan_gated_linear(planner: Planner, x: Buffer, weight: Weight, out: Buffer, activation: str) -> None:
    """out = act(gate) * up, in the linear's own epilogue where gate and up are interleaved."""
    stored, rows = storage_of(weight), planner.rows_of(out)
    flags = GATED | GATES[activation] << GATE_SHIFT
    form = planner.form_for(rows.capacity)
    if stored.paired and form.kind == BYTES:
        _multiply(planner, x, weight, out, rows, flags)
        planner.wrote(out)
    elif stored.paired:
        _multiply_gated_slices(planner, x, weight, out, rows, flags)
    else:
        _gate_product(planner, x, weight, out, rows, flags)


def _multiply(planner: Planner, x: Buffer, weight: Weight, out: Buffer, rows: Rows, flags: int) -> None:
    stored, form = storage_of(weight), planner.form_for(rows.capacity)
    packed = [part for part in stored.parts if isinstance(part, PackedPart)]
    if packed:
        planner.prepare(x, rows, form)
    if form.kind == BYTES:
        for i in range(0, len(packed), 2):
            plan_byte_linear(planner, stored, packed[i : i + 2], out, rows, form, flags)
    for part in stored.parts:
        if isinstance(part, PackedPart) and form.kind == BYTES:
            continue
        # a product writes as many rows as it is launched for, which in a recording may be more than `out` has
        few = rows.capacity <= DENSE_ROWS or (rows.capacity <= planner.max_byte_rows and not planner.exact)
        if isinstance(part, DensePart) and few:
            _dense_linear(planner, stored, part, x, out, rows, flags)
        else:
            _multiply_slices(planner, stored, part, x, out, rows, flags)


# -- few rows


def _dense_linear(
    planner: Planner, stored: CudaWeight, part: DensePart, x: Buffer, out: Buffer, rows: Rows, flags: int
) -> None:
    columns = next((step for step in (1, 2, 4) if rows.capacity <= step), DENSE_ROWS)
    planner.call(
        program("dense.cu", "linear", ELEMENT=ELEMENTS[part.type], COLUMNS=columns),
        (ceil_div(part.rows, BLOCK // 32), ceil_div(rows.capacity, columns), 1),
        BLOCK,
        stored.address(part),
        part.stride,
        part.rows,
        address_of(x),
        x.row_stride,
        part.columns,
        stored.bias_address(part.first),
        address_of(out) + 4 * part.first,
        out.row_stride,
        flags,
        rows.count_address,
    )


# -- many rows


def _multiply_slices(
    planner: Planner, stored: CudaWeight, part: Part, x: Buffer, out: Buffer, rows: Rows, flags: int
) -> None:
    """Products of decoded slices straight into `out`; the bias is added after."""
    for start, count, decoded in _decoded_slices(planner, stored, part):
        left = _left_operand(planner, x, rows, decoded.dtype)
        offset = 4 * (out.offset + part.first + start)
        # an interleaved slice is half of the first part's rows and half of the second's
        pieces = [(0, offset, count)]
        if isinstance(part, PackedPart) and part.half:
            pieces = [(0, offset, count // 2), (count // 2, offset + 4 * part.half, count // 2)]
        for first, at, num_rows in pieces:
            weight = _row_range(decoded, first, num_rows)
            target = Matrix(memory_of(out), at, rows.capacity, num_rows, out.row_stride, DType.F32)
            planner.sink(ProductCall(left, weight, target, bool(flags & ACCUMULATE)))
    bias = stored.bias_address(part.first)
    if bias:
        at = address_of(out) + 4 * part.first
        _finish(planner, at, out.row_stride, bias, at, out.row_stride, part.rows, 0, 0, rows, NO_TARGET)


def _multiply_gated_slices(planner: Planner, x: Buffer, weight: Weight, out: Buffer, rows: Rows, flags: int) -> None:
    """Interleaved gate and up: products of decoded slices into scratch, gated into `out`."""
    stored = storage_of(weight)
    part = stored.parts[0]
    if not isinstance(part, PackedPart):
        raise TypeError("only packed parts are interleaved")
    planner.prepare(x, rows, planner.form_for(rows.capacity))
    bias = stored.bias_address(part.first)
    for start, count, decoded in _decoded_slices(planner, stored, part):
        half = count // 2
        product = planner.workspace.region("product", 4 * rows.capacity * count)
        left = _left_operand(planner, x, rows, decoded.dtype)
        planner.sink(ProductCall(left, decoded, Matrix(product, 0, rows.capacity, count, count, DType.F32), False))
        planner.wrote(out)
        target = planner.offer(out, rows, halves_only=True) if count == part.rows else NO_TARGET
        if bias:  # the two halves of the bias stand further apart than those of the product
            for h in range(2):
                at = product.address + 4 * half * h
                _finish(planner, at, count, bias + 4 * (start + h * part.half), at, count, half, 0, 0, rows, NO_TARGET)
        to = address_of(out) + 4 * start
        _finish(planner, product.address, count, 0, to, out.row_stride, half, half, flags, rows, target)


def _gate_product(planner: Planner, x: Buffer, weight: Weight, out: Buffer, rows: Rows, flags: int) -> None:
    """Gate and up of any types: both into scratch, then gated."""
    columns = weight.out_features
    memory = planner.workspace.region("product", 4 * rows.capacity * columns)
    product = Buffer((rows.capacity, columns), DType.F32, out.extent, memory, columns)
    _multiply(planner, x, weight, product, rows, 0)
    planner.wrote(out)
    target = planner.offer(out, rows)
    half = out.num_columns
    _finish(planner, memory.address, columns, 0, address_of(out), out.row_stride, half, half, flags, rows, target)


def _finish(
    planner: Planner,
    product: int,
    product_stride: int,
    bias: int,
    out: int,
    out_stride: int,
    columns: int,
    half: int,
    flags: int,
    rows: Rows,
    target: tuple[int, ...],
) -> None:
    grid = (ceil_div(ceil_div(columns, 128) * 32, BLOCK), rows.capacity, 1)
    args = (product, product_stride, bias, out, out_stride, columns, half, flags, rows.count_address)
    planner.call(program("rows.cu", "finish"), grid, BLOCK, *args, *target)


def _left_operand(planner: Planner, x: Buffer, rows: Rows, dtype: DType) -> Matrix:
    """x in the dtype of the decoded weight."""
    if dtype is DType.F32:
        return Matrix(memory_of(x), 4 * x.offset, rows.capacity, x.num_columns, x.row_stride, DType.F32)
    planner.prepare(x, rows, Form(planner.half_kind, 0))
    return planner.activation_matrix(x, rows)


def _row_range(matrix: Matrix, first: int, num_rows: int) -> Matrix:
    itemsize = matrix.dtype.itemsize
    offset = matrix.offset + first * matrix.stride * itemsize
    return Matrix(matrix.memory, offset, num_rows, matrix.columns, matrix.stride, matrix.dtype)


def _decoded_slices(planner: Planner, stored: CudaWeight, part: Part) -> Iterator[tuple[int, int, Matrix]]:
    """(first row, rows, matrix) of slices of a part as cuBLAS takes them, all in the same scratch: use one, then go on.

    Of an interleaved part, `first row` counts within each half and the matrix holds the rows of both, one after the
    other.
    """
    compute = planner.compute
    if isinstance(part, DensePart) and part.type in (
        GgmlType.F32,
        *(t for t, d in _DENSE_DTYPES.items() if d is compute),
    ):
        dtype = _DENSE_DTYPES[part.type]
        yield 0, part.rows, Matrix(stored.memory, part.offset, part.rows, part.columns, part.stride, dtype)
        return
    unit = 16 if isinstance(part, PackedPart) else 1
    total = part.num_groups if isinstance(part, PackedPart) else part.rows
    row_bytes = part.columns * compute.itemsize
    step = max(1, planner.slice_bytes // (row_bytes * unit))
    memory = planner.workspace.region("slice", min(step, total) * unit * row_bytes)
    for start in range(0, total, step):
        count = min(step, total - start)
        if isinstance(part, PackedPart):
            first, num_rows = _decode_packed(planner, stored, part, memory.address, start, count)
        else:
            first, num_rows = start, count
            grid = (ceil_div(part.columns, BLOCK), count, 1)
            args = (stored.address(part), part.stride, memory.address, start, part.columns, _TARGETS[compute])
            planner.call(program("dense.cu", "convert", ELEMENT=ELEMENTS[part.type]), grid, BLOCK, *args)
        yield first, num_rows, Matrix(memory, 0, num_rows, part.columns, part.columns, compute)


def _decode_packed(
    planner: Planner, stored: CudaWeight, part: PackedPart, to: int, first_group: int, num_groups: int
) -> tuple[int, int]:
    """Launch the decoding of groups; (first row, rows) as `_decoded_slices` yields them."""
    units = part.format.num_units(part.columns)
    grid = (ceil_div(num_groups * units, BLOCK // 32), 1, 1)
    args = (stored.address(part), to, first_group, num_groups, part.rows, part.half, part.num_chunks, part.columns)
    entry = program("dequantise.cu", "dequantise", FORMAT=part.format.name)
    planner.call(entry, grid, BLOCK, *args, _TARGETS[planner.compute])
    if part.half:
        first = first_group * 8
        return first, 2 * min(part.half - first, num_groups * 8)
    first = first_group * 16
    return first, min(part.rows - first, num_groups * 16)


# -- embeddings


def plan_embed(planner: Planner, tokens: Buffer, table: Weight, out: Buffer, scale: float) -> None:
    """Rows of the table straight from packed storage."""
    stored, rows = storage_of(table), planner.rows_of(out)
    for part in stored.parts:
        common = (address_of(tokens), rows.count_address, address_of(out), out.row_stride, part.first, part.rows)
        if isinstance(part, PackedPart):
            units = part.format.num_units(part.columns)
            sizes = (part.half, table.out_features, part.num_chunks, part.columns)
            entry = program("dequantise.cu", "embed", FORMAT=part.format.name)
            planner.call(entry, (units, rows.capacity, 1), 32, stored.address(part), *common, *sizes, scale)
        else:
            entry = program("dense.cu", "embed", ELEMENT=ELEMENTS[part.type])
            grid = (ceil_div(part.columns, BLOCK), rows.capacity, 1)
            at = (stored.address(part), part.stride)
            planner.call(entry, grid, BLOCK, *at, *common, table.out_features, part.columns, scale)
    planner.wrote(out)
