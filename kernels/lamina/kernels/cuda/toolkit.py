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
from lamina.kernels.cuda.libcuda import driver_version, load_driver


@cache
def load_libraries() -> Libraries:
    """Raises Unsupported where one is missing, saying what to install."""
    driver = load_driver()
    extra = "cuda" if driver_version(driver) >= (13, 0) else "cuda12"
    nvrtc = _find("nvrtc", extra)
    for builtins in nvrtc.parent.glob("libnvrtc-builtins.so.*"):  # which NVRTC looks for by name alone
        _open(builtins)
    return Libraries(driver, compiler.declared(_open(nvrtc)), cublas.declared(_open(_find("cublas", extra))))


def num_devices() -> int:
    """GPUs that the driver shows; none without a driver."""
    try:
        return num_cards(load_driver())
    except Unsupported:
        return 0


def kernel_folder() -> Path:
    """Where compiled kernels are kept: lamina/cuda in the user's cache folder. Raises Unsupported if there is none."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache_home) if cache_home else Path.home() / ".cache") / "lamina" / "cuda"
    except RuntimeError:  # a user of whom the system knows nothing, as in containers
        raise Unsupported("compiled kernels have no place: this user has no home; set XDG_CACHE_HOME") from None


def _find(name: str, extra: str) -> Path:
    try:
        return Path(str(load_nvidia_dynamic_lib(name).abs_path))
    except DynamicLibNotFoundError:
        raise Unsupported(f"CUDA's {name} is not installed; pip install 'lamina[{extra}]'") from None
    except (RuntimeError, OSError) as error:  # it is there, and no library, or of another machine
        raise Unsupported(f"CUDA's {name} cannot be loaded, install it again: {error}") from None


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unsupported(f"a library of CUDA cannot be loaded, install it again: {error}") from None
