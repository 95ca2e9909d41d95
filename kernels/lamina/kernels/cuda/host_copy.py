"""The host's side of a buffer on a GPU: page-locked; where it lies, and what it belongs to, is worked out once."""

from collections.abc import Callable

from lamina.kernels.backend import HostCopy
from lamina.kernels.buffer import Buffer
from lamina.kernels.cuda.device import Device, Span


class CudaHostCopy(HostCopy):
    """Transfers run in the order of the device's stream. One compute thread."""

    def __init__(self, device: Device, buffer: Buffer, span: Span, before: Callable[..., None]) -> None:
        """`span` is where the buffer lies; `before(buffer, writes=)` is called before each transfer, and may raise."""
        if not span.contiguous:
            raise ValueError(f"a buffer of {buffer.shape} with rows {buffer.row_stride} apart has gaps")
        host = device.alloc_pinned(span.num_rows * span.row_bytes)
        self.values = host.view(buffer.dtype.host_dtype).reshape(buffer.shape)
        self._buffer = buffer
        self._row_bytes = span.row_bytes
        self._transfer = device.transfer(span, host)
        self._before = before

    def upload(self, num_rows: int) -> None:
        self._check(num_rows)
        self._before(self._buffer, writes=True)
        self._transfer.upload(num_rows * self._row_bytes)

    def download(self, num_rows: int) -> None:
        self._check(num_rows)
        self._before(self._buffer, writes=False)
        self._transfer.download(num_rows * self._row_bytes)
