"""One GPU through the CUDA driver: what it is, its memory, page-locked memory of the host, streams and modules.

Everything lives in the card's primary context, where cuBLAS works as well. A `Card` owns what was allocated, created
and loaded through it, except the host's memory, which goes with its arrays. One compute thread; other threads may ask
for `memory_bytes`.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import numpy as np

from lamina.kernels.backend import Unsupported
from lamina.kernels.cuda.device import Bytes
from lamina.kernels.cuda.libcuda import error_name, require
from lamina.kernels.cuda.policy import ComputeCapability

_NUM_MULTIPROCESSORS, _INTEGRATED, _MAJOR, _MINOR = 16, 18, 75, 76  # CU_DEVICE_ATTRIBUTE_*
_NO_DEVICE = 100  # CUDA_VISIBLE_DEVICES may have hidden them all
_STREAM_NON_BLOCKING = 1  # of the process's default stream
_NAME_BYTES = 256
_bound = threading.local()  # the card that a thread is bound to


def num_cards(library: Any) -> int:
    """GPUs that this process may use; none where the driver cannot start (no card, another driver's module)."""
    count = ctypes.c_int()
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


class Card:
    """See the module docstring. `library` is `libcuda.load_driver`'s, or what a test puts in its place."""

    def __init__(self, library: Any, index: int) -> None:
        """Raises Unsupported if there is no card of this index."""
        status = library.cuInit(0)
        if status not in (0, _NO_DEVICE):  # a driver that was updated and not loaded anew, a card that hangs
            reason = error_name(library, status)
            raise Unsupported(f"the NVIDIA driver does not start: {reason}; see what nvidia-smi says, or reboot")
        count = num_cards(library)
        if index >= count:
            raise Unsupported(f"cuda:{index} is not there: the NVIDIA driver shows {count} GPUs")
        self.index = index
        self._library = library
        self._device = ctypes.c_int()
        self._ask("the card", library.cuDeviceGet, ctypes.byref(self._device), index)
        self._context = ctypes.c_void_p()
        self._allocated: set[int] = set()
        self._streams: list[ctypes.c_void_p] = []
        self._modules: list[ctypes.c_void_p] = []
        self._pinned_to_free: list[int] = []
        self.name = f"{self._read_name()} (cuda:{index})"
        self.compute_capability: ComputeCapability = (self._attribute(_MAJOR), self._attribute(_MINOR))
        self.num_multiprocessors = self._attribute(_NUM_MULTIPROCESSORS)
        self.shares_host_memory = bool(self._attribute(_INTEGRATED))
        self.uuid = self._read_uuid()

    def open(self) -> None:
        """Make its context, or share the process's, and make it current for the calling thread."""
        self._ask("a context", self._library.cuDevicePrimaryCtxRetain, ctypes.byref(self._context), self._device.value)
        self.bind_to_thread()

    def bind_to_thread(self) -> None:
        """Make the card current for the calling thread; next to free where it is so already."""
        if getattr(_bound, "card", None) is not self:
            self._ask("binding a thread", self._library.cuCtxSetCurrent, self._context)
            _bound.card = self

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it current for the calling thread, and then what was so before."""
        self._ask("binding a thread", self._library.cuCtxPushCurrent_v2, self._context)
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def can_access(self, other: "Card") -> bool:
        """Whether it could read the other card's memory directly."""
        answer = ctypes.c_int()
        ask = self._library.cuDeviceCanAccessPeer
        self._ask("peer access", ask, ctypes.byref(answer), self._device.value, other._device.value)
        return bool(answer.value)

    # -- memory

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes now, by the driver."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.current():
            self._ask("the free memory", self._library.cuMemGetInfo_v2, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, num_bytes: int) -> int:
        """Address of new memory, aligned to 256 bytes, with anything in it. Raises CapacityExceeded."""
        address = ctypes.c_void_p()
        with self.current():
            self._ask(f"{num_bytes / 2**20:.1f} MiB", self._library.cuMemAlloc_v2, ctypes.byref(address), num_bytes)
        self._allocated.add(address.value or 0)
        return address.value or 0

    def free(self, address: int) -> None:
        """Give memory back, once what uses it is done."""
        self._allocated.remove(address)
        with self.current():
            self._ask("freeing memory", self._library.cuMemFree_v2, address)

    def write(self, address: int, values: Bytes) -> None:
        """Host bytes to the card, beside its streams; they are there when it returns."""
        with self.current():
            self._ask("an upload", self._library.cuMemcpyHtoD_v2, address, values.ctypes.data, values.nbytes)
            # the call returns once the bytes are in the driver's own page-locked memory
            self._ask("an upload", self._library.cuStreamSynchronize, None)

    def read(self, address: int, num_bytes: int) -> Bytes:
        """Bytes of the card, beside its streams."""
        values = np.empty(num_bytes, np.uint8)
        with self.current():
            self._ask("a download", self._library.cuMemcpyDtoH_v2, values.ctypes.data, address, num_bytes)
        return values

    def alloc_pinned(self, num_bytes: int) -> Bytes:
        """Zeroed page-locked host memory, which is given back at a later call once the array is gone."""
        address = ctypes.c_void_p()
        with self.current():
            self._free_pinned()
            what = f"{num_bytes} bytes of page-locked memory"
            self._ask(what, self._library.cuMemHostAlloc, ctypes.byref(address), max(num_bytes, 1), 0)
        values: Bytes = np.asarray(_Pinned(address.value or 0, num_bytes, self._pinned_to_free))
        values[:] = 0
        return values

    def _free_pinned(self) -> None:
        while self._pinned_to_free:
            self._library.cuMemFreeHost(self._pinned_to_free.pop())

    # -- streams and modules

    def create_stream(self) -> int:
        """A stream that does not wait for the process's default one; on a bound thread."""
        stream = ctypes.c_void_p()
        self._ask("a stream", self._library.cuStreamCreate, ctypes.byref(stream), _STREAM_NON_BLOCKING)
        self._streams.append(stream)
        return stream.value or 0

    def load_module(self, image: bytes) -> ctypes.c_void_p:
        """Machine code, or PTX ending in a zero byte; on a bound thread."""
        module = ctypes.c_void_p()
        self._ask("loading a module", self._library.cuModuleLoadData, ctypes.byref(module), image)
        self._modules.append(module)
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> int:
        """The handle of a module's kernel."""
        function = ctypes.c_void_p()
        find = self._library.cuModuleGetFunction
        self._ask(f"finding the kernel {name}", find, ctypes.byref(function), module, name.encode())
        return function.value or 0

    def close(self) -> None:
        """Free all that is left, once its streams are done. The context stays, it belongs to the process."""
        library = self._library
        with self.current():
            for stream in self._streams:
                library.cuStreamSynchronize(stream)  # a failure has been reported where it was waited for
                library.cuStreamDestroy_v2(stream)
            for address in self._allocated:
                library.cuMemFree_v2(address)
            for module in self._modules:
                library.cuModuleUnload(module)
            self._free_pinned()
        self._streams.clear()
        self._allocated.clear()
        self._modules.clear()

    # -- calls

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        self._ask(
            "an attribute", self._library.cuDeviceGetAttribute, ctypes.byref(value), attribute, self._device.value
        )
        return value.value

    def _read_name(self) -> str:
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._ask("the card's name", self._library.cuDeviceGetName, name, _NAME_BYTES, self._device.value)
        return name.value.decode(errors="replace")

    def _read_uuid(self) -> str:
        value = ctypes.create_string_buffer(16)
        self._ask("the card's UUID", self._library.cuDeviceGetUuid_v2, value, self._device.value)
        return str(UUID(bytes=value.raw))

    def _ask(self, what: str, function: Any, *args: Any) -> None:
        require(self._library, function(*args), what)


class _Pinned:
    """Page-locked memory as numpy takes it; when the last array is gone, its address waits to be freed.

    Not freed at once: that may happen within a capture, which it would break.
    """

    def __init__(self, address: int, num_bytes: int, to_free: list[int]) -> None:
        self._address = address
        self._to_free = to_free
        self.__array_interface__ = {"data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._to_free.append(self._address)
