"""From a checkpoint's raw blocks to float32, through `gguf.quants`: the one decoder that every backend is tested with.

Owns nothing; knows neither backends nor where a tensor came from.
"""

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.buffer import HostTensor
from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel
from lamina.spec.quant import WEIGHT_TYPES, row_bytes

_CHUNK_VALUES = 1 << 20  # gguf decodes through temporaries several times the result: bound them, not the tensor


def dequantize(tensor: HostTensor) -> NDArray[np.float32]:
    """The tensor's values, float32 [rows, cols], in a fresh array.

    Raises UnsupportedModel for a type that is no weight type, InvalidCheckpoint if the data do not fit the shape.
    """
    out = np.empty((tensor.rows, tensor.cols), np.float32)
    dequantize_into(tensor, out)
    return out


def dequantize_into(tensor: HostTensor, out: NDArray[np.float32]) -> None:
    """Like `dequantize`, into `out` [rows, cols]."""
    if tensor.type not in WEIGHT_TYPES:
        raise UnsupportedModel(f"tensor type {tensor.type.name} holds no weights; requantise the checkpoint")
    wanted = (tensor.rows, row_bytes(tensor.type, tensor.cols))
    if tensor.data.shape != wanted or tensor.data.dtype != np.uint8:
        raise InvalidCheckpoint(
            f"a {tensor.type.name} tensor of {tensor.rows} x {tensor.cols} takes uint8 {list(wanted)}, "
            f"the data are {tensor.data.dtype} {list(tensor.data.shape)}"
        )
    from gguf import GGMLQuantizationType, quants  # a 20th of a worker's start, if it came earlier

    kind = GGMLQuantizationType(tensor.type.value)
    step = max(1, _CHUNK_VALUES // tensor.cols)
    for start in range(0, tensor.rows, step):
        raw = np.ascontiguousarray(tensor.data[start : start + step])
        out[start : start + step] = quants.dequantize(raw, kind)
