"""Matrix products by cuBLAS, on one stream, with a workspace of our own, so that a capture holds no allocation."""

import ctypes
from typing import Any

from lamina.kernels.buffer import DType
from lamina.kernels.cuda.device import Matrix, ProductCall
from lamina.kernels.cuda.libcuda import Arguments, CudaError, declare
from lamina.spec.errors import CapacityExceeded

_ALLOC_FAILED = 3
_NOT_TRANSPOSED, _TRANSPOSED = 0, 1
_TYPES = {DType.F32: 0, DType.F16: 2, DType.BF16: 14}  # cudaDataType
_COMPUTE_F32 = 68  # products of f32 stay f32: TF32 would have to be asked for
_DEFAULT_ALGORITHM = -1

_pointer, _int = ctypes.c_void_p, ctypes.c_int
_ARGUMENTS: Arguments = {
    "cublasCreate_v2": (_pointer,),
    "cublasDestroy_v2": (_pointer,),
    "cublasSetStream_v2": (_pointer, _pointer),
    "cublasSetWorkspace_v2": (_pointer, _pointer, ctypes.c_size_t),
    "cublasGemmEx": (
        *(_pointer, _int, _int, _int, _int, _int, _pointer),
        *(_pointer, _int, _int) * 2,
        *(_pointer, _pointer, _int, _int, _int, _int),
    ),
}


def declared(library: Any) -> Any:
    """The library libcublas, its functions told what they take. Raises Unsupported if it lacks one."""
    return declare(library, _ARGUMENTS, "the installed libcublas is too old; CUDA 12.4 or later is wanted")


class Cublas:
    """A handle. To be made, used and closed on threads that are bound to its card, one at a time."""

    def __init__(self, library: Any, stream: int, workspace: int, workspace_bytes: int) -> None:
        """`library` is `declared`; `workspace` is the address of device memory that nothing else uses."""
        self._library = library
        self._handle = ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._require(library.cublasCreate_v2(ctypes.byref(self._handle)), "cuBLAS")
        # in this order: another stream would bring back the library's own workspace
        self._require(library.cublasSetStream_v2(self._handle, stream), "cuBLAS's stream")
        status = library.cublasSetWorkspace_v2(self._handle, workspace, workspace_bytes)
        self._require(status, "cuBLAS's workspace")

    def multiply(self, call: ProductCall) -> None:
        """Launch a product. Row-major matrices are column-major ones transposed: out^T = weight x^T."""
        x, weight, out = call.x, call.weight, call.out
        beta = self._one if call.accumulate else self._zero
        status = self._library.cublasGemmEx(
            self._handle,
            _TRANSPOSED,
            _NOT_TRANSPOSED,
            weight.rows,
            x.rows,
            x.columns,
            ctypes.byref(self._one),
            *_operand(weight),
            *_operand(x),
            ctypes.byref(beta),
            *_operand(out),
            _COMPUTE_F32,
            _DEFAULT_ALGORITHM,
        )
        self._require(status, "a matrix product")

    def close(self) -> None:
        """Give the handle back; its stream has to be done."""
        self._library.cublasDestroy_v2(self._handle)

    def _require(self, status: int, what: str) -> None:
        if status == _ALLOC_FAILED:
            raise CapacityExceeded(f"cuda: no memory is left for {what}")
        if status:
            raise CudaError(f"cuda: {what} failed: cuBLAS status {status}")


def _operand(matrix: Matrix) -> tuple[int, int, int]:
    """Address, type and leading dimension."""
    return matrix.memory.address + matrix.offset, _TYPES[matrix.dtype], matrix.stride
