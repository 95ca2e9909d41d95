"""A small model whose activations leave f16's range, though its weights do not."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from lamina.spec.gguf import read_gguf
from support.tiny import write_tiny_llama

OVERFLOWING_LAYER = 1


def write_f16_llama(path: Path, *, overflowing: bool) -> Path:
    """Three layers; with `overflowing`, layer 1's down projection has inputs far beyond 65,504."""
    write_tiny_llama(path, matrix_type=GGMLQuantizationType.F16, hidden=64, ff=96, layers=3)
    if overflowing:
        tensors = read_gguf(path).tensors
        data = np.memmap(path, np.uint8, "r+")
        for name, factor in (("ffn_gate", 2.0**10), ("ffn_up", 2.0**10), ("ffn_down", 2.0**-6)):
            tensor = tensors[f"blk.{OVERFLOWING_LAYER}.{name}.weight"]
            values = data[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes].view(np.float16)
            values *= np.float16(factor)
        data.flush()
    return path
