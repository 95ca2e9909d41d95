"""A `Device` on the host: the CUDA sources compiled as C++ over cuda_emulator.h, memory from numpy, products by BLAS.

Slow and exact about what matters: block and warp structure, tensor-core fragments, alignment, cleared tickets. So the
CUDA backend runs the conformance suite on machines without a GPU.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lamina.kernels.backend import GraphError, Unsupported
from lamina.kernels.buffer import DType
from lamina.kernels.cuda.device import (
    Bytes,
    Call,
    Device,
    ExecutableGraph,
    KernelCall,
    Matrix,
    Memory,
    ProductCall,
    Span,
)
from lamina.kernels.cuda.programs import Program, assemble, packing_of

_HEADER = Path(__file__).with_name("cuda_emulator.h")
_WGMMA_HEADER = Path(__file__).with_name("cuda_emulator_wgmma.h")
_KERNEL = re.compile(r"^KERNEL\b(?:\s*__launch_bounds__\([^\n]*?\)+)?\s*(\w+)\(", re.MULTILINE)
_TOTAL_BYTES = 1 << 30


def _library(program: Program) -> Path:
    """The compiled program, kept in the temporary directory from run to run."""
    headers = {"intrinsics.cuh": _HEADER.read_text("utf-8"), "wgmma.cuh": _WGMMA_HEADER.read_text("utf-8")}
    body = assemble(program.file, headers)
    launchers = "\n".join(
        f'extern "C" void run_{name}(unsigned* g, unsigned threads, unsigned shared, void** a) '
        f"{{ emulator::launch({name}, {{g[0], g[1], g[2]}}, {{threads, 1, 1}}, shared, a); }}"
        for name in _KERNEL.findall(body)
    )
    code = f"{body}\n{launchers}\n"
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", *program.options]
    digest = hashlib.sha256("\0".join([code, *options]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"lamina-cuda-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest}.so"
    if not library.exists():
        source = folder / f"{digest}.{os.getpid()}.cpp"
        built = source.with_suffix(".so")
        source.write_text(code, "utf-8")
        try:
            subprocess.run(["g++", *options, "-o", str(built), str(source)], check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{program}: {error.stderr[:3000]}") from None
        built.replace(library)
        source.unlink()
    return library


class _Kernel:
    def __init__(self, program: Program) -> None:
        packing = packing_of(program.file, program.function)
        self.buffer = bytearray(packing.num_bytes)
        self.packing = packing
        base = ctypes.addressof((ctypes.c_char * packing.num_bytes).from_buffer(self.buffer))
        self.arguments = (ctypes.c_void_p * len(packing.offsets))(*(base + offset for offset in packing.offsets))
        self.function = getattr(ctypes.CDLL(str(_library(program))), f"run_{program.function}")

    def launch(self, call: KernelCall) -> None:
        assert all(0 < size <= limit for size, limit in zip(call.grid, (2**31 - 1, 65535, 65535), strict=True)), call
        assert 0 < call.num_threads <= 1024, call
        assert call.num_threads % 32 == 0, call
        self.packing.pack_into(self.buffer, call.args)
        grid = (ctypes.c_uint * 3)(*call.grid)
        self.function(grid, ctypes.c_uint(call.num_threads), ctypes.c_uint(call.shared_bytes), self.arguments)


class _EmulatedGraph:
    def __init__(self, device: "EmulatedDevice", calls: Sequence[Call]) -> None:
        self._device = device
        self._calls: list[Call] | None = list(calls)

    def launch(self) -> None:
        if self._calls is None:
            raise GraphError("launch of a destroyed graph")
        for call in self._calls:
            self._device.run(call)

    def destroy(self) -> None:
        self._calls = None


class EmulatedTransfer:
    """Done at once."""

    def __init__(self, there: Bytes, host: Bytes) -> None:
        assert there.nbytes == host.nbytes
        self._there = there
        self._host = host

    def upload(self, num_bytes: int) -> None:
        self._there[:num_bytes] = self._host[:num_bytes]

    def download(self, num_bytes: int) -> None:
        self._host[:num_bytes] = self._there[:num_bytes]


class EmulatedDevice:
    """See the module docstring. Guard bytes around every memory tell of stray writes when it is released."""

    name = "emulated GPU"
    num_multiprocessors = 4
    uuid = ""
    _GUARD = 256

    def __init__(self, compute_capability: tuple[int, int] = (9, 0)) -> None:
        if shutil.which("g++") is None:
            raise Unsupported("the CUDA emulator needs g++")
        self.compute_capability = compute_capability
        self.calls: list[Call] = []
        self._kernels: dict[Program, _Kernel] = {}
        self._used_bytes = 0
        self._live: dict[int, Memory] = {}

    def memory_bytes(self) -> tuple[int, int]:
        return _TOTAL_BYTES - self._used_bytes, _TOTAL_BYTES

    def allocate(self, num_bytes: int) -> Memory:
        whole = np.full(num_bytes + 2 * self._GUARD + 256, 0xA5, np.uint8)
        start = -(whole.ctypes.data + self._GUARD) % 256 + self._GUARD
        whole[start : start + num_bytes] = 0
        memory = Memory(whole.ctypes.data + start, num_bytes, (whole, start))
        self._used_bytes += num_bytes
        self._live[memory.address] = memory
        return memory

    def release(self, memory: Memory) -> None:
        del self._live[memory.address]
        self._used_bytes -= memory.num_bytes
        self._check_guards(memory)

    def _check_guards(self, memory: Memory) -> None:
        whole, start = memory.handle
        around = np.concatenate([whole[:start], whole[start + memory.num_bytes :]])
        assert (around == 0xA5).all(), f"a kernel wrote outside of a memory of {memory.num_bytes} bytes"

    def _view(self, span: Span) -> Bytes:
        whole, start = span.memory.handle
        end = span.offset + (span.num_rows - 1) * span.pitch_bytes + span.row_bytes
        assert span.num_rows == 0 or (span.offset >= 0 and end <= span.memory.num_bytes), span
        shape, strides = (span.num_rows, span.row_bytes), (span.pitch_bytes, 1)
        return np.lib.stride_tricks.as_strided(whole[start + span.offset :], shape, strides)

    def upload(self, span: Span, values: Bytes) -> None:
        self._view(span)[...] = values

    def download(self, span: Span) -> Bytes:
        return self._view(span).copy()

    def transfer(self, span: Span, host: Bytes) -> "EmulatedTransfer":
        view = self._view(span)
        there = view.reshape(-1)
        assert np.shares_memory(view, there), "not contiguous"
        return EmulatedTransfer(there, host)

    def copy(self, source: Span, target: Span) -> None:
        self._view(target)[...] = self._view(source)

    def reaches(self, other: Device) -> bool:
        return isinstance(other, EmulatedDevice)

    def copy_from(self, owner: Device, source: Span, target: Span) -> None:
        assert isinstance(owner, EmulatedDevice)
        assert owner is not self
        self._view(target)[...] = owner._view(source)

    def prepare(self, programs: Sequence[Program]) -> None:
        for program in programs:
            if program not in self._kernels:
                self._kernels[program] = _Kernel(program)

    def run(self, call: Call) -> None:
        self.calls.append(call)
        if isinstance(call, KernelCall):
            self.prepare([call.program])
            self._kernels[call.program].launch(call)
        else:
            self._multiply(call)

    def _multiply(self, call: ProductCall) -> None:
        out = self._matrix(call.out)
        product = (
            _widened(self._matrix(call.x), call.x.dtype) @ _widened(self._matrix(call.weight), call.weight.dtype).T
        )
        out[...] = out + product if call.accumulate else product

    def _matrix(self, matrix: Matrix) -> np.ndarray:
        size = matrix.dtype.itemsize
        span = Span(matrix.memory, matrix.offset, matrix.rows, matrix.columns * size, matrix.stride * size)
        whole, start = matrix.memory.handle
        self._view(span)  # within bounds
        strides = (matrix.stride * size, size)
        return np.ndarray((matrix.rows, matrix.columns), matrix.dtype.host_dtype, whole, start + matrix.offset, strides)

    def capture(self, calls: Sequence[Call]) -> ExecutableGraph:
        return _EmulatedGraph(self, calls)

    def synchronize(self) -> None: ...

    def bind_to_thread(self) -> None: ...

    def alloc_pinned(self, num_bytes: int) -> Bytes:
        return np.zeros(num_bytes, np.uint8)

    def create_event(self, *, timed: bool = False) -> Any:
        return []

    def record_event(self, event: Any) -> None:
        event[:] = [time.perf_counter()]

    def elapsed_s(self, start: Any, end: Any) -> float:
        return float(end[0] - start[0])

    def wait_event(self, event: Any) -> None: ...

    def event_done(self, event: Any) -> bool:
        return True

    def event_probe(self, event: Any) -> None:
        """Events of the emulator are Python's alone."""

    def follow(self, event: Any) -> None: ...

    def close(self) -> None:
        for memory in self._live.values():
            self._check_guards(memory)


def _widened(values: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BF16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
