"""The ops of a mixture of experts as calls. No count of rows per expert is ever known to the host.

Few rows: each pair of a row and a rank is a product of its own, which reads its expert's id on the device. Many rows:
pairs are sorted by expert on the device and multiplied in tiles; grids are for the worst case, blocks without a tile
end at once. A row's experts are always added up in order of id. Scratch is the region that decoded slices of weights
use otherwise, at most as much as `slice_bytes` allows; `experts_regions` reserves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.kernels.buffer import Buffer, DType, ExpertLimits, Weight
from lamina.kernels.cuda import linear_plan
from lamina.kernels.cuda.byte_linear import DP4A_BOUNDS, ROW_BOUNDS, ROWS_BOUNDS
from lamina.kernels.cuda.linear_plan import GATES, storage_of
from lamina.kernels.cuda.planner import BLOCK, BYTES, Planner, Rows, address_of, ceil_div
from lamina.kernels.cuda.programs import program
from lamina.kernels.cuda.weights import CudaWeight, DensePart, PackedPart, activation_chunks
from lamina.kernels.ops import LEAST_SHARE_SUM, LaunchError
from lamina.spec.quant import GgmlType

_FEW_ROWS = 8
_ROUTE_THREADS = 128
_BIN_THREADS = 1024
_MAX_GRID_Y = 65535
_DENSE_ROWS = 8  # weight rows of a block


@dataclass(frozen=True, slots=True)
class Matrices:
    """One matrix of each expert; `part` is that of expert 0, or what it lies in."""

    part: PackedPart | DensePart
    args: tuple[int, ...]  # the Matrices struct of experts.cuh

    @property
    def rows(self) -> int:
        return self.args[4]

    @property
    def num_groups(self) -> int:
        return ceil_div(self.rows, 16)


@dataclass(frozen=True, slots=True)
class Selection:
    """Experts and shares of each row, as ops name them."""

    experts: Buffer
    shares: Buffer | None
    num_experts: int
    rows: Rows

    @property
    def k(self) -> int:
        return self.experts.num_columns

    @property
    def args(self) -> tuple[int, ...]:
        """The Selection struct of experts.cuh."""
        shares, stride = (0, 0) if self.shares is None else (address_of(self.shares), self.shares.row_stride)
        return (address_of(self.experts), shares, self.experts.row_stride, stride, self.k, self.rows.count_address)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Some rows of a step and the scratch for their pairs; addresses on the device."""

    first_row: int
    num_rows: int
    width: int  # positions of a tile
    num_slots: int
    max_tiles: int
    codes: int
    scales: int
    table: int
    num_tiles: int
    pairs: int
    positions: int
    products: int

    @property
    def tiles(self) -> tuple[int, int, int]:
        """The Tiles struct of expert_rows.cu."""
        return (self.table, self.num_tiles, self.pairs)


