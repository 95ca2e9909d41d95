"""The few calls of the CUDA driver that torch and cupy do not offer, through ctypes: launches with attributes, graphs.

Programmatic dependent launch needs cuLaunchKernelEx; capture by hand keeps graphs free of torch's memory pools and lets
them be destroyed at a known time. Owns no memory and no stream.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from lamina.kernels.backend import GraphError
from lamina.spec.errors import CapacityExceeded, LaminaError

_OUT_OF_MEMORY = 2  # others have taken what the driver needed
_PEER_ACCESS_ALREADY_ENABLED = 704
_CAPTURE_THREAD_LOCAL = 1  # other threads may allocate and synchronise during a capture
_ATTRIBUTE_DEPENDENT_LAUNCH = 6
_FUNCTION_MAX_DYNAMIC_SHARED = 8


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
    return ctypes.CDLL("libcuda.so.1")


class Driver:
    """Calls on one stream. `library` is libcuda, or what a test puts in its place."""

    def __init__(self, library: Any, stream: int, *, dependent_launch: bool) -> None:
        self._library = library
        self._stream = ctypes.c_void_p(stream)
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
        self._require(
            self._library.cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), arguments, None), "a launch"
        )

    def allow_shared_bytes(self, function: int, num_bytes: int) -> None:
        """Let a kernel have more dynamic shared memory than the default 48 KiB."""
        status = self._library.cuFuncSetAttribute(
            ctypes.c_void_p(function), _FUNCTION_MAX_DYNAMIC_SHARED, ctypes.c_int(num_bytes)
        )
        self._require(status, f"{num_bytes} bytes of shared memory")

    def upload(self, address: int, host_address: int, num_bytes: int) -> None:
        """Page-locked host memory to the device, in stream order."""
        status = self._library.cuMemcpyHtoDAsync_v2(
            ctypes.c_ulonglong(address), ctypes.c_void_p(host_address), ctypes.c_size_t(num_bytes), self._stream
        )
        self._require(status, "an upload")

    def download(self, host_address: int, address: int, num_bytes: int) -> None:
        """The device's memory to page-locked host memory, in stream order."""
        status = self._library.cuMemcpyDtoHAsync_v2(
            ctypes.c_void_p(host_address), ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes), self._stream
        )
        self._require(status, "a download")

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Within the device, in stream order."""
        status = self._library.cuMemcpyDtoDAsync_v2(
            ctypes.c_ulonglong(target), ctypes.c_ulonglong(source), ctypes.c_size_t(num_bytes), self._stream
        )
        self._require(status, "a copy")

    def copy_from(self, owner: "Driver", source: int, target: int, num_bytes: int) -> None:
        """From the memory of another device's driver, in the order of this one's stream.

        Where the cards cannot reach each other the driver stages it through the host, in stream order as well.
        """
        status = self._library.cuMemcpyPeerAsync(
            ctypes.c_ulonglong(target),
            self._context(),
            ctypes.c_ulonglong(source),
            owner._context(),
            ctypes.c_size_t(num_bytes),
            self._stream,
        )
        self._require(status, "a copy from another card")

    def allow_peer(self, owner: "Driver") -> None:
        """Have those copies go straight from card to card. On a thread bound to this device; allowed twice is fine."""
        status = self._library.cuCtxEnablePeerAccess(owner._context(), ctypes.c_uint(0))
        if status != _PEER_ACCESS_ALREADY_ENABLED:
            self._require(status, "peer access")

    def forbid_peer(self, owner: "Driver") -> None:
        """Undo `allow_peer`."""
        self._require(self._library.cuCtxDisablePeerAccess(owner._context()), "undoing peer access")

    def _context(self) -> ctypes.c_void_p:
        context = ctypes.c_void_p()
        self._require(self._library.cuStreamGetCtx(self._stream, ctypes.byref(context)), "the stream's context")
        return context

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
        status = library.cuGraphInstantiateWithFlags(ctypes.byref(executable), template, ctypes.c_ulonglong(0))
        self._destroy_template(template)
        if status:
            raise GraphError(f"cuda: the graph could not be instantiated: {self._name(status)}")
        return DriverGraph(self, executable)

    def launch_graph(self, executable: ctypes.c_void_p) -> None:
        self._require(self._library.cuGraphLaunch(executable, self._stream), "a graph launch")

    def destroy_graph(self, executable: ctypes.c_void_p) -> None:
        self._require(self._library.cuGraphExecDestroy(executable), "destroying a graph")

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
        self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
        return (name.value or b"").decode() or f"error {status}"


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
