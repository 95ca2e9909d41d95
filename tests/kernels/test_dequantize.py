"""From GGUF blocks to float32, and the refusals on the way."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from lamina.kernels.buffer import HostTensor
from lamina.kernels.quant import dequantize as module
from lamina.kernels.quant.dequantize import dequantize
from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel
from lamina.spec.quant import WEIGHT_TYPES, GgmlType
from support.backends import host_tensor


@pytest.mark.parametrize("kind", sorted(WEIGHT_TYPES), ids=lambda kind: kind.name)
def test_every_weight_type_decodes_as_gguf_does(kind: GgmlType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-03, A-04: quantised or float, in one piece or in chunks of few rows, exactly the values of gguf.quants."""
    tensor = host_tensor(kind, 7, 512, np.random.default_rng(kind.value))
    wanted = quants.dequantize(tensor.data, GGMLQuantizationType(kind.value))
    assert dequantize(tensor).dtype == np.float32
    assert np.array_equal(dequantize(tensor), wanted)
    monkeypatch.setattr(module, "_CHUNK_VALUES", 1024)
    assert np.array_equal(dequantize(tensor), wanted)


def test_a_slice_of_rows_decodes() -> None:
    """Rows cut out of a larger tensor need not be contiguous."""
    tensor = host_tensor(GgmlType.F32, 9, 32, np.random.default_rng(0))
    part = HostTensor(GgmlType.F32, 3, 16, tensor.data[1:7:2, 32:96])
    assert np.array_equal(dequantize(part), tensor.data.view(np.float32)[1:7:2, 8:24])


def test_types_that_hold_no_weights_are_refused() -> None:
    """A-03: never a silent reinterpretation."""
    with pytest.raises(UnsupportedModel, match="I32 holds no weights"):
        dequantize(HostTensor(GgmlType.I32, 1, 4, np.zeros((1, 16), np.uint8)))


@pytest.mark.parametrize(("rows", "cols"), [(3, 64), (2, 32)])
def test_data_that_do_not_fit_are_refused(rows: int, cols: int) -> None:
    """A tensor whose bytes and shape disagree is an InvalidCheckpoint with both."""
    tensor = host_tensor(GgmlType.Q8_0, 2, 64, np.random.default_rng(0))
    with pytest.raises(InvalidCheckpoint, match=r"uint8 \[2, 68\]"):
        dequantize(HostTensor(GgmlType.Q8_0, rows, cols, tensor.data))
