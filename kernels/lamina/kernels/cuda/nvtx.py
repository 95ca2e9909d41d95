"""NVTX ranges with colours, as Nsight Systems shows them, through cupy: for whoever has it installed beside."""

from importlib import import_module
from typing import Any


class CupyRanges:
    """Pushes and pops on the calling thread. Raises ImportError without cupy, or where it was built without NVTX."""

    def __init__(self) -> None:
        self._nvtx: Any = import_module("cupy.cuda.nvtx")

    def push(self, name: str, argb: int) -> object:
        return self._nvtx.RangePushC(name, argb)

    def pop(self) -> object:
        return self._nvtx.RangePop()
