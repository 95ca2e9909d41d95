"""An emulated GPU with a thread of its own that runs what is launched, in order, some time later; as a real card does.

For tests with real compute threads. Work takes random time; the emulator itself runs one kernel at a time.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from random import Random
from typing import Any

from lamina.kernels.cuda.device import Call, Memory
from support.cuda_emulated import EmulatedDevice
from support.deferred import DeferredDevice

_EMULATOR = threading.Lock()  # it counts its blocks and threads in static variables
_PATIENCE_S = 30.0


class StreamedDevice(DeferredDevice):
    """A pause of up to `pause_s` before each piece of work."""

    def __init__(self, seed: int, pause_s: float = 300e-6) -> None:
        self._thread = threading.Thread(target=self._work, daemon=True)
        super().__init__()
        self._random = Random(seed)
        self._pause_s = pause_s
        self._launched: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._news = threading.Condition()
        self._failure: Exception | None = None
        self._thread.start()

    @property  # type: ignore[override]
    def _running(self) -> bool:
        return threading.current_thread() is self._thread

    @_running.setter
    def _running(self, value: bool) -> None: ...

    def _work(self) -> None:
        while (work := self._launched.get()) is not None:
            time.sleep(self._random.random() * self._pause_s)
            try:
                work()
            except Exception as error:  # as a card's: whoever asks next hears of it
                self._failure = error
            with self._news:
                self._num_done += 1
                self._news.notify_all()

    def defer(self, work: Callable[[], None]) -> None:
        self._num_launched += 1
        self._launched.put(work)

    def run(self, call: Call) -> None:
        if not self._running:
            self.defer(lambda: self.run(call))
            return
        with _EMULATOR:
            EmulatedDevice.run(self, call)

    def run_until(self, place: int) -> None:
        """Wait until what was launched up to a place of the stream is done. From any thread."""
        with self._news:
            assert self._news.wait_for(lambda: self._num_done >= place, _PATIENCE_S), "the cards wait for each other"
        if self._failure is not None:
            raise self._failure

    def synchronize(self) -> None:
        self.run_until(self._num_launched)

    def event_done(self, event: Any) -> bool:
        if self._failure is not None:
            raise self._failure
        return bool(self._num_done >= event.place)

    def release(self, memory: Memory) -> None:
        """What is freed turns into garbage: whoever still reads it computes something else."""
        super().release(memory)
        memory.handle[0][:] = 0xFF

    def close(self) -> None:
        self.synchronize()
        self._launched.put(None)
        self._thread.join()
        super().close()
