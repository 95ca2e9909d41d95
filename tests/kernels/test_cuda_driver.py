"""Capture through the driver, with a library that fails where it is told to: nothing stays open, nothing is lost."""

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.kernels.backend import GraphError
from lamina.kernels.cuda import card as card_module
from lamina.kernels.cuda import driver as driver_module
from lamina.kernels.cuda import libcuda as libcuda_module
from lamina.kernels.cuda.driver import Driver
from lamina.kernels.cuda.libcuda import CudaError, declared
from lamina.spec.errors import CapacityExceeded

TEMPLATE, EXECUTABLE, EVENT = 0x1000, 0x2000, 0x3000
NOT_READY = 600


class FakeLibrary:
    """Counts what is open and alive; calls named in `failing` return an error status."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.capturing = False
        self.templates = self.executables = self.events = 0
        self.event_status = 0
        self.launches: list[Any] = []

    def _status(self, name: str) -> int:
        return 700 if name in self.failing else 0

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:  # noqa: N802
        assert mode == 1, "thread_local: other threads may allocate during a capture"
        status = self._status("begin")
        self.capturing = status == 0
        return status

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:  # noqa: N802
        assert self.capturing
        self.capturing = False
        if status := self._status("end"):
            return status
        graph._obj.value = TEMPLATE
        self.templates += 1
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> int:  # noqa: N802
        assert graph.value == TEMPLATE
        if status := self._status("instantiate"):
            return status
        executable._obj.value = EXECUTABLE
        self.executables += 1
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:  # noqa: N802
        self.templates -= 1
        return 0

    def cuGraphExecDestroy(self, executable: Any) -> int:  # noqa: N802
        assert executable.value == EXECUTABLE
        self.executables -= 1
        return 0

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:  # noqa: N802
        self.launches.append(executable.value)
        return self._status("graph launch")

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: Any) -> int:  # noqa: N802
        self.launches.append((tuple(config._obj.grid), config._obj.block[0], config._obj.num_attributes))
        return self._status("launch")

    def cuMemcpyHtoDAsync_v2(self, device: Any, host: Any, count: Any, stream: Any) -> int:  # noqa: N802
        self.launches.append(("up", device, host, count, stream.value))
        return self._status("up")

    def cuMemcpyDtoHAsync_v2(self, host: Any, device: Any, count: Any, stream: Any) -> int:  # noqa: N802
        self.launches.append(("down", host, device, count, stream.value))
        return self._status("down")

    def cuMemcpyDtoDAsync_v2(self, target: Any, source: Any, count: Any, stream: Any) -> int:  # noqa: N802
        self.launches.append(("within", target, source, count, stream.value))
        return self._status("within")

    def cuEventCreate(self, event: Any, flags: int) -> int:  # noqa: N802
        self.launches.append(("event", flags))
        if status := self._status("event"):
            return status
        event._obj.value = EVENT
        self.events += 1
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        self.launches.append(("record", event.value, stream.value))
        return self._status("record")

    def cuEventQuery(self, event: Any) -> int:  # noqa: N802
        return self.event_status

    def cuEventSynchronize(self, event: Any) -> int:  # noqa: N802
        self.launches.append(("wait", event.value))
        return self.event_status

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:  # noqa: N802
        self.launches.append(("follow", stream.value, event.value, flags))
        return self._status("follow")

    def cuEventElapsedTime(self, elapsed_ms: Any, start: Any, end: Any) -> int:  # noqa: N802
        elapsed_ms._obj.value = 1.5
        return self._status("elapsed")

    def cuEventDestroy_v2(self, event: Any) -> int:  # noqa: N802
        assert event.value == EVENT
        self.events -= 1
        return 0

    def cuGetErrorName(self, status: Any, name: Any) -> int:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_INJECTED"
        return 0


def _driver(library: FakeLibrary, *, dependent_launch: bool = False) -> Driver:
    return Driver(library, 0x55, dependent_launch=dependent_launch)


def _launch(driver: Driver) -> None:
    driver.launch(0x77, (3, 2, 1), 64, 0, (ctypes.c_void_p * 1)())


def test_copies_name_their_ends_and_the_stream() -> None:
    """B-10: addresses beyond 32 bits, in the order that the driver's functions take them."""
    library = FakeLibrary()
    driver = _driver(library)
    host, device, other = 0x7FFF_0000_1000, 0xFE_0000_2000, 0xFE_0000_3000
    driver.upload(device, host, 12)
    driver.download(host, device, 5 << 32)
    driver.upload_pinned(device, host, 12)
    driver.download_pinned(host, device, 5 << 32)
    driver.copy(device, other, 7)
    assert library.launches == [
        *[("up", device, host, 12, 0x55), ("down", host, device, 5 << 32, 0x55)] * 2,
        ("within", other, device, 7, 0x55),
    ]
    driver = _driver(FakeLibrary("up", "down", "within"))
    for copy in (driver.upload, driver.download, driver.upload_pinned, driver.download_pinned, driver.copy):
        with pytest.raises(CudaError, match="failed: CUDA_ERROR_INJECTED"):
            copy(0x1000, 0x2000, 4)


