"""The `Device` of a real GPU: the driver for memory, launches and graphs, NVRTC for kernels, cuBLAS for products.

Everything runs on streams of its own, so that other users of the process's default stream neither wait for it nor
disturb it. One compute thread.
"""

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from lamina.kernels.backend import EventProbe
from lamina.kernels.cuda.card import Card
from lamina.kernels.cuda.compiler import Compiler, Nvrtc, Source
from lamina.kernels.cuda.cublas import Cublas
from lamina.kernels.cuda.device import Bytes, Call, Device, ExecutableGraph, KernelCall, Memory, ProductCall, Span
from lamina.kernels.cuda.driver import Driver, Rows
from lamina.kernels.cuda.libcuda import driver_version
from lamina.kernels.cuda.policy import DEPENDENT_LAUNCH, HOPPER, compile_target, free_bytes, require_supported
from lamina.kernels.cuda.programs import Program, packing_of, source_text
from lamina.spec.errors import CapacityExceeded

_log = logging.getLogger(__name__)
_DEFAULT_SHARED_BYTES = 48 << 10
_PEER_TEST_VALUES = 1 << 16
_COPY_WORDS, _COPY_THREADS, _WORD_BYTES = Program("rows.cu", "copy_words"), 256, 4
_SMALL_BYTES = 64 << 10


class _Kernel:
    """A loaded entry point, and the buffer its arguments are packed into."""

    def __init__(self, function: int, program: Program) -> None:
        packing = packing_of(program.file, program.function)
        self.function = function
        self.packing = packing
        self.buffer = bytearray(packing.num_bytes)
        base = ctypes.addressof((ctypes.c_char * packing.num_bytes).from_buffer(self.buffer))
        self.arguments = (ctypes.c_void_p * len(packing.offsets))(*(base + offset for offset in packing.offsets))
        self.allowed_shared_bytes = _DEFAULT_SHARED_BYTES


