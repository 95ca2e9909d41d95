"""A bench on the emulated GPU, and a look at what its backend launched."""

import numpy as np

from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.device import KernelCall, ProductCall
from support.backends import BACKENDS, Bench
from support.cuda_emulated import EmulatedDevice


def emulated_bench(cc: tuple[int, int] = (9, 0), seed: int = 0) -> Bench:
    """A card of this compute capability."""
    return Bench(CudaBackend(device=EmulatedDevice(cc)), BACKENDS["cuda_emulated"], np.random.default_rng(seed))


def calls_of(bench: Bench) -> list[KernelCall | ProductCall]:
    """Everything launched so far."""
    device = bench.backend.device  # type: ignore[attr-defined]
    assert isinstance(device, EmulatedDevice)
    return device.calls


def functions_of(bench: Bench) -> list[str]:
    """Names of the kernels launched so far, "product" for those of cuBLAS."""
    return [call.program.function if isinstance(call, KernelCall) else "product" for call in calls_of(bench)]
