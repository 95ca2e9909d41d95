"""A compute thread that spins beside a device which works by itself, whose events a test decides."""

import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from lamina.kernels.backend import Event, EventProbe
from lamina.kernels.mock import MockBackend
from lamina.kernels.spin import Spinner
from lamina.rpc_worker import device_thread
from lamina.rpc_worker.device_thread import DeviceThread

PENDING = 600


class NativeEvent(Event):
    """Done when told so; asked by native code."""

    def __init__(self) -> None:
        self.is_done = False
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0 if self.is_done else PENDING)


class SpinningBackend(MockBackend):
    """Asynchronous, with native events."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, asynchronous=True)

    def event_probe(self, event: Event) -> EventProbe | None:
        if not isinstance(event, NativeEvent):
            return None
        return EventProbe(ctypes.cast(event.function, ctypes.c_void_p).value or 0, 0, PENDING)


@asynccontextmanager
async def spinning_thread(spin_s: float = 0.2) -> AsyncIterator[DeviceThread]:
    """For so long after the last thing that there was to do. Skips the test without the native library."""
    if Spinner.create() is None:
        pytest.skip("the native library is not built")
    with patch.object(device_thread, "usable_cores", lambda: 4), patch.object(device_thread, "_SPIN_S", spin_s):
        device = DeviceThread(SpinningBackend(), "compute")
        await device.start()
        try:
            yield device
        finally:
            await device.stop()
