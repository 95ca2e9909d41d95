"""The CUDA driver's library: its functions, told what they take, and what their statuses mean.

Owns nothing. `Card` (memory, modules) and `Driver` (what happens on a stream) call it.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

from lamina.kernels.backend import Unsupported
from lamina.spec.errors import CapacityExceeded, LaminaError

_OUT_OF_MEMORY = 2  # others have taken what the driver needed

_pointer, _address, _size = ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_size_t
_int, _uint = ctypes.c_int, ctypes.c_uint
# Declared types convert Python's integers, at their full width, faster than an object made for each would be.
Arguments = Mapping[str, tuple[type[Any], ...]]
_ARGUMENTS: Arguments = {
    "cuInit": (_uint,),
    "cuDriverGetVersion": (_pointer,),
    "cuDeviceGetCount": (_pointer,),
    "cuDeviceGet": (_pointer, _int),
    "cuDeviceGetName": (_pointer, _int, _int),
    "cuDeviceGetUuid_v2": (_pointer, _int),
    "cuDeviceGetAttribute": (_pointer, _int, _int),
    "cuDeviceCanAccessPeer": (_pointer, _int, _int),
    "cuDevicePrimaryCtxRetain": (_pointer, _int),
    "cuCtxSetCurrent": (_pointer,),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (_pointer,),
    "cuCtxEnablePeerAccess": (_pointer, _uint),
    "cuCtxDisablePeerAccess": (_pointer,),
    "cuMemGetInfo_v2": (_pointer, _pointer),
    "cuMemAlloc_v2": (_pointer, _size),
    "cuMemFree_v2": (_address,),
    "cuMemHostAlloc": (_pointer, _size, _uint),
    "cuMemFreeHost": (_pointer,),
    "cuMemcpyHtoD_v2": (_address, _pointer, _size),
    "cuMemcpyDtoH_v2": (_pointer, _address, _size),
    "cuMemcpyHtoDAsync_v2": (_address, _pointer, _size, _pointer),
    "cuMemcpyDtoHAsync_v2": (_pointer, _address, _size, _pointer),
    "cuMemcpyDtoDAsync_v2": (_address, _address, _size, _pointer),
    "cuMemcpyPeerAsync": (_address, _pointer, _address, _pointer, _size, _pointer),
    "cuMemcpy2DAsync_v2": (_pointer, _pointer),
    "cuMemsetD8Async": (_address, ctypes.c_ubyte, _size, _pointer),
    "cuModuleLoadData": (_pointer, _pointer),
    "cuModuleGetFunction": (_pointer, _pointer, _pointer),
    "cuModuleUnload": (_pointer,),
    "cuFuncSetAttribute": (_pointer, _int, _int),
    "cuLaunchKernelEx": (_pointer, _pointer, _pointer, _pointer),
    "cuStreamCreate": (_pointer, _uint),
    "cuStreamDestroy_v2": (_pointer,),
    "cuStreamSynchronize": (_pointer,),
    "cuStreamGetCtx": (_pointer, _pointer),
    "cuStreamBeginCapture_v2": (_pointer, _int),
    "cuStreamEndCapture": (_pointer, _pointer),
    "cuStreamWaitEvent": (_pointer, _pointer, _uint),
    "cuGraphInstantiateWithFlags": (_pointer, _pointer, _address),
    "cuGraphLaunch": (_pointer, _pointer),
    "cuGraphDestroy": (_pointer,),
    "cuGraphExecDestroy": (_pointer,),
    "cuEventCreate": (_pointer, _uint),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventQuery": (_pointer,),
    "cuEventSynchronize": (_pointer,),
    "cuEventElapsedTime": (_pointer, _pointer, _pointer),
    "cuEventDestroy_v2": (_pointer,),
    "cuGetErrorName": (_int, _pointer),
}


class CudaError(LaminaError):
    """A call of the CUDA driver, or of a library above it, failed."""


def load_driver() -> Any:
    """The driver's library. Raises Unsupported where there is no NVIDIA driver, or one of long ago."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unsupported(f"there is no NVIDIA driver: {error}") from None
    return declared(library)


def declared(library: Any) -> Any:
    """The library, its functions told what they take. Raises Unsupported if it lacks one."""
    return declare(library, _ARGUMENTS, "the NVIDIA driver is too old; install 525 or later, for CUDA 13 580 or later")


def declare(library: Any, functions: Arguments, too_old: str) -> Any:
    """The library, these functions told what they take. Raises Unsupported, which begins so, if it lacks one."""
    for name, arguments in functions.items():
        try:
            getattr(library, name).argtypes = arguments
        except AttributeError:
            raise Unsupported(f"{too_old} (it has no {name})") from None
    return library


def holding_the_interpreter(library: Any) -> Any:
    """The same functions, which do not let go of the interpreter: for calls of some microseconds, made in a step.

    Whoever took it meanwhile would keep it for longer than the call lasts. What a test puts in place is left as it is.
    """
    if not isinstance(library, ctypes.CDLL):
        return library
    return declared(ctypes.PyDLL(library._name, handle=library._handle))


def driver_version(library: Any) -> tuple[int, int]:
    """The newest CUDA that the driver understands."""
    version = ctypes.c_int()
    require(library, library.cuDriverGetVersion(ctypes.byref(version)), "the driver's version")
    return version.value // 1000, version.value % 1000 // 10


def require(library: Any, status: int, what: str) -> None:
    """Raise CapacityExceeded or CudaError, saying that `what` failed, unless the status is success."""
    if status == _OUT_OF_MEMORY:
        raise CapacityExceeded(f"cuda: no memory is left for {what}")
    if status:
        raise CudaError(f"cuda: {what} failed: {error_name(library, status)}")


def error_name(library: Any, status: int) -> str:
    """Like CUDA_ERROR_ILLEGAL_ADDRESS."""
    name = ctypes.c_char_p()
    library.cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"").decode() or f"error {status}"
