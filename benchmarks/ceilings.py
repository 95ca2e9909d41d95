"""The machine's ceilings, measured: memory reads and int8 multiply-adds. Compiles a small C++ file for this machine."""

import ctypes
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_SOURCE = _HERE / "ceilings.cpp"
_BUILD = _HERE.parent / "build"
_WORKING_SET_BYTES = 1 << 30


class NoCompiler(RuntimeError):
    """There is no C++ compiler here, so there are no ceilings to compare with."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best of several runs on a number of threads; `int8_gmacs` is None without AVX-512 VNNI or AVX2."""

    read_gbps: float
    int8_gmacs: float | None


def measure_ceilings(num_threads: int, num_runs: int = 5) -> Ceilings:
    """Ceilings of so many threads together. Raises NoCompiler."""
    library = _library()
    gmacs = float(library.ceiling_int8_gmacs(num_threads, num_runs))
    return Ceilings(float(library.ceiling_read_gbps(_WORKING_SET_BYTES, num_threads, num_runs)), gmacs or None)


def _library() -> ctypes.CDLL:
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    path = _BUILD / f"ceilings-{digest}.so"
    if not path.is_file():
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise NoCompiler("neither g++ nor clang++ is here")
        _BUILD.mkdir(exist_ok=True)
        flags = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    library.ceiling_read_gbps.restype = library.ceiling_int8_gmacs.restype = ctypes.c_double
    library.ceiling_read_gbps.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    library.ceiling_int8_gmacs.argtypes = [ctypes.c_int, ctypes.c_int]
    return library
