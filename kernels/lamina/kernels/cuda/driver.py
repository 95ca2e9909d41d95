"""What happens on a stream of a GPU, by the CUDA driver: launches, copies, events, captures. Owns no memory, no stream.

Programmatic dependent launch needs cuLaunchKernelEx; graphs captured by hand can be destroyed at a known time.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from lamina.kernels.backend import EventProbe, GraphError
from lamina.kernels.cuda.libcuda import error_name, holding_the_interpreter, require

_NOT_READY = 600
_PEER_ACCESS_ALREADY_ENABLED = 704
_CAPTURE_THREAD_LOCAL = 1  # other threads may allocate and synchronise during a capture
_ATTRIBUTE_DEPENDENT_LAUNCH = 6
_FUNCTION_MAX_DYNAMIC_SHARED = 8
_EVENT_DISABLE_TIMING = 2
_IN_HOST_MEMORY, _IN_DEVICE_MEMORY = 1, 2


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


class Rows(NamedTuple):
    """Where rows lie, `pitch_bytes` apart: in the device's memory, or in the host's."""

    address: int
    pitch_bytes: int
    on_host: bool = False


class _Place(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("memory_type", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_ulonglong),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _RowsCopy(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source", _Place),
        ("target", _Place),
        ("row_bytes", ctypes.c_size_t),
        ("num_rows", ctypes.c_size_t),
    )


def _place(rows: Rows) -> _Place:
    if rows.on_host:
        return _Place(memory_type=_IN_HOST_MEMORY, host=rows.address, pitch=rows.pitch_bytes)
    return _Place(memory_type=_IN_DEVICE_MEMORY, device=rows.address, pitch=rows.pitch_bytes)


class Driver:
    """Calls on one stream. `library` is `libcuda.load_driver`'s, or what a test puts in its place."""

    def __init__(self, library: Any, stream: int, *, dependent_launch: bool) -> None:
        self._library = library
        self._quick = holding_the_interpreter(library)
        self._stream = ctypes.c_void_p(stream)
        self._stream_context = ctypes.c_void_p()  # once another card has asked for it
        self._attribute = _LaunchAttribute(_ATTRIBUTE_DEPENDENT_LAUNCH, b"", 1, b"")
        self._config = _LaunchConfig()
        self._config.stream = stream
        if dependent_launch:
            self._config.attributes = ctypes.pointer(self._attribute)
            self._config.num_attributes = 1

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        arguments: Any,
        *,
        keeps_interpreter: bool = False,
    ) -> None:
        """Launch a kernel; `arguments` is an array of addresses of its parameters, which are copied.

        Many of them may fill the driver's queue and wait there, so other threads go on meanwhile; one that
        `keeps_interpreter` does not let them, which costs less.
        """
        config = self._config
        config.grid[:] = grid
        config.block[:] = (num_threads, 1, 1)
        config.shared_bytes = shared_bytes
        library = self._quick if keeps_interpreter else self._library
        self._require(library.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None), "a launch")

    def allow_shared_bytes(self, function: int, num_bytes: int) -> None:
        """Let a kernel have more dynamic shared memory than the default 48 KiB."""
        status = self._library.cuFuncSetAttribute(function, _FUNCTION_MAX_DYNAMIC_SHARED, num_bytes)
        self._require(status, f"{num_bytes} bytes of shared memory")

    def upload(self, address: int, host_address: int, num_bytes: int) -> None:
        """Any host memory to the device, in stream order: unless it is page-locked, this may wait for the stream."""
        status = self._library.cuMemcpyHtoDAsync_v2(address, host_address, num_bytes, self._stream)
        self._require(status, "an upload")

    def download(self, host_address: int, address: int, num_bytes: int) -> None:
        """The device's memory to any of the host, likewise."""
        status = self._library.cuMemcpyDtoHAsync_v2(host_address, address, num_bytes, self._stream)
        self._require(status, "a download")

    def upload_pinned(self, address: int, host_address: int, num_bytes: int) -> None:
        """`upload` of page-locked memory, which never waits."""
        status = self._quick.cuMemcpyHtoDAsync_v2(address, host_address, num_bytes, self._stream)
        self._require(status, "an upload")

    def download_pinned(self, host_address: int, address: int, num_bytes: int) -> None:
        """`download` to page-locked memory, which never waits."""
        status = self._quick.cuMemcpyDtoHAsync_v2(host_address, address, num_bytes, self._stream)
        self._require(status, "a download")

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Within the device, in stream order."""
        status = self._library.cuMemcpyDtoDAsync_v2(target, source, num_bytes, self._stream)
        self._require(status, "a copy")

    def copy_rows(self, source: Rows, target: Rows, num_rows: int, row_bytes: int) -> None:
        """In stream order; between page-locked host memory and the device, or within the device."""
        copy = _RowsCopy(_place(source), _place(target), row_bytes, num_rows)
        self._require(self._library.cuMemcpy2DAsync_v2(ctypes.byref(copy), self._stream), "a copy of rows")

    def zero(self, address: int, num_bytes: int) -> None:
        """Zero bytes of the device's memory, in stream order."""
        self._require(self._library.cuMemsetD8Async(address, 0, num_bytes, self._stream), "zeroing memory")

    def synchronize(self) -> None:
        """Block the calling thread until what was launched is done."""
        self._require(self._library.cuStreamSynchronize(self._stream), "a step")

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
        self._require(self._quick.cuGraphLaunch(executable, self._stream), "a graph launch")

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
        self._require(self._quick.cuEventRecord(event.handle, self._stream), "recording an event")

    def is_done(self, event: "DriverEvent") -> bool:
        """Whether what was launched before it is done; raises CudaError if that has failed."""
        status = self._quick.cuEventQuery(event.handle)
        if status == _NOT_READY:
            return False
        self._require(status, "a step")
        return True

    def probe(self, event: "DriverEvent") -> EventProbe:
        """`is_done` for native code."""
        query = ctypes.cast(self._library.cuEventQuery, ctypes.c_void_p)
        return EventProbe(query.value or 0, event.handle.value or 0, _NOT_READY)

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
        if status:
            require(self._library, status, what)

    def _name(self, status: int) -> str:
        return error_name(self._library, status)


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