class _Transfer:
    """A place of the device and one in page-locked memory of the host.

    Small ones are made by a kernel. The driver's own took 12 to 26 us of the host's time each beside an H200, and run
    on another engine of the card, which is waited for.
    """

    def __init__(self, device: "CudaDevice", address: int, host_address: int) -> None:
        self._device = device
        self._address = address
        self._host_address = host_address
        self._in_words = (address | host_address) % _WORD_BYTES == 0

    def upload(self, num_bytes: int) -> None:
        if self._is_small(num_bytes):
            self._device._copy_words(self._host_address, self._address, num_bytes // _WORD_BYTES)
        else:
            self._device._on_card.upload_pinned(self._address, self._host_address, num_bytes)

    def download(self, num_bytes: int) -> None:
        if self._is_small(num_bytes):
            self._device._copy_words(self._address, self._host_address, num_bytes // _WORD_BYTES)
        else:
            self._device._on_card.download_pinned(self._host_address, self._address, num_bytes)

    def _is_small(self, num_bytes: int) -> bool:
        return self._in_words and 0 < num_bytes <= _SMALL_BYTES and num_bytes % _WORD_BYTES == 0


class Libraries(NamedTuple):
    """The driver and what a worker needs of a toolkit: shared libraries with declared functions, or what a test has."""

    driver: Any
    nvrtc: Any
    cublas: Any


class CudaDevice:
    """The index-th GPU. Raises Unsupported if there is none, or if these libraries cannot run it (B-08)."""

    def __init__(self, index: int, libraries: Libraries, kernel_folder: Path) -> None:
        """Compiled kernels are kept in `kernel_folder`."""
        card = self._card = Card(libraries.driver, index)
        nvrtc = Nvrtc(libraries.nvrtc)
        require_supported(card.name, card.compute_capability, driver_version(libraries.driver), nvrtc.version)
        self.name = card.name
        self.compute_capability = card.compute_capability
        self.num_multiprocessors = card.num_multiprocessors
        self.uuid = card.uuid
        self._compiler = Compiler(nvrtc, compile_target(card.compute_capability, nvrtc.capabilities), kernel_folder)
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._kernels: dict[Program, _Kernel] = {}
        self._peers: set[int] = set()  # cards copied from so far
        card.open()
        stream = card.create_stream()
        dependent_launch = card.compute_capability >= DEPENDENT_LAUNCH
        self._driver = Driver(libraries.driver, stream, dependent_launch=dependent_launch)
        workspace_bytes = (32 if card.compute_capability >= HOPPER else 8) << 20
        self._cublas = Cublas(libraries.cublas, stream, card.allocate(workspace_bytes), workspace_bytes)

    @property
    def _on_card(self) -> Driver:
        """The driver, with this card current for the calling thread: handles of one mean nothing to another."""
        self._card.bind_to_thread()
        return self._driver

    # -- memory

    def memory_bytes(self) -> tuple[int, int]:
        free, total = self._card.memory_bytes()
        available = psutil.virtual_memory().available if self._card.shares_host_memory else None
        return free_bytes(free, available), total

    def allocate(self, num_bytes: int) -> Memory:
        try:
            address = self._card.allocate(max(num_bytes, 1))
        except CapacityExceeded:
            free, total = self.memory_bytes()
            raise CapacityExceeded(
                f"no room for {num_bytes / 2**20:.1f} MiB on {self.name}:"
                f" {free / 2**20:.1f} of {total / 2**20:.1f} MiB are free"
            ) from None
        self._on_card.zero(address, max(num_bytes, 1))
        return Memory(address, num_bytes)

    def release(self, memory: Memory) -> None:
        self._card.free(memory.address)

    def upload(self, span: Span, values: Bytes) -> None:
        host = np.ascontiguousarray(values)
        if span.contiguous:
            self._on_card.upload(span.address, host.ctypes.data, host.nbytes)
        else:
            self._on_card.copy_rows(Rows(host.ctypes.data, span.row_bytes, on_host=True), _rows(span), *span.shape)
        self._on_card.synchronize()

    def download(self, span: Span) -> Bytes:
        host = np.empty(span.shape, np.uint8)
        if span.contiguous:
            self._on_card.download(host.ctypes.data, span.address, host.nbytes)
        else:
            self._on_card.copy_rows(_rows(span), Rows(host.ctypes.data, span.row_bytes, on_host=True), *span.shape)
        self._on_card.synchronize()
        return host

    def transfer(self, span: Span, host: Bytes) -> _Transfer:
        self.prepare([_COPY_WORDS])
        return _Transfer(self, span.address, host.ctypes.data)

    def _copy_words(self, source: int, target: int, count: int) -> None:
        kernel = self._kernels[_COPY_WORDS]
        kernel.packing.pack_into(kernel.buffer, (source, target, count))
        grid = (-(-count // _COPY_THREADS), 1, 1)
        self._on_card.launch(kernel.function, grid, _COPY_THREADS, 0, kernel.arguments, keeps_interpreter=True)

    def copy(self, source: Span, target: Span) -> None:
        if source.contiguous and target.contiguous:
            self._on_card.copy(source.address, target.address, source.num_rows * source.row_bytes)
        else:
            self._on_card.copy_rows(_rows(source), _rows(target), *source.shape)

    def alloc_pinned(self, num_bytes: int) -> Bytes:
        return self._card.alloc_pinned(num_bytes)

    # -- another card's memory

    def reaches(self, other: Device) -> bool:
        return isinstance(other, CudaDevice)

    def copy_from(self, owner: Device, source: Span, target: Span) -> None:
        if not isinstance(owner, CudaDevice):
            raise TypeError("a copy from a device of another kind")
        if owner._card.index not in self._peers:
            self._peers.add(owner._card.index)
            self._open_peer(owner)
        num_copies = 1 if source.contiguous and target.contiguous else source.num_rows
        num_bytes = source.num_rows * source.row_bytes // num_copies
        for row in range(num_copies):
            start, end = (span.address + row * span.pitch_bytes for span in (source, target))
            self._on_card.copy_from(owner._driver, start, end, num_bytes)

    def _open_peer(self, owner: "CudaDevice") -> None:
        """Before the first copy from a card: have it come straight from there, if that can be relied on."""
        if owner._card.index == self._card.index:
            return
        pair = f"{self.name} from {owner.name}"
        if not self._card.can_access(owner._card):
            _log.info("copies to %s: no peer access between the cards, the driver stages them in host memory", pair)
            return
        self._on_card.allow_peer(owner._driver)
        if self._copies_faithfully(owner):
            _log.info("copies to %s: peer access is on", pair)
            return
        self._on_card.forbid_peer(owner._driver)
        _log.warning("copies to %s: peer access is offered and does not work (IOMMU?); it stays off", pair)

    def _copies_faithfully(self, owner: "CudaDevice") -> bool:
        """Some boards and drivers offer peer access and deliver something else. Keeps off the owner's streams."""
        values = np.arange(1, _PEER_TEST_VALUES + 1, dtype=np.int32).view(np.uint8)
        there, here = owner._card.allocate(values.nbytes), self._card.allocate(values.nbytes)
        try:
            owner._card.write(there, values)
            self._card.write(here, np.zeros_like(values))
            self._on_card.copy_from(owner._driver, there, here, values.nbytes)
            self._on_card.synchronize()
            return np.array_equal(self._card.read(here, values.nbytes), values)
        finally:
            owner._card.free(there)
            self._card.free(here)

    # -- programs

    def prepare(self, programs: Sequence[Program]) -> None:
        missing = [program for program in dict.fromkeys(programs) if program not in self._kernels]
        keys = {(program.file, program.options): None for program in missing}.keys() - self._modules.keys()
        sources = [Source(file, source_text(file), options) for file, options in keys]
        self._card.bind_to_thread()
        for source, code in zip(sources, self._compiler.compile_all(sources), strict=True):
            self._modules[source.name, source.options] = self._card.load_module(code)
        for program in missing:
            module = self._modules[program.file, program.options]
            self._kernels[program] = _Kernel(self._card.function(module, program.function), program)

    # -- calls

    def run(self, call: Call) -> None:
        if isinstance(call, ProductCall):
            self._card.bind_to_thread()
            self._cublas.multiply(call)
            return
        kernel = self._kernels.get(call.program)
        if kernel is None:
            self.prepare([call.program])
            kernel = self._kernels[call.program]
        if call.shared_bytes > kernel.allowed_shared_bytes:
            self._on_card.allow_shared_bytes(kernel.function, call.shared_bytes)
            kernel.allowed_shared_bytes = call.shared_bytes
        kernel.packing.pack_into(kernel.buffer, call.args)
        self._on_card.launch(kernel.function, call.grid, call.num_threads, call.shared_bytes, kernel.arguments)

    def capture(self, calls: Sequence[Call]) -> ExecutableGraph:
        def launch_all() -> None:
            for call in calls:
                self.run(call)

        self.prepare([call.program for call in calls if isinstance(call, KernelCall)])
        return self._on_card.capture(launch_all)

    # -- order

    def synchronize(self) -> None:
        self._on_card.synchronize()

    def bind_to_thread(self) -> None:
        self._card.bind_to_thread()

    def create_event(self, *, timed: bool = False) -> Any:
        return self._on_card.create_event(timed=timed)

    def elapsed_s(self, start: Any, end: Any) -> float:
        return self._on_card.elapsed_s(start, end)

    def record_event(self, event: Any) -> None:
        self._on_card.record(event)

    def wait_event(self, event: Any) -> None:
        self._on_card.wait(event)

    def event_done(self, event: Any) -> bool:
        return self._on_card.is_done(event)

    def event_probe(self, event: Any) -> EventProbe | None:
        return self._on_card.probe(event)

    def follow(self, event: Any) -> None:
        self._on_card.follow(event)

    def close(self) -> None:
        """Give back streams, kernels and all memory that was not released; the context belongs to the process."""
        self.synchronize()
        self._cublas.close()
        self._card.close()


def _rows(span: Span) -> Rows:
    return Rows(span.address, span.pitch_bytes)
