"""A GPU through torch (memory, copies, cuBLAS), cupy (NVRTC and its cache on disk) and the driver (launches, graphs).

The only module that imports torch and cupy. Everything runs on one stream of its own, so that other users of the
process's default stream neither wait for it nor disturb it. One compute thread.
"""

import ctypes
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import cupy
import numpy as np
import psutil
import torch
from cupy.cuda import nvrtc

from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import DType
from lamina.kernels.cuda.aside import Aside
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
from lamina.kernels.cuda.driver import Driver, DriverTransfer, load_driver
from lamina.kernels.cuda.policy import DEPENDENT_LAUNCH, free_bytes, require_supported
from lamina.kernels.cuda.programs import Program, packing_of, source_text
from lamina.spec.errors import CapacityExceeded

_log = logging.getLogger(__name__)
_TORCH_DTYPES = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}
_DEFAULT_SHARED_BYTES = 48 << 10
_COMPILER_THREADS = 8
_PEER_TEST_VALUES = 1 << 16
_OPTIONS = ("-std=c++17", "--diag-suppress=177")


class _Kernel:
    """A loaded entry point, and the buffer its arguments are packed into."""

    def __init__(self, module: Any, program: Program) -> None:
        packing = packing_of(program.file, program.function)
        self._keep = module
        self.function = int(module.get_function(program.function).kernel.ptr)
        self.packing = packing
        self.buffer = bytearray(packing.num_bytes)
        base = ctypes.addressof((ctypes.c_char * packing.num_bytes).from_buffer(self.buffer))
        self.arguments = (ctypes.c_void_p * len(packing.offsets))(*(base + offset for offset in packing.offsets))
        self.allowed_shared_bytes = _DEFAULT_SHARED_BYTES


