"""Norms that the products around them do: found in a recording, where the ops to come are known.

The product before leaves int8 codes of its result times the norm's gain, and sums of squares; the product after scales
by 1 / rms, which comes to the same as the norm's own kernel, bit by bit, and spares a launch. What the norm would write
must be of no use to anybody else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.kernels.buffer import Buffer, Weight
from lamina.kernels.cuda.weights import CudaWeight, PackedPart
from lamina.kernels.ops import Args, OpSpec
from lamina.spec.quant import GgmlType

Launches = Sequence[tuple[OpSpec, Args]]

_MAX_COLUMNS = 32 * 1024  # MAX_NORM_BLOCKS of rows.cu


@dataclass(frozen=True, slots=True)
class NormAfter:
    """A norm of a product's result: rows of `out` are what it would write."""

    gain: Buffer
    out: Buffer
    eps: float


def norm_after(result: Buffer, following: Launches) -> NormAfter | None:
    """The norm of `result`, if it is what comes next and only products that take its codes read what it gives."""
    if not following or following[0][0].name != "rms_norm":
        return None
    args = following[0][1]
    x, gain, out = (value for value in args.values() if isinstance(value, Buffer))
    eps = args["eps"]
    assert isinstance(eps, float)
    is_whole = gain.shape[0] == x.num_columns and x.num_columns % 64 == 0 and x.num_columns <= _MAX_COLUMNS
    if not is_whole or not _same_view(x, result) or out.storage is x.storage or out.extent is not x.extent:
        return None
    return NormAfter(gain, out, eps) if _only_products_read(out, following[1:]) else None


def _only_products_read(out: Buffer, following: Launches) -> bool:
    """Whether whoever touches this memory is a product on packed weights, until another norm writes it anew.

    One after the other: the codes are all there is of it, and any other op may leave codes of its own in their place.
    """
    are_kept = True
    for op, args in following:
        touched = {name: value for name, value in args.items() if _shares_memory(value, out)}
        if not touched:
            are_kept = False
            continue
        (name, value), *others = touched.items()
        if others or not isinstance(value, Buffer) or not _same_view(value, out):
            return False
        if op.name == "rms_norm" and name == "out":
            return True
        is_product = op.name in ("linear", "gated_linear") and name == "x"
        if not are_kept or not is_product or not takes_codes_of_one_row(args["weight"]):
            return False
    return False


def takes_codes_of_one_row(weight: object) -> bool:
    """Whether linear_row.cu serves all parts of a weight, on cards that run it."""
    parts = weight.storage.parts if isinstance(weight, Weight) and isinstance(weight.storage, CudaWeight) else ()
    # Q2_K's minima per 16 values have no place in the one-row scheme
    return bool(parts) and all(isinstance(p, PackedPart) and p.format.type is not GgmlType.Q2_K for p in parts)


def _shares_memory(value: object, buffer: Buffer) -> bool:
    return isinstance(value, Buffer) and value.storage is buffer.storage


def _same_view(a: Buffer, b: Buffer) -> bool:
    same_place = a.storage is b.storage and a.offset == b.offset and a.row_stride == b.row_stride
    return same_place and a.shape == b.shape and a.extent is b.extent