def matrices_of(weight: Weight, index: int, per_expert: int) -> Matrices:
    """Matrix `index` of each expert of a weight with `per_expert` equal parts an expert."""
    stored, part_rows = storage_of(weight), weight.part_rows[0]
    count = len(weight.part_rows)
    part, first = _place(stored, index * part_rows)
    _, second = _place(stored, (index + per_expert) % count * part_rows)
    last_part, last = _place(stored, (count - per_expert + index) * part_rows)
    step = second - first if count > per_expert else 0
    if last != first + (count // per_expert - 1) * step or _kind(last_part) is not _kind(part):
        raise LaunchError("cuda: matrices of experts must be of one type")
    bias_step = per_expert * part_rows
    return Matrices(part, (first, stored.bias_address(index * part_rows), step, bias_step, part_rows))


def _place(stored: CudaWeight, row: int) -> tuple[PackedPart | DensePart, int]:
    """The part that holds a row of the stacked weight, and the row's address."""
    part = next(part for part in stored.parts if part.first <= row < part.first + part.rows)
    within = row - part.first
    if isinstance(part, DensePart):
        return part, stored.address(part) + within * part.stride * part.itemsize
    return part, stored.address(part) + within // 16 * part.format.group_bytes(part.columns)


def _kind(part: PackedPart | DensePart) -> GgmlType:
    return part.format.type if isinstance(part, PackedPart) else part.type


def experts_regions(sizes: Mapping[str, int], limits: ExpertLimits, max_rows: int, most_bytes: int) -> dict[str, int]:
    """`sizes` with what these experts need for steps of up to so many rows; slices of rows stay below `most_bytes`."""
    needed = 0
    rows_at_once = min(max_rows, max(1, _MAX_GRID_Y // limits.num_selected))
    for columns, product_columns in ((limits.hidden, 0), (limits.intermediate, limits.hidden)):
        one, all_of_them = (
            sum(_region_bytes(limits.num_experts, rows * limits.num_selected, columns, product_columns, True))
            for rows in (1, rows_at_once)
        )
        needed = max(needed, min(all_of_them, max(one, most_bytes)))
    found = {**sizes, "slice": max(sizes.get("slice", 0), needed)}
    if limits.num_experts == 2:  # interleaved: see _sum_of_both
        found["products"] = 4 * limits.num_selected * max_rows * 2 * limits.hidden
    return found


# -- the router


def plan_route(
    planner: Planner, x: Buffer, experts: Buffer, shares: Buffer, gating: str, normalise: bool, scale: float
) -> None:
    """The k largest logits of each row and their softmax."""
    rows = planner.rows_of(experts)
    chosen = (address_of(experts), experts.row_stride, address_of(shares), shares.row_stride, experts.num_columns)
    rule = (int(gating == "softmax_selected"), int(normalise), scale, LEAST_SHARE_SUM)
    logits = (address_of(x), x.row_stride, x.num_columns)
    entry = program("experts.cu", "route")
    planner.call(entry, (rows.capacity, 1, 1), _ROUTE_THREADS, *logits, *chosen, *rule, rows.count_address)
    planner.wrote(experts)
    planner.wrote(shares)


# -- gated


def plan_expert_gated(
    planner: Planner, x: Buffer, experts: Buffer, weight: Weight, out: Buffer, activation: str
) -> None:
    """Each row by gate and up of each of its experts."""
    if storage_of(weight).paired:  # a single expert, which every row has
        linear_plan.plan_gated_linear(planner, x, weight, out, activation)
        return
    gate, up = (matrices_of(weight, index, 2) for index in range(2))
    chosen = Selection(experts, None, len(weight.part_rows) // 2, planner.rows_of(out))
    if isinstance(gate.part, DensePart) and isinstance(up.part, DensePart):
        _dense_gated(planner, x, gate, up, chosen, out, GATES[activation])
    elif isinstance(gate.part, PackedPart) and isinstance(up.part, PackedPart):
        _packed_gated(planner, x, gate, up, chosen, out, GATES[activation])
    else:
        raise LaunchError("cuda: gate and up of experts must both be quantised, or both be float")
    planner.wrote(out)


def _dense_gated(
    planner: Planner, x: Buffer, gate: Matrices, up: Matrices, chosen: Selection, out: Buffer, kind: int
) -> None:
    elements = [linear_plan.ELEMENTS[_kind(matrices.part)] for matrices in (gate, up)]
    stride = gate.part.stride if isinstance(gate.part, DensePart) else 0
    operands = (address_of(x), x.row_stride, x.num_columns, address_of(out), out.row_stride, kind)
    grid = (chosen.rows.capacity * chosen.k, ceil_div(gate.rows, _DENSE_ROWS), 1)
    entry = program("expert_dense.cu", "expert_gated")
    planner.call(entry, grid, BLOCK, *gate.args, *up.args, *chosen.args, *elements, stride, *operands)


def _packed_gated(
    planner: Planner, x: Buffer, gate: Matrices, up: Matrices, chosen: Selection, out: Buffer, kind: int
) -> None:
    formats, rows = _formats(gate, up), chosen.rows
    to = (address_of(out), out.row_stride, kind)
    if rows.capacity <= _FEW_ROWS:
        form = planner.form_for(rows.capacity)
        planner.prepare(x, rows, form)
        codes, scales, *_ = planner.target(rows, x.num_columns, form)
        inputs = (codes, scales, form.slots, _chunks(gate))
        _gated_rows(planner, gate, up, chosen, inputs, (*to, 0, 0), rows.capacity)
        return
    for part in _slices(planner, chosen, x.num_columns, 0):
        _prepare(planner, x, x.num_columns, chosen, part, by_rank=False)
        inputs = (part.codes, part.scales, part.num_slots, _chunks(gate))
        if not planner.has_byte_mma:
            _gated_rows(planner, gate, up, chosen, inputs, (*to, 1, part.first_row), part.num_rows)
            continue
        bounds = ROWS_BOUNDS[part.width]
        each = min(bounds[0] // 2, ceil_div(_chunks(gate), 4))
        entry = program("expert_rows.cu", "expert_gated", COLUMN_TILES=part.width // 8, **formats, **_limits(bounds))
        args = (*gate.args, *up.args, *part.tiles, *inputs, *to, chosen.k, part.first_row)
        planner.call(entry, (gate.num_groups, part.max_tiles, 1), 64 * each, *args)


def _gated_rows(
    planner: Planner,
    gate: Matrices,
    up: Matrices,
    chosen: Selection,
    inputs: tuple[int, ...],
    to: tuple[int, ...],
    num_rows: int,
) -> None:
    """A product for each pair of so many rows."""
    defines, bounds = _row_kernel(planner, gate, up)
    each = min(bounds[0] // 2, ceil_div(_chunks(gate), 4))
    entry = program("expert_row.cu", "expert_gated", **defines)
    grid = (gate.num_groups, num_rows * chosen.k, 1)
    planner.call(entry, grid, 64 * each, *gate.args, *up.args, *chosen.args, *inputs, *to)


# -- down


def plan_expert_linear(
    planner: Planner, x: Buffer, experts: Buffer, shares: Buffer, weight: Weight, out: Buffer, accumulate: bool
) -> None:
    """The share-weighted sum of a row's experts, each of its own vector."""
    chosen = Selection(experts, shares, len(weight.part_rows), planner.rows_of(out))
    if storage_of(weight).paired:
        _sum_of_both(planner, x, weight, chosen, out, accumulate)
        planner.wrote(out)
        return
    down = matrices_of(weight, 0, 1)
    to = (address_of(out), out.row_stride, int(accumulate))
    if isinstance(down.part, DensePart):
        grid = (ceil_div(down.rows, _DENSE_ROWS), chosen.rows.capacity, 1)
        entry = program("expert_dense.cu", "expert_linear")
        operands = (linear_plan.ELEMENTS[down.part.type], down.part.stride, address_of(x), x.row_stride)
        planner.call(entry, grid, BLOCK, *down.args, *chosen.args, *operands, weight.in_features, *to)
    else:
        _packed_linear(planner, x, weight.in_features, down, chosen, to)
    planner.wrote(out)


def _packed_linear(
    planner: Planner, x: Buffer, columns: int, down: Matrices, chosen: Selection, to: tuple[int, ...]
) -> None:
    formats = _formats(down)
    by_pair = chosen.rows.capacity <= _FEW_ROWS or not planner.has_byte_mma
    for part in _slices(planner, chosen, columns, down.rows, sorts=not by_pair):
        _prepare(planner, x, columns, chosen, part, by_rank=True)
        inputs = (part.codes, part.scales, part.num_slots, _chunks(down))
        if by_pair:
            defines, bounds = _row_kernel(planner, down)
            each = min(bounds[0], ceil_div(_chunks(down), 4))
            threads = 32 * each * max(1, min(chosen.k, bounds[0] // each))
            args = (*down.args, *chosen.args, *inputs, *to, each, part.first_row)
            entry = program("expert_row.cu", "expert_linear", **defines)
            planner.call(entry, (down.num_groups, part.num_rows, 1), threads, *args)
            continue
        bounds = ROWS_BOUNDS[part.width]
        warps = min(bounds[0], ceil_div(_chunks(down), 4))
        entry = program("expert_rows.cu", "expert_linear", COLUMN_TILES=part.width // 8, **formats, **_limits(bounds))
        grid = (down.num_groups, part.max_tiles, 1)
        planner.call(entry, grid, 32 * warps, *down.args, *part.tiles, *inputs, part.products)
        _combine(planner, (part.products, part.positions, 0, 0, 0), down.args, chosen, to, part)


def _sum_of_both(planner: Planner, x: Buffer, weight: Weight, chosen: Selection, out: Buffer, accumulate: bool) -> None:
    """Two experts whose rows are interleaved: both for every rank, of which the sum takes one."""
    capacity, columns = chosen.rows.capacity, weight.out_features
    memory = planner.workspace.region("products", 4 * chosen.k * capacity * columns)
    for rank in range(chosen.k):
        vectors = x.columns(rank * weight.in_features, (rank + 1) * weight.in_features)
        offset = rank * capacity * columns
        product = Buffer((capacity, columns), DType.F32, out.extent, memory, columns, offset)
        linear_plan.plan_linear(planner, vectors, weight, product, False)
    half = columns // 2
    steps = (columns, capacity * columns, half)
    whole = _Slice(0, capacity, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    to = (address_of(out), out.row_stride, int(accumulate))
    _combine(planner, (memory.address, 0, *steps), (0, 0, 0, 0, half), chosen, to, whole)


def _combine(
    planner: Planner,
    products: tuple[int, ...],
    down: tuple[int, ...],
    chosen: Selection,
    to: tuple[int, ...],
    part: _Slice,
) -> None:
    grid = (ceil_div(down[4], BLOCK), part.num_rows, 1)
    entry = program("experts.cu", "combine")
    planner.call(entry, grid, BLOCK, *products, *down, *chosen.args, *to, part.first_row)


# -- what both need


def _prepare(planner: Planner, x: Buffer, columns: int, chosen: Selection, part: _Slice, *, by_rank: bool) -> None:
    """Sort the pairs of a slice, if tiles are wanted, and round their activations."""
    if part.positions:
        entry = program("experts.cu", "bin")
        sizes = (chosen.num_experts, part.first_row, part.num_rows, part.width)
        where = (part.table, part.num_tiles, part.pairs, part.positions)
        shared_bytes = 8 * chosen.num_experts
        planner.call(entry, (1, 1, 1), _BIN_THREADS, *chosen.args, *sizes, *where, shared_bytes=shared_bytes)
    target = (part.codes, part.scales, 0, part.num_slots, columns, BYTES)
    grid = (ceil_div(ceil_div(columns, 128) * 32, BLOCK), part.num_rows * chosen.k, 1)
    rule = (int(by_rank), chosen.k, part.first_row, part.positions, chosen.rows.count_address)
    planner.call(program("experts.cu", "prepare_pairs"), grid, BLOCK, address_of(x), x.row_stride, *rule, *target)


def _slices(
    planner: Planner, chosen: Selection, columns: int, product_columns: int, *, sorts: bool | None = None
) -> list[_Slice]:
    """The step's rows in slices whose pairs fit into the scratch, with `product_columns` floats a pair if sorted."""
    sorts = planner.has_byte_mma if sorts is None else sorts
    capacity = chosen.rows.capacity
    num_rows = min(capacity, max(1, _MAX_GRID_Y // chosen.k))
    sizes = _region_bytes(chosen.num_experts, num_rows * chosen.k, columns, product_columns, sorts)
    while num_rows > 1 and sum(sizes) > planner.slice_bytes:
        num_rows = ceil_div(num_rows, 2)
        sizes = _region_bytes(chosen.num_experts, num_rows * chosen.k, columns, product_columns, sorts)
    address = planner.workspace.region("slice", sum(sizes)).address
    places = [address + sum(sizes[:i]) for i in range(len(sizes))]
    num_pairs = num_rows * chosen.k
    width = next(w for w in (8, 16, 32, 64) if w == 64 or w * chosen.num_experts >= num_pairs)
    num_tiles = num_pairs // width + min(chosen.num_experts, num_pairs)
    slots = _num_slots(chosen.num_experts, num_pairs, sorts)
    tables = places[2:] if sorts else [0] * 5
    return [
        _Slice(first, min(num_rows, capacity - first), width, slots, num_tiles, places[0], places[1], *tables)
        for first in range(0, capacity, num_rows)
    ]


def _num_slots(num_experts: int, num_pairs: int, sorts: bool) -> int:
    """Positions, where each expert's start at a multiple of 8, and a tile's width beyond the last."""
    return num_pairs + 8 * min(num_experts, num_pairs) + 64 if sorts else num_pairs


def _region_bytes(num_experts: int, num_pairs: int, columns: int, product_columns: int, sorts: bool) -> tuple[int, ...]:
    """Bytes of codes, scales, table, number of tiles, pairs, positions and products, each a multiple of 256."""
    slots = _num_slots(num_experts, num_pairs, sorts)
    chunks = ceil_div(activation_chunks(columns), 4) * 4
    tables = (12 * (num_pairs // 8 + min(num_experts, num_pairs)), 4, 4 * slots, 4 * num_pairs)
    sizes = (64 * chunks * slots, 16 * chunks * slots, *tables, 4 * product_columns * slots)
    return tuple(ceil_div(size, 256) * 256 for size in (sizes if sorts else sizes[:2]))


def _chunks(matrices: Matrices) -> int:
    """Chunks of activations that a packed matrix spans."""
    if not isinstance(matrices.part, PackedPart):
        raise TypeError("a float matrix has no chunks")
    return matrices.part.num_chunks


def _formats(*parts: Matrices) -> dict[str, str | int]:
    names = [matrices.part.format.name for matrices in parts if isinstance(matrices.part, PackedPart)]
    defines: dict[str, str | int] = {"FORMAT": names[0]}
    return defines | ({"FORMAT_B": names[1]} if names[-1] != names[0] else {})


def _row_kernel(planner: Planner, *parts: Matrices) -> tuple[dict[str, str | int], tuple[int, int]]:
    """Definitions and bounds of expert_row.cu."""
    needs_dp4a = not planner.has_byte_mma or any(_kind(matrices.part) is GgmlType.Q2_K for matrices in parts)
    bounds = (DP4A_BOUNDS[0] // 2, 2) if needs_dp4a else ROW_BOUNDS
    return _formats(*parts) | {"USES_DP4A": int(needs_dp4a)} | _limits(bounds), bounds


def _limits(bounds: tuple[int, int]) -> dict[str, str | int]:
    return {"MAX_WARPS": bounds[0], "MIN_BLOCKS": bounds[1]}
