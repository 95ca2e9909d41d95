"""Products of few rows by packed weights as calls: int8 activations, a launch for one or two parts.

Of one row, a product may also do its share of the norm that follows (`shared_norm`).
"""

from lamina.kernels.buffer import Buffer
from lamina.kernels.cuda.planner import NO_TARGET, Form, Planner, Rows, address_of, ceil_div
from lamina.kernels.cuda.programs import program
from lamina.kernels.cuda.shared_norm import NormAfter, norm_after
from lamina.kernels.cuda.weights import CudaWeight, PackedPart
from lamina.spec.quant import GgmlType

_NO_PART = (0, 0, 0, 0, 0, 0)
_NO_NORM_AFTER = (*NO_TARGET, 0, 0)

# Launch bounds of the kernels on packed weights: most warps of a block, blocks that registers must suffice for.
# Chosen by the compiler's register counts and by measurement on an H200; see benchmarks/cuda_backend.py.
ROW_BOUNDS = (14, 2)
_ROW_BOUNDS_OF_SMALL = (12, 2)  # more registers, where the card holds all blocks at once even so
DP4A_BOUNDS = (16, 2)
ROWS_BOUNDS = {8: (8, 2), 16: (8, 2), 32: (8, 2), 64: (4, 2)}  # by activation slots
_WARPS_TO_FILL = 20  # of a multiprocessor, so that enough bytes are under way
_MAX_BLOCKS = 32  # of a multiprocessor, on any card
_MOST_WARPS = 32  # of a block
_LEAST_WARPS_OF_TWO = 24  # that two groups are compiled for: fewer would only add programs


def plan_byte_linear(
    planner: Planner,
    stored: CudaWeight,
    parts: list[PackedPart],
    out: Buffer,
    rows: Rows,
    form: Form,
    flags: int,
    norm: NormAfter | None = None,
) -> None:
    """One launch for one or two packed parts, by the activations that were prepared last."""
    num_groups = sum(part.num_groups for part in parts)
    num_spans = ceil_div(parts[0].num_chunks, 4)
    num_multiprocessors = planner.device.num_multiprocessors
    file, defines, bounds = _byte_kernel(planner, parts, form.slots)
    warps = choose_warps(num_groups, num_spans, bounds, num_multiprocessors)
    groups_each = 1
    if norm is not None:
        groups_each, bounds = 2, (max(_LEAST_WARPS_OF_TWO, 2 * warps), 1)
        defines["GROUPS"] = groups_each
    elif file == "linear_row.cu" and fits(num_groups, warps, _ROW_BOUNDS_OF_SMALL, num_multiprocessors):
        bounds = _ROW_BOUNDS_OF_SMALL
    defines |= {"FORMAT": parts[0].format.name, "MAX_WARPS": bounds[0], "MIN_BLOCKS": bounds[1]}
    if len(parts) == 2:
        defines["FORMAT_B"] = parts[1].format.name
    first, second = (_part_args(stored, part) for part in (parts[0], parts[-1]))
    codes, scales, before = planner.activations()
    norms: tuple[int | float, ...] = ()
    if file == "linear_row.cu":
        norms = (*before, *(_NO_NORM_AFTER if norm is None else planner.offer_norm(norm, rows)))
    planner.call(
        program(file, "linear", **defines),
        (num_groups // groups_each, 1, 1),
        32 * warps * groups_each,
        *first,
        *(second if len(parts) == 2 else _NO_PART),
        codes,
        scales,
        rows.count_address,
        address_of(out),
        form.slots,
        parts[0].num_chunks,
        out.row_stride,
        flags,
        *norms,
    )


def shareable_norm(planner: Planner, stored: CudaWeight, out: Buffer, rows: Rows) -> NormAfter | None:
    """The norm that follows in a recording, if this product can do its share of it."""
    part = stored.parts[0]
    if rows.capacity != 1 or not planner.following or not planner.has_byte_mma:
        return None
    if len(stored.parts) != 1 or not isinstance(part, PackedPart) or part.format.type is GgmlType.Q2_K:
        return None
    if part.half or part.rows % 64:
        return None
    warps = choose_warps(part.num_groups, ceil_div(part.num_chunks, 4), ROW_BOUNDS, planner.device.num_multiprocessors)
    return norm_after(out, planner.following) if 2 * warps <= _MOST_WARPS else None


def _byte_kernel(
    planner: Planner, parts: list[PackedPart], slots: int
) -> tuple[str, dict[str, str | int], tuple[int, int]]:
    """Source, definitions and launch bounds of the kernel for so many activation rows."""
    # Q2_K's minima per 16 values have no place in the one-row scheme
    if not planner.has_byte_mma or (slots == 1 and any(part.format.type is GgmlType.Q2_K for part in parts)):
        return "linear_dp4a.cu", {"COLUMNS": slots}, DP4A_BOUNDS
    if slots == 1:
        return "linear_row.cu", {}, ROW_BOUNDS
    return "linear_rows.cu", {"COLUMN_TILES": slots // 8}, ROWS_BOUNDS[slots]


def choose_warps(num_groups: int, num_spans: int, bounds: tuple[int, int], num_multiprocessors: int) -> int:
    """Warps that share a group of 16 rows: those that finish first by a model of the card.

    A multiprocessor holds as many blocks as `bounds` (most warps of a block, blocks) leave room for; a block takes as
    long as its warps have spans of 256 columns, and one span's time to start and end. Counted in waves of blocks this
    ranks block sizes as measured on an H200, from 224 groups to 9,504, within 1 % of a step: for 1,792 groups of 16
    spans, which it has two warps share, four were that much faster.
    """
    max_warps, min_blocks = bounds

    def cost(warps: int) -> tuple[int, int]:
        blocks = min(max_warps * min_blocks // warps, _MAX_BLOCKS) * num_multiprocessors
        idle = max(0, _WARPS_TO_FILL * num_multiprocessors - num_groups * warps)
        return ceil_div(num_groups, blocks) * (ceil_div(num_spans, warps) + 1), idle

    best = min(range(min(max_warps, num_spans), 0, -1), key=cost)
    return ceil_div(num_spans, ceil_div(num_spans, best))


def fits(num_groups: int, warps: int, bounds: tuple[int, int], num_multiprocessors: int) -> bool:
    """Whether all blocks of a kernel with these launch bounds are on the card at once."""
    max_warps, min_blocks = bounds
    return warps <= max_warps and num_groups <= max_warps * min_blocks // warps * num_multiprocessors


def _part_args(stored: CudaWeight, part: PackedPart) -> tuple[int, ...]:
    bias = stored.bias_address(part.first)
    return (stored.address(part), bias, part.num_groups, part.rows, part.half, part.first)
