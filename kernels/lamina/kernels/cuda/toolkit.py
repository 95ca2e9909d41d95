"""What a worker needs of a CUDA toolkit: NVRTC and cuBLAS, found in NVIDIA's wheels, in conda or on the system.

The only module that imports cuda-pathfinder, which looks there; a machine without GPUs needs none of them.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

from lamina.kernels.backend import Unsupported
from lamina.kernels.cuda import compiler, cublas
from lamina.kernels.cuda.card import num_cards
from lamina.kernels.cuda.cuda_device import Libraries
from lamina.kernels.cuda.libcuda import load_driver


@cache
def load_libraries() -> Libraries:
    """Raises Unsupported where one is missing, saying what to install."""
    try:
        driver = load_driver()
    except OSError as error:
        raise Unsupported(f"there is no NVIDIA driver: {error}") from None
    nvrtc = _find("nvrtc")
    for builtins in nvrtc.parent.glob("libnvrtc-builtins.so.*"):  # which NVRTC looks for by name alone
        ctypes.CDLL(str(builtins))
    return Libraries(
        driver, compiler.declared(ctypes.CDLL(str(nvrtc))), cublas.declared(ctypes.CDLL(str(_find("cublas"))))
    )


def num_devices() -> int:
    """GPUs that the driver shows; none without a driver."""
    try:
        return num_cards(load_driver())
    except OSError:
        return 0


def kernel_folder() -> Path:
    """Where compiled kernels are kept: lamina/cuda in the user's cache folder."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "lamina" / "cuda"


def _find(name: str) -> Path:
    try:
        return Path(str(load_nvidia_dynamic_lib(name).abs_path))
    except DynamicLibNotFoundError:
        raise Unsupported(f"CUDA's {name} is not installed; pip install 'lamina[cuda]'") from None
