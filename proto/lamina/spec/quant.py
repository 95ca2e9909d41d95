"""Tensor types of GGUF files: their ids and how many bytes a row of each takes.

Owns sizes only. Knows nothing of how a type is decoded (that is kernels' business) nor of where a tensor lies.
"""

from dataclasses import dataclass
from enum import IntEnum

from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel


class GgmlType(IntEnum):
    """ggml's tensor type ids, as a GGUF file stores them."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """`block_values` consecutive values of a row are stored in `block_bytes` bytes."""

    type: GgmlType
    block_values: int
    block_bytes: int

    @property
    def bits_per_value(self) -> float:
        return 8 * self.block_bytes / self.block_values


_FORMATS = {
    kind: QuantFormat(kind, block_values, block_bytes)
    for kind, block_values, block_bytes in (
        (GgmlType.F32, 1, 4),
        (GgmlType.F16, 1, 2),
        (GgmlType.Q4_0, 32, 18),
        (GgmlType.Q4_1, 32, 20),
        (GgmlType.Q5_0, 32, 22),
        (GgmlType.Q5_1, 32, 24),
        (GgmlType.Q8_0, 32, 34),
        (GgmlType.Q2_K, 256, 84),
        (GgmlType.Q3_K, 256, 110),
        (GgmlType.Q4_K, 256, 144),
        (GgmlType.Q5_K, 256, 176),
        (GgmlType.Q6_K, 256, 210),
        (GgmlType.IQ2_XXS, 256, 66),
        (GgmlType.IQ2_XS, 256, 74),
        (GgmlType.IQ3_XXS, 256, 98),
        (GgmlType.IQ1_S, 256, 50),
        (GgmlType.IQ4_NL, 32, 18),
        (GgmlType.IQ3_S, 256, 110),
        (GgmlType.IQ2_S, 256, 82),
        (GgmlType.IQ4_XS, 256, 136),
        (GgmlType.I8, 1, 1),
        (GgmlType.I16, 1, 2),
        (GgmlType.I32, 1, 4),
        (GgmlType.I64, 1, 8),
        (GgmlType.F64, 1, 8),
        (GgmlType.IQ1_M, 256, 56),
        (GgmlType.BF16, 1, 2),
        (GgmlType.TQ1_0, 256, 54),
        (GgmlType.TQ2_0, 256, 66),
        (GgmlType.MXFP4, 32, 17),
        (GgmlType.NVFP4, 64, 36),
    )
}

FLOAT_TYPES = frozenset({GgmlType.F32, GgmlType.F16, GgmlType.BF16})
"""What norms, biases and other vectors may be stored as (A-04)."""

WEIGHT_TYPES = frozenset(GgmlType) - {GgmlType.I8, GgmlType.I16, GgmlType.I32, GgmlType.I64, GgmlType.F64}
"""What a weight matrix may be stored as; the rest have an id only so that an error can name them."""


def quant_format(type_id: int, where: str) -> QuantFormat:
    """The format of a type id. `where` names the tensor for the error.

    Raises UnsupportedModel for an id that is none of ours.
    """
    try:
        return _FORMATS[GgmlType(type_id)]
    except ValueError:
        raise UnsupportedModel(f"{where} has tensor type id {type_id}, which lamina does not know") from None


def row_bytes(kind: GgmlType, num_values: int) -> int:
    """Bytes of one row of `num_values` values. Raises InvalidCheckpoint if that is no multiple of the block."""
    quant = _FORMATS[kind]
    blocks, rest = divmod(num_values, quant.block_values)
    if rest:
        raise InvalidCheckpoint(
            f"a {kind.name} row of {num_values} values is no multiple of its block of {quant.block_values}"
        )
    return blocks * quant.block_bytes
