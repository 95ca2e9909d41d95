"""Calls of the CUDA driver through ctypes: what torch and cupy do not offer, and what every step does.

Programmatic dependent launch needs cuLaunchKernelEx; capture by hand keeps graphs free of torch's memory pools and lets
them be destroyed at a known time. Copies and events are cheaper from here than through torch. Owns no memory and no
stream.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from lamina.kernels.backend import GraphError
from lamina.spec.errors import CapacityExceeded, LaminaError

_OUT_OF_MEMORY = 2  # others have taken what the driver needed
_NOT_READY = 600
_PEER_ACCESS_ALREADY_ENABLED = 704
_CAPTURE_THREAD_LOCAL = 1  # other threads may allocate and synchronise during a capture
_ATTRIBUTE_DEPENDENT_LAUNCH = 6
_FUNCTION_MAX_DYNAMIC_SHARED = 8
_EVENT_DISABLE_TIMING = 2

_pointer, _address, _size = ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_size_t
# Declared types convert Python's integers, at their full width, faster than an object made for each would be.
_ARGUMENTS: dict[str, tuple[type[Any], ...]] = {
    "cuLaunchKernelEx": (_pointer, _pointer, _pointer, _pointer),
    "cuFuncSetAttribute": (_pointer, ctypes.c_int, ctypes.c_int),
    "cuMemcpyHtoDAsync_v2": (_address, _pointer, _size, _pointer),
    "cuMemcpyDtoHAsync_v2": (_pointer, _address, _size, _pointer),
    "cuMemcpyDtoDAsync_v2": (_address, _address, _size, _pointer),
    "cuMemcpyPeerAsync": (_address, _pointer, _address, _pointer, _size, _pointer),
    "cuCtxEnablePeerAccess": (_pointer, ctypes.c_uint),
    "cuCtxDisablePeerAccess": (_pointer,),
    "cuStreamGetCtx": (_pointer, _pointer),
    "cuStreamBeginCapture_v2": (_pointer, ctypes.c_int),
    "cuStreamEndCapture": (_pointer, _pointer),
    "cuStreamWaitEvent": (_pointer, _pointer, ctypes.c_uint),
    "cuGraphInstantiateWithFlags": (_pointer, _pointer, _address),
    "cuGraphLaunch": (_pointer, _pointer),
    "cuGraphDestroy": (_pointer,),
    "cuGraphExecDestroy": (_pointer,),
    "cuEventCreate": (_pointer, ctypes.c_uint),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventQuery": (_pointer,),
    "cuEventSynchronize": (_pointer,),
    "cuEventElapsedTime": (_pointer, _pointer, _pointer),
    "cuEventDestroy_v2": (_pointer,),
    "cuGetErrorName": (ctypes.c_int, _pointer),
}


class CudaError(LaminaError):
    """A call of the CUDA driver failed."""


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


def load_driver() -> Any:
    """The driver's library. Raises OSError where there is no NVIDIA driver."""
    return declared(ctypes.CDLL("libcuda.so.1"))


def declared(library: Any) -> Any:
    """The library, its functions told what they take."""
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


