"""Tensor type ids and sizes, against the gguf package and by hand."""

import gguf
import pytest

from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel
from lamina.spec.quant import FLOAT_TYPES, WEIGHT_TYPES, GgmlType, quant_format, row_bytes


@pytest.mark.parametrize("kind", list(GgmlType), ids=lambda kind: kind.name)
def test_ids_names_and_sizes_equal_those_of_the_gguf_package(kind: GgmlType) -> None:
    oracle = gguf.GGMLQuantizationType[kind.name]
    assert kind.value == oracle.value
    quant = quant_format(kind.value, "t")
    assert quant.type is kind
    assert (quant.block_values, quant.block_bytes) == gguf.GGML_QUANT_SIZES[oracle]


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (GgmlType.Q4_K, 4.5),
        (GgmlType.Q6_K, 6.5625),
        (GgmlType.Q2_K, 2.625),
        (GgmlType.MXFP4, 4.25),
        (GgmlType.NVFP4, 4.5),
        (GgmlType.BF16, 16.0),
    ],
)
def test_bits_per_value(kind: GgmlType, bits: float) -> None:
    assert quant_format(kind, "t").bits_per_value == bits


def test_every_type_of_a_weight_that_models_carry_is_allowed() -> None:
    """A-03: no tensor type is left out, plain floats included; integers and doubles are known by name only."""
    assert len(WEIGHT_TYPES) == 26
    assert FLOAT_TYPES < WEIGHT_TYPES
    assert {kind.name for kind in GgmlType if kind not in WEIGHT_TYPES} == {"I8", "I16", "I32", "I64", "F64"}


def test_row_bytes_by_hand() -> None:
    assert row_bytes(GgmlType.Q4_K, 4096) == 16 * 144
    assert row_bytes(GgmlType.Q5_0, 2880) == 90 * 22
    assert row_bytes(GgmlType.F32, 7) == 28
    assert row_bytes(GgmlType.NVFP4, 64) == 36


def test_a_row_that_is_no_multiple_of_the_block_is_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"Q4_K row of 2880 values .* block of 256"):
        row_bytes(GgmlType.Q4_K, 2880)


@pytest.mark.parametrize("type_id", [4, 5, 9, 15, 31, 41, -1, 2**32 - 1])
def test_an_unknown_id_is_refused_by_tensor_name(type_id: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"blk.0.x has tensor type id {type_id},"):
        quant_format(type_id, "blk.0.x")