def num_devices() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class TorchDevice:
    """The index-th GPU. Raises Unsupported if there is none, or if this build cannot run it (B-08)."""

    arrays: ModuleType = torch

    def __init__(self, index: int = 0) -> None:
        if index >= num_devices():
            raise Unsupported(f"cuda:{index} is not there: torch sees {num_devices()} GPUs")
        properties = torch.cuda.get_device_properties(index)
        self.name = f"{properties.name} (cuda:{index})"
        self.compute_capability = (int(properties.major), int(properties.minor))
        require_supported(self.name, self.compute_capability, torch.cuda.get_arch_list(), nvrtc.getVersion())
        self.num_multiprocessors = int(properties.multi_processor_count)
        self.uuid = str(properties.uuid)
        self._shares_host_memory = bool(properties.is_integrated)
        self._index = index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self.bind_to_thread()
        dependent_launch = self.compute_capability >= DEPENDENT_LAUNCH
        library = load_driver()
        self._driver = Driver(library, self._stream.cuda_stream, dependent_launch=dependent_launch)
        # of the same priority as the main stream: measured on an H200, see docs/performance.md
        self._stream_aside = torch.cuda.Stream(self._device)
        self._aside = Aside(self._driver, Driver(library, self._stream_aside.cuda_stream, dependent_launch=False))
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._kernels: dict[Program, _Kernel] = {}
        self._peers: set[int] = set()  # cards copied from so far

    def _warm_up_cublas(self) -> None:
        """Handle and workspace exist before anything is captured."""
        with torch.cuda.stream(self._stream):
            ones = torch.ones((16, 16), device=self._device)
            torch.mm(ones, ones)
        self.synchronize()

    # -- memory

    def memory_bytes(self) -> tuple[int, int]:
        """What the driver has free, and what torch holds but does not use."""
        free, total = torch.cuda.mem_get_info(self._index)
        held = torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        available = psutil.virtual_memory().available if self._shares_host_memory else None
        return free_bytes(free, available) + held, total

    def allocate(self, num_bytes: int) -> Memory:
        try:
            with torch.cuda.stream(self._stream):
                tensor = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            raise self._no_room(f"{num_bytes / 2**20:.1f} MiB") from None
        return Memory(int(tensor.data_ptr()), num_bytes, [tensor, {}])

    def _no_room(self, what: str) -> CapacityExceeded:
        free, total = self.memory_bytes()
        return CapacityExceeded(
            f"no room for {what} on {self.name}: {free / 2**20:.1f} of {total / 2**20:.1f} MiB are free, in pieces"
        )

    def release(self, memory: Memory) -> None:
        memory.handle.clear()

    def _view(self, span: Span) -> Any:
        tensor, _ = span.memory.handle
        return tensor.as_strided((span.num_rows, span.row_bytes), (span.pitch_bytes, 1), span.offset)

    def upload(self, span: Span, values: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            self._view(span).copy_(torch.from_numpy(np.ascontiguousarray(values)))
        self._aside.join()

    def download(self, span: Span) -> Bytes:
        with torch.cuda.stream(self._stream):
            return np.asarray(self._view(span).contiguous().cpu().numpy(), np.uint8)

    def transfer(self, span: Span, host: Bytes) -> DriverTransfer:
        return DriverTransfer(self._driver, span.memory.address + span.offset, host.ctypes.data)

    def copy(self, source: Span, target: Span) -> None:
        if source.contiguous and target.contiguous:
            addresses = (source.memory.address + source.offset, target.memory.address + target.offset)
            self._driver.copy(*addresses, source.num_rows * source.row_bytes)
            return
        with torch.cuda.stream(self._stream):
            self._view(target).copy_(self._view(source))

    def reaches(self, other: Device) -> bool:
        return isinstance(other, TorchDevice)

    def copy_from(self, owner: Device, source: Span, target: Span) -> None:
        if not isinstance(owner, TorchDevice):
            raise TypeError("a copy from a device of another kind")
        if owner._index not in self._peers:
            self._peers.add(owner._index)
            self._open_peer(owner)
        num_copies = 1 if source.contiguous and target.contiguous else source.num_rows
        num_bytes = source.num_rows * source.row_bytes // num_copies
        for row in range(num_copies):
            start, end = (span.memory.address + span.offset + row * span.pitch_bytes for span in (source, target))
            self._driver.copy_from(owner._driver, start, end, num_bytes)

    def _open_peer(self, owner: "TorchDevice") -> None:
        """Before the first copy from a card: have it come straight from there, if that can be relied on."""
        pair = f"{self.name} from {owner.name}"
        if not torch.cuda.can_device_access_peer(self._index, owner._index):
            _log.info("copies to %s: no peer access between the cards, the driver stages them in host memory", pair)
            return
        self._driver.allow_peer(owner._driver)
        if self._copies_faithfully(owner):
            _log.info("copies to %s: peer access is on", pair)
            return
        self._driver.forbid_peer(owner._driver)
        _log.warning("copies to %s: peer access is offered and does not work (IOMMU?); it stays off", pair)

    def _copies_faithfully(self, owner: "TorchDevice") -> bool:
        """Some boards and drivers offer peer access and deliver something else."""
        there = torch.arange(1, _PEER_TEST_VALUES + 1, dtype=torch.int32, device=owner._device)
        torch.cuda.current_stream(owner._device).synchronize()
        with torch.cuda.stream(self._stream):
            here = torch.zeros(_PEER_TEST_VALUES, dtype=torch.int32, device=self._device)
            self._driver.copy_from(owner._driver, there.data_ptr(), here.data_ptr(), 4 * _PEER_TEST_VALUES)
            return bool((here.cpu() == there.cpu()).all())

    def computing(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)  # type: ignore[no-any-return]

    def array(self, values: Bytes) -> Any:
        with torch.cuda.stream(self._stream):
            return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def store(self, memory: Memory, offset: int, array: Any) -> None:
        tensor, _ = memory.handle
        with torch.cuda.stream(self._stream):
            flat = array.reshape(-1)
            tensor[offset : offset + flat.numel()].copy_(flat)
        self._aside.join()

    def alloc_pinned(self, num_bytes: int) -> Bytes:
        return np.asarray(torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True).numpy())

    # -- programs

    def prepare(self, programs: Sequence[Program]) -> None:
        """Compile what is missing, in parallel, and load it."""
        missing = [program for program in dict.fromkeys(programs) if program not in self._kernels]
        keys = {(program.file, program.options) for program in missing} - self._modules.keys()
        if keys:
            with ThreadPoolExecutor(_COMPILER_THREADS) as pool:
                self._modules.update(zip(keys, pool.map(self._compile, keys), strict=True))
        for program in missing:
            self._kernels[program] = _Kernel(self._modules[program.file, program.options], program)

    def _compile(self, key: tuple[str, tuple[str, ...]]) -> Any:
        file, options = key
        with cupy.cuda.Device(self._index):
            module = cupy.RawModule(code=source_text(file), options=(*_OPTIONS, *options))
            module.compile()
        return module

    # -- calls

    def run(self, call: Call) -> None:
        if isinstance(call, ProductCall):
            self._aside.begin_reading(call.weight.memory.address)
            try:
                self._multiply(call)
            except torch.OutOfMemoryError:
                raise self._no_room("a matrix product") from None
            self._aside.end_reading(call.weight.memory.address)
            return
        kernel = self._kernels.get(call.program)
        if kernel is None:
            self.prepare([call.program])
            kernel = self._kernels[call.program]
        if call.shared_bytes > kernel.allowed_shared_bytes:
            self._driver.allow_shared_bytes(kernel.function, call.shared_bytes)
            kernel.allowed_shared_bytes = call.shared_bytes
        kernel.packing.pack_into(kernel.buffer, call.args)
        scratch = None if call.fills is None else call.fills.address
        driver = self._driver if scratch is None else self._aside.begin_filling(scratch)
        driver.launch(kernel.function, call.grid, call.num_threads, call.shared_bytes, kernel.arguments)
        if scratch is not None:
            self._aside.end_filling(scratch)

    def _multiply(self, call: ProductCall) -> None:
        if torch.cuda.current_stream(self._device) != self._stream:  # cheaper than a context a product
            torch.cuda.set_stream(self._stream)
        x, weight, out = _tensor(call.x), _tensor(call.weight).t(), _tensor(call.out)
        if x.dtype is torch.float32:
            if call.accumulate:
                torch.addmm(out, x, weight, out=out)
            else:
                torch.mm(x, weight, out=out)
        elif call.accumulate:
            torch.addmm(out, x, weight, out_dtype=torch.float32, out=out)
        else:
            torch.mm(x, weight, out_dtype=torch.float32, out=out)

    def capture(self, calls: Sequence[Call]) -> ExecutableGraph:
        def launch_all() -> None:
            for call in calls:
                self.run(call)

        self.prepare([call.program for call in calls if isinstance(call, KernelCall)])
        return self._aside.capture(launch_all)

    # -- order

    def synchronize(self) -> None:
        self._stream.synchronize()

    def bind_to_thread(self) -> None:
        torch.cuda.set_device(self._index)
        self._warm_up_cublas()  # torch keeps a cuBLAS handle per thread, and one cannot be made inside a capture

    def create_event(self, *, timed: bool = False) -> Any:
        return self._driver.create_event(timed=timed)

    def elapsed_s(self, start: Any, end: Any) -> float:
        return self._driver.elapsed_s(start, end)

    def record_event(self, event: Any) -> None:
        self._driver.record(event)

    def wait_event(self, event: Any) -> None:
        self._driver.wait(event)

    def event_done(self, event: Any) -> bool:
        return self._driver.is_done(event)

    def follow(self, event: Any) -> None:
        self._driver.follow(event)

    def close(self) -> None:
        """Unload nothing: modules and cuBLAS belong to the process."""
        self.synchronize()


def _tensor(matrix: Matrix) -> Any:
    """The matrix as a view, which its memory remembers: making views costs more than launching the product."""
    tensor, views = matrix.memory.handle
    key = (matrix.offset, matrix.rows, matrix.columns, matrix.stride, matrix.dtype)
    view = views.get(key)
    if view is None:
        size = matrix.dtype.itemsize
        end = matrix.offset + ((matrix.rows - 1) * matrix.stride + matrix.columns) * size
        flat = tensor[matrix.offset : end].view(_TORCH_DTYPES[matrix.dtype])
        view = views[key] = flat.as_strided((matrix.rows, matrix.columns), (matrix.stride, 1))
    return view
