"""The CUDA driver's library: its functions, told what they take, and what their statuses mean.

Owns nothing. `Card` (memory, modules) and `Driver` (what happens on a stream) call it.
"""

import ctypes
from typing import Any

from lamina.spec.errors import CapacityExceeded, LaminaError

_OUT_OF_MEMORY = 2  # others have taken what the driver needed

_pointer, _address, _size = ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_size_t
_int, _uint = ctypes.c_int, ctypes.c_uint
# Declared types convert Python's integers, at their full width, faster than an object made for each would be.
_ARGUMENTS: dict[str, tuple[type[Any], ...]] = {
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
    """The driver's library. Raises OSError where there is no NVIDIA driver."""
    return declared(ctypes.CDLL("libcuda.so.1"))


def declared(library: Any) -> Any:
    """The library, its functions told what they take."""
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


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