class Driver:
    """Calls on one stream. `library` is `declared`, or what a test puts in its place."""

    def __init__(self, library: Any, stream: int, *, dependent_launch: bool) -> None:
        self._library = library
        self._stream = ctypes.c_void_p(stream)
        self._stream_context = ctypes.c_void_p()  # once another card has asked for it
        self._attribute = _LaunchAttribute(_ATTRIBUTE_DEPENDENT_LAUNCH, b"", 1, b"")
        self._config = _LaunchConfig()
        self._config.stream = stream
        if dependent_launch:
            self._config.attributes = ctypes.pointer(self._attribute)
            self._config.num_attributes = 1

    def launch(
        self, function: int, grid: tuple[int, int, int], num_threads: int, shared_bytes: int, arguments: Any
    ) -> None:
        """Launch a kernel; `arguments` is an array of addresses of its parameters, which are copied."""
        config = self._config
        config.grid[:] = grid
        config.block[:] = (num_threads, 1, 1)
        config.shared_bytes = shared_bytes
        self._require(self._library.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None), "a launch")

    def allow_shared_bytes(self, function: int, num_bytes: int) -> None:
        """Let a kernel have more dynamic shared memory than the default 48 KiB."""
        status = self._library.cuFuncSetAttribute(function, _FUNCTION_MAX_DYNAMIC_SHARED, num_bytes)
        self._require(status, f"{num_bytes} bytes of shared memory")

    def upload(self, address: int, host_address: int, num_bytes: int) -> None:
        """Page-locked host memory to the device, in stream order."""
        status = self._library.cuMemcpyHtoDAsync_v2(address, host_address, num_bytes, self._stream)
        self._require(status, "an upload")

    def download(self, host_address: int, address: int, num_bytes: int) -> None:
        """The device's memory to page-locked host memory, in stream order."""
        status = self._library.cuMemcpyDtoHAsync_v2(host_address, address, num_bytes, self._stream)
        self._require(status, "a download")

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Within the device, in stream order."""
        status = self._library.cuMemcpyDtoDAsync_v2(target, source, num_bytes, self._stream)
        self._require(status, "a copy")

    def copy_from(self, owner: "Driver", source: int, target: int, num_bytes: int) -> None:
        """From the memory of another device's driver, in the order of this one's stream.

        Where the cards cannot reach each other the driver stages it through the host, in stream order as well.
        """
        contexts = self._context(), owner._context()
        status = self._library.cuMemcpyPeerAsync(target, contexts[0], source, contexts[1], num_bytes, self._stream)
        self._require(status, "a copy from another card")

    def allow_peer(self, owner: "Driver") -> None:
        """Have those copies go straight from card to card. On a thread bound to this device; allowed twice is fine."""
        status = self._library.cuCtxEnablePeerAccess(owner._context(), 0)
        if status != _PEER_ACCESS_ALREADY_ENABLED:
            self._require(status, "peer access")

    def forbid_peer(self, owner: "Driver") -> None:
        """Undo `allow_peer`."""
        self._require(self._library.cuCtxDisablePeerAccess(owner._context()), "undoing peer access")

    def _context(self) -> ctypes.c_void_p:
        if not self._stream_context.value:
            status = self._library.cuStreamGetCtx(self._stream, ctypes.byref(self._stream_context))
            self._require(status, "the stream's context")
        return self._stream_context

    def capture(self, launch_all: Callable[[], None]) -> "DriverGraph":
        """What `launch_all` launches, as a graph. Raises GraphError; then no capture is open, no graph lost (B-09)."""
        library = self._library
        status = library.cuStreamBeginCapture_v2(self._stream, _CAPTURE_THREAD_LOCAL)
        if status:
            raise GraphError(f"cuda: capture could not begin: {self._name(status)}")
        template = ctypes.c_void_p()
        try:
            launch_all()
        except BaseException:
            library.cuStreamEndCapture(self._stream, ctypes.byref(template))
            self._destroy_template(template)
            raise
        status = library.cuStreamEndCapture(self._stream, ctypes.byref(template))
        if status:
            self._destroy_template(template)
            raise GraphError(f"cuda: the capture was broken: {self._name(status)}")
        executable = ctypes.c_void_p()
        status = library.cuGraphInstantiateWithFlags(ctypes.byref(executable), template, 0)
        self._destroy_template(template)
        if status:
            raise GraphError(f"cuda: the graph could not be instantiated: {self._name(status)}")
        return DriverGraph(self, executable)

    def launch_graph(self, executable: ctypes.c_void_p) -> None:
        self._require(self._library.cuGraphLaunch(executable, self._stream), "a graph launch")

    def destroy_graph(self, executable: ctypes.c_void_p) -> None:
        self._require(self._library.cuGraphExecDestroy(executable), "destroying a graph")

    # -- events

    def create_event(self, *, timed: bool) -> "DriverEvent":
        """A point of this device's streams, to be recorded. On a thread bound to the device."""
        handle = ctypes.c_void_p()
        flags = 0 if timed else _EVENT_DISABLE_TIMING
        self._require(self._library.cuEventCreate(ctypes.byref(handle), flags), "an event")
        return DriverEvent(self._library, handle)

    def record(self, event: "DriverEvent") -> None:
        """The stream's present end."""
        self._require(self._library.cuEventRecord(event.handle, self._stream), "recording an event")

    def is_done(self, event: "DriverEvent") -> bool:
        """Whether what was launched before it is done; raises CudaError if that has failed."""
        status = self._library.cuEventQuery(event.handle)
        if status == _NOT_READY:
            return False
        self._require(status, "a step")
        return True

    def wait(self, event: "DriverEvent") -> None:
        """Block the calling thread until it is."""
        self._require(self._library.cuEventSynchronize(event.handle), "a step")

    def follow(self, event: "DriverEvent") -> None:
        """What is launched on this stream from now on runs after the event, which may be another device's."""
        self._require(self._library.cuStreamWaitEvent(self._stream, event.handle, 0), "waiting for an event")

    def elapsed_s(self, start: "DriverEvent", end: "DriverEvent") -> float:
        """Between two timed events that are done."""
        elapsed_ms = ctypes.c_float()
        status = self._library.cuEventElapsedTime(ctypes.byref(elapsed_ms), start.handle, end.handle)
        self._require(status, "timing two events")
        return elapsed_ms.value / 1e3

    def _destroy_template(self, template: ctypes.c_void_p) -> None:
        if template.value:
            self._library.cuGraphDestroy(template)

    def _require(self, status: int, what: str) -> None:
        if status == _OUT_OF_MEMORY:
            raise CapacityExceeded(f"cuda: no memory is left for {what}")
        if status:
            raise CudaError(f"cuda: {what} failed: {self._name(status)}")

    def _name(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(name))
        return (name.value or b"").decode() or f"error {status}"


class DriverTransfer:
    """A place of the device and one in page-locked memory of the host."""

    def __init__(self, driver: Driver, address: int, host_address: int) -> None:
        self._driver = driver
        self._address = address
        self._host_address = host_address

    def upload(self, num_bytes: int) -> None:
        self._driver.upload(self._address, self._host_address, num_bytes)

    def download(self, num_bytes: int) -> None:
        self._driver.download(self._host_address, self._address, num_bytes)


class DriverEvent:
    """An event of the driver, which goes with the object."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self.handle = handle

    def __del__(self) -> None:
        self._library.cuEventDestroy_v2(self.handle)  # a context that is gone has taken it along


class DriverGraph:
    """An instantiated graph; the template it came from is gone."""

    def __init__(self, driver: Driver, executable: ctypes.c_void_p) -> None:
        self._driver = driver
        self._executable: ctypes.c_void_p | None = executable

    def launch(self) -> None:
        if self._executable is None:
            raise GraphError("cuda: launch of a destroyed graph")
        self._driver.launch_graph(self._executable)

    def destroy(self) -> None:
        """Free it; a second time does nothing."""
        executable, self._executable = self._executable, None
        if executable is not None:
            self._driver.destroy_graph(executable)
