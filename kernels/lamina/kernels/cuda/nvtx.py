"""NVTX ranges with colours, as Nsight Systems shows them, through NVIDIA's package nvtx."""

from importlib import import_module
from typing import Any


class NvtxRanges:
    """Pushes and pops on the calling thread. Raises ImportError without the package."""

    def __init__(self) -> None:
        self._nvtx: Any = import_module("nvtx")

    def push(self, name: str, argb: int) -> object:
        return self._nvtx.push_range(name, argb)

    def pop(self) -> object:
        return self._nvtx.pop_range()
