"""An emulated GPU that lags behind the host as a real one does: what is launched runs when somebody waits or looks.

Page-locked memory is read and written only then, so a host that writes a transfer's memory too early, or reads it too
early, computes something else than a synchronous device.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lamina.kernels.cuda.device import Bytes, Call, Device, ExecutableGraph, Memory, Span
from support.cuda_emulated import EmulatedDevice, EmulatedTransfer


class _DeferredGraph:
    def __init__(self, device: "DeferredDevice", graph: ExecutableGraph) -> None:
        self._device = device
        self._graph = graph

    def launch(self) -> None:
        self._device.defer(self._graph.launch)

    def destroy(self) -> None:
        self._device.synchronize()
        self._graph.destroy()


class _DeferredTransfer(EmulatedTransfer):
    def __init__(self, device: "DeferredDevice", span: Span, host: Bytes) -> None:
        at_once = EmulatedDevice.transfer(device, span, host)
        super().__init__(at_once._there, host)
        self._device = device

    def upload(self, num_bytes: int) -> None:
        self._device.defer(lambda: EmulatedTransfer.upload(self, num_bytes))

    def download(self, num_bytes: int) -> None:
        self._host[:num_bytes] = 0xA5  # whoever reads too early reads this
        self._device.defer(lambda: EmulatedTransfer.download(self, num_bytes))


class _Event:
    """A point in a device's stream: so many pieces of work."""

    def __init__(self, device: "DeferredDevice") -> None:
        self.device = device
        self.place = 0


class DeferredDevice(EmulatedDevice):
    """`looks` is how often an event has to be asked for until one more piece of work is done."""

    def __init__(self, looks: int = 2) -> None:
        super().__init__()
        self.num_waits = 0  # for everything, which a step that runs ahead must not do
        self.most_waiting = 0
        self.looks = looks
        self._num_looks = 0
        self._num_done = self._num_launched = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False

    def defer(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        self._num_launched += 1
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def _step(self) -> None:
        self._running = True
        self._waiting.popleft()()
        self._running = False
        self._num_done += 1

    def run(self, call: Call) -> None:
        if self._running:
            super().run(call)
        else:
            self.defer(lambda: EmulatedDevice.run(self, call))

    def capture(self, calls: Sequence[Call]) -> ExecutableGraph:
        return _DeferredGraph(self, super().capture(calls))

    def transfer(self, span: Span, host: Bytes) -> EmulatedTransfer:
        return _DeferredTransfer(self, span, host)

    def copy(self, source: Span, target: Span) -> None:
        self.defer(lambda: EmulatedDevice.copy(self, source, target))

    def copy_from(self, owner: Device, source: Span, target: Span) -> None:
        self.defer(lambda: EmulatedDevice.copy_from(self, owner, source, target))

    def upload(self, span: Span, values: Bytes) -> None:
        if not self._running:
            self.synchronize()
        super().upload(span, values)

    def download(self, span: Span) -> Bytes:
        if not self._running:
            self.synchronize()
        return super().download(span)

    def release(self, memory: Memory) -> None:
        self.synchronize()
        super().release(memory)

    def synchronize(self) -> None:
        self.num_waits += 1
        while self._waiting:
            self._step()

    def create_event(self, *, timed: bool = False) -> Any:
        return _Event(self)

    def record_event(self, event: Any) -> None:
        assert event.device is self
        event.place = self._num_launched

    def follow(self, event: Any) -> None:
        device, place = event.device, event.place  # as it is recorded now
        if device is not self:
            self.defer(lambda: device.run_until(place))

    def wait_event(self, event: Any) -> None:
        self.run_until(event.place)

    def run_until(self, place: int) -> None:
        """Run what was launched up to a place of the stream."""
        while self._num_done < place:
            self._step()

    def event_done(self, event: Any) -> bool:
        self._num_looks += 1
        if self._waiting and self._num_looks % self.looks == 0:
            self._step()
        return bool(self._num_done >= event.place)
