"""The CUDA driver, NVRTC and cuBLAS in Python, as ctypes would call them: "device" memory is the host's.

Streams run at once. What needs a current context, a live address or a known stream is asserted; launches are recorded.
"""

import ctypes
import itertools
from typing import Any

import numpy as np

from lamina.kernels.cuda.driver import _RowsCopy

MIB = 1 << 20
TOTAL_BYTES = 1 << 30
OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE = 2, 201, 400
CONTEXT = 0xC0


def number(value: Any) -> int:
    """Of an int or of a ctypes value."""
    return int(getattr(value, "value", value) or 0)


class FakeDriver:
    """libcuda.so with one card per entry of `capabilities`; its context is current while that was asked for."""

    def __init__(self, *capabilities: tuple[int, int], version: int = 13000, peers: bool = True) -> None:
        self.capabilities = capabilities
        self.version = version
        self.peers = peers
        self.contexts: list[int] = [0]
        self.memory: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.handles: dict[int, Any] = {}
        self.context_of: dict[int, int] = {}  # modules and their kernels
        self.launches: list[tuple[int, int]] = []  # function, stream
        self.on_the_way: list[tuple[int, int, bytes]] = []  # until the context's default stream is waited for
        self.free_bytes = TOTAL_BYTES
        self.garbles_peer_copies = False
        self.status = 0  # of cuInit
        self._next = 0x1000

    def _handle(self, into: Any, what: Any) -> int:
        assert self.contexts[-1], "no context is current"
        self._next += 16
        self.handles[self._next] = what
        into._obj.value = self._next
        return 0

    def _drop(self, handle: Any) -> int:
        del self.handles[number(handle)]
        return 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.status

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: int) -> int:  # noqa: N802
        name.value = f"Card {device}".encode()
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, device: int) -> int:  # noqa: N802
        uuid.raw = bytes(range(16))
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802
        major, minor = self.capabilities[device]
        value._obj.value = {16: 132, 18: 0, 75: major, 76: minor}[attribute]
        return 0

    def cuDeviceCanAccessPeer(self, answer: Any, device: int, other: int) -> int:  # noqa: N802
        answer._obj.value = self.peers and device != other
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        context._obj.value = CONTEXT + device
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.contexts[-1] = number(context)
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        assert number(context)
        self.contexts.append(number(context))
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.pop()
        return 0

    def cuCtxEnablePeerAccess(self, context: Any, flags: int) -> int:  # noqa: N802
        self.launches.append((number(context), 1))
        return 0

    def cuCtxDisablePeerAccess(self, context: Any) -> int:  # noqa: N802
        self.launches.append((number(context), 0))
        return 0

    # -- memory

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:  # noqa: N802
        assert self.contexts[-1]
        free._obj.value = self.free_bytes - sum(values.nbytes for values in self.memory.values())
        total._obj.value = TOTAL_BYTES
        return 0

    def cuMemAlloc_v2(self, address: Any, num_bytes: int) -> int:  # noqa: N802
        assert self.contexts[-1]
        assert num_bytes > 0
        if num_bytes > self.free_bytes:
            return OUT_OF_MEMORY
        values = np.full(num_bytes, 0xA5, np.uint8)
        self.memory[values.ctypes.data] = values
        address._obj.value = values.ctypes.data
        return 0

    def cuMemFree_v2(self, address: int) -> int:  # noqa: N802
        assert self.contexts[-1]
        del self.memory[address]
        return 0

    def cuMemHostAlloc(self, address: Any, num_bytes: int, flags: int) -> int:  # noqa: N802
        values = np.full(num_bytes, 0xA5, np.uint8)
        self.pinned[values.ctypes.data] = values
        address._obj.value = values.ctypes.data
        return 0

    def cuMemFreeHost(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0

    def within(self, address: int, num_bytes: int) -> bool:
        """Whether these bytes are one allocation's."""
        return any(start <= address and address + num_bytes <= start + v.nbytes for start, v in self.memory.items())

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: Any) -> int:  # noqa: N802
        assert self.within(address, count)
        ctypes.memset(address, value, count)
        return 0

    def cuMemcpyHtoD_v2(self, target: int, source: int, count: int) -> int:  # noqa: N802
        assert self.within(target, count)
        self.on_the_way.append((self.contexts[-1], target, ctypes.string_at(source, count)))
        return 0

    def cuMemcpyDtoH_v2(self, target: int, source: int, count: int) -> int:  # noqa: N802
        assert self.within(source, count)
        ctypes.memmove(target, source, count)
        return 0

    def cuMemcpyHtoDAsync_v2(self, target: int, source: int, count: int, stream: Any) -> int:  # noqa: N802
        assert number(stream) in self.handles
        assert self.within(target, count)
        ctypes.memmove(target, source, count)
        return 0

    def cuMemcpyDtoHAsync_v2(self, target: int, source: int, count: int, stream: Any) -> int:  # noqa: N802
        assert number(stream) in self.handles
        return self.cuMemcpyDtoH_v2(target, source, count)

    def cuMemcpyDtoDAsync_v2(self, target: int, source: int, count: int, stream: Any) -> int:  # noqa: N802
        assert self.within(source, count)
        assert self.within(target, count)
        ctypes.memmove(target, source, count)
        return 0

    def cuMemcpyPeerAsync(self, target: int, to: Any, source: int, of: Any, count: int, stream: Any) -> int:  # noqa: N802
        assert number(to) == self.handles[number(stream)]
        self.cuMemcpyDtoDAsync_v2(target, source, count, stream)
        if self.garbles_peer_copies:
            ctypes.memset(target, 0, count // 2)
        return 0

    def cuMemcpy2DAsync_v2(self, given: Any, stream: Any) -> int:  # noqa: N802
        copy: _RowsCopy = given._obj
        for row in range(copy.num_rows):
            source, target = (
                (place.host if place.memory_type == 1 else place.device) + row * place.pitch
                for place in (copy.source, copy.target)
            )
            for place, address in ((copy.source, source), (copy.target, target)):
                assert place.memory_type == 1 or self.within(address, copy.row_bytes)
            ctypes.memmove(target, source, copy.row_bytes)
        return 0

    # -- modules, streams, events

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:  # noqa: N802
        status = self._handle(module, image)
        self.context_of[number(module._obj)] = self.contexts[-1]
        return status

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        status = self._handle(function, (self.handles[number(module)], name))
        self.context_of[number(function._obj)] = self.context_of[number(module)]
        return status

    def cuModuleUnload(self, module: Any) -> int:  # noqa: N802
        return self._drop(module)

    def cuLaunchKernelEx(self, config: Any, function: int, arguments: Any, extra: Any) -> int:  # noqa: N802
        assert config._obj.stream in self.handles
        self.launches.append((function, config._obj.stream))
        same = self.contexts[-1] == self.context_of[function] == self.handles[config._obj.stream]
        return 0 if same else INVALID_HANDLE

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> int:  # noqa: N802
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:  # noqa: N802
        assert flags == 1, "must not wait for the process's default stream"
        return self._handle(stream, self.contexts[-1])

    def cuStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        if number(stream):
            assert number(stream) in self.handles
            return 0
        for context, target, content in self.on_the_way:
            if context == self.contexts[-1]:
                ctypes.memmove(target, content, len(content))
        self.on_the_way = [each for each in self.on_the_way if each[0] != self.contexts[-1]]
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:  # noqa: N802
        return self._drop(stream)

    def cuStreamGetCtx(self, stream: Any, context: Any) -> int:  # noqa: N802
        context._obj.value = self.handles[number(stream)]
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:  # noqa: N802
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:  # noqa: N802
        return self._handle(event, self.contexts[-1])

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        return 0 if self.handles[number(event)] == self.handles[number(stream)] else INVALID_HANDLE

    def cuEventDestroy_v2(self, event: Any) -> int:  # noqa: N802
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_INJECTED"
        return 0


class FakeNvrtc:
    """libnvrtc.so: the "code" is the target's name before the text. A text with `syntax error` does not compile."""

    def __init__(self, version: tuple[int, int] = (13, 0), archs: tuple[int, ...] = (75, 80, 89, 90, 100, 120)) -> None:
        self.version = version
        self.archs = archs
        self.compiled: list[list[bytes]] = []  # options
        self.live: dict[int, list[bytes]] = {}
        self._numbers = itertools.count(1)  # several threads compile at once

    def nvrtcVersion(self, major: Any, minor: Any) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcGetNumSupportedArchs(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.archs)
        return 0

    def nvrtcGetSupportedArchs(self, into: Any) -> int:  # noqa: N802
        into[:] = self.archs
        return 0

    def nvrtcCreateProgram(self, program: Any, text: bytes, name: bytes, *headers: Any) -> int:  # noqa: N802
        program._obj.value = next(self._numbers)
        self.live[program._obj.value] = [text, b""]
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:  # noqa: N802
        del self.live[program._obj.value]
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:  # noqa: N802
        content = self.live[program.value]
        self.compiled.append(list(options))
        content[1] = options[0].partition(b"=")[2] + b":" + content[0]
        return 6 if b"syntax error" in content[0] else 0

    def _size(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.live[program.value][1])
        return 0

    def _content(self, program: Any, into: Any) -> int:
        into.raw = self.live[program.value][1]
        return 0

    nvrtcGetProgramLogSize = nvrtcGetCUBINSize = nvrtcGetPTXSize = _size  # noqa: N815
    nvrtcGetProgramLog = nvrtcGetCUBIN = nvrtcGetPTX = _content  # noqa: N815


class FakeCublas:
    """libcublas.so on the host's memory, column-major as it is. One handle at a time."""

    DTYPES = {0: np.float32, 2: np.float16, 14: np.uint16}  # noqa: RUF012

    def __init__(self) -> None:
        self.open = 0
        self.stream = 0
        self.workspace = (0, 0)
        self.status = 0

    def cublasCreate_v2(self, handle: Any) -> int:  # noqa: N802
        self.open += 1
        handle._obj.value = 0xB1A5
        return self.status

    def cublasDestroy_v2(self, handle: Any) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: int) -> int:  # noqa: N802
        self.stream, self.workspace = stream, (0, 0)
        return 0

    def cublasSetWorkspace_v2(self, handle: Any, address: int, num_bytes: int) -> int:  # noqa: N802
        self.workspace = (address, num_bytes)
        return 0

    def cublasGemmEx(self, *args: Any) -> int:  # noqa: N802
        _, transpose_a, transpose_b, m, n, k, alpha, *operands = args
        a, b, (beta, *c) = operands[:3], operands[3:6], operands[6:10]
        assert operands[10:] == [68, -1], "f32 throughout, no TF32"
        left = _column_major(*a, *((k, m) if transpose_a else (m, k)))
        right = _column_major(*b, *((n, k) if transpose_b else (k, n)))
        out = _column_major(*c, m, n)
        product = alpha._obj.value * (
            _widened(left.T if transpose_a else left) @ _widened(right.T if transpose_b else right)
        )
        out[...] = product + beta._obj.value * out if beta._obj.value else product
        return self.status


def _column_major(address: int, kind: int, leading: int, rows: int, columns: int) -> np.ndarray:
    dtype = np.dtype(FakeCublas.DTYPES[kind])
    assert leading >= rows
    size = (leading * (columns - 1) + rows) * dtype.itemsize
    flat = np.frombuffer((ctypes.c_char * size).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, leading * dtype.itemsize))


def _widened(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:  # bf16
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