def test_every_function_is_told_what_it_takes() -> None:
    """Undeclared, ctypes would cut an address to 32 bits."""
    texts = [Path(module.__file__).read_text("utf-8") for module in (libcuda_module, driver_module, card_module)]
    called = {name for text in texts for name in re.findall(r"(?:library|quick)\.(cu\w+)", text)}
    library = declared(SimpleNamespace(**{name: SimpleNamespace() for name in called}))
    assert all(function.argtypes for function in vars(library).values())


def test_events_are_recorded_looked_at_and_given_back() -> None:
    """B-10: on the driver's stream, timed only where that is wanted; one that is not done yet is no failure."""
    library = FakeLibrary()
    driver = _driver(library)
    event = driver.create_event(timed=False)
    driver.record(event)
    library.event_status = NOT_READY
    assert not driver.is_done(event)
    library.event_status = 0
    assert driver.is_done(event)
    driver.wait(event)
    driver.follow(event)
    assert library.launches == [("event", 2), ("record", EVENT, 0x55), ("wait", EVENT), ("follow", 0x55, EVENT, 0)]
    timed = driver.create_event(timed=True)
    assert library.launches[-1] == ("event", 0)
    assert driver.elapsed_s(timed, timed) == 0.0015
    assert library.events == 2
    del event, timed
    assert library.events == 0


def test_what_failed_on_the_card_shows_in_the_event() -> None:
    """A kernel's fault comes to light where the host looks for its end."""
    library = FakeLibrary("record", "follow", "elapsed")
    driver = _driver(library)
    event = driver.create_event(timed=True)
    library.event_status = 700
    for call in (driver.record, driver.is_done, driver.wait, driver.follow, lambda it: driver.elapsed_s(it, it)):
        with pytest.raises(CudaError, match="failed: CUDA_ERROR_INJECTED"):
            call(event)
    with pytest.raises(CudaError, match="an event failed"):
        _driver(FakeLibrary("event")).create_event(timed=False)


def test_a_graph_lives_until_it_is_destroyed() -> None:
    """B-09: the template is freed at once, the executable by destroy, and a second destroy does nothing."""
    library = FakeLibrary()
    driver = _driver(library)
    graph = driver.capture(lambda: _launch(driver))
    assert (library.capturing, library.templates, library.executables) == (False, 0, 1)
    graph.launch()
    assert library.launches[-1] == EXECUTABLE
    graph.destroy()
    graph.destroy()
    assert library.executables == 0
    with pytest.raises(GraphError, match="destroyed"):
        graph.launch()


@pytest.mark.parametrize("failing", ["begin", "launch", "end", "instantiate"])
def test_a_failure_at_any_step_leaves_nothing_behind(failing: str) -> None:
    """B-09: no capture stays open, no template or executable is lost, and the error names the cause."""
    library = FakeLibrary(failing)
    driver = _driver(library)
    with pytest.raises((GraphError, CudaError), match="CUDA_ERROR_INJECTED"):
        driver.capture(lambda: _launch(driver))
    assert (library.capturing, library.templates, library.executables) == (False, 0, 0)
    library.failing = ()
    driver.capture(lambda: _launch(driver)).destroy()


def test_an_exception_inside_passes_through() -> None:
    """B-09: whatever the recorded code raises ends the capture first."""
    library = FakeLibrary()

    def fail() -> None:
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        _driver(library).capture(fail)
    assert (library.capturing, library.templates, library.executables) == (False, 0, 0)


@pytest.mark.parametrize("dependent_launch", [False, True])
def test_launches_carry_grid_block_and_attribute(dependent_launch: bool) -> None:
    """Programmatic dependent launch is an attribute of every launch, where the card has it."""
    library = FakeLibrary()
    _launch(_driver(library, dependent_launch=dependent_launch))
    assert library.launches == [((3, 2, 1), 64, int(dependent_launch))]


def test_a_card_without_memory_is_no_broken_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """C-04: others may take what the driver needs for a launch; that is the request's error, not the device's."""
    library = FakeLibrary()
    driver = _driver(library)
    monkeypatch.setattr(library, "cuLaunchKernelEx", lambda *args: 2)
    with pytest.raises(CapacityExceeded, match="no memory is left for a launch"):
        _launch(driver)
