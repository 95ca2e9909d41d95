"""A second stream for kernels that only make what a product reads: they run while earlier products are under way.

Decoding a weight is bound by memory, a product of many rows by arithmetic, and neither fills the card alone. What is
filled aside begins once the last product that read the same scratch is done, and the next product that reads it waits
for it; everything else keeps to the main stream. Works in a capture as well, whose graph then has two branches.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lamina.kernels.cuda.driver import Driver, DriverEvent, DriverGraph


@dataclass(slots=True)
class _Scratch:
    filled: DriverEvent
    read: DriverEvent
    is_new: bool = False  # filled, and no product has waited for it yet
    was_read: bool = False  # since the streams were joined last


class Aside:
    """Orders two streams of one device by the scratch memory that they share, named by its address."""

    def __init__(self, main: Driver, beside: Driver) -> None:
        self._main = main
        self._beside = beside
        self._fork = main.create_event(timed=False)
        self._is_joined = False
        self._scratch: dict[int, _Scratch] = {}

    def join(self) -> None:
        """What is filled next comes after all that the main stream has been given by then.

        Due after the host has changed what such kernels read, and where a graph may use the same scratch.
        """
        self._is_joined = False

    def capture(self, launch_all: Callable[[], None]) -> "BranchedGraph":
        """`Driver.capture` of both streams: events of outside are not known in a capture, nor the other way round."""
        self.join()
        try:
            return BranchedGraph(self, self._main.capture(launch_all))
        finally:
            self.join()

    def begin_filling(self, scratch: int) -> Driver:
        """Where to launch what fills it; `end_filling` follows."""
        if not self._is_joined:
            self._is_joined = True
            self._main.record(self._fork)
            self._beside.follow(self._fork)
            for each in self._scratch.values():
                each.is_new = each.was_read = False
        found = self._scratch.get(scratch)
        if found is None:
            filled, read = (self._main.create_event(timed=False) for _ in range(2))
            self._scratch[scratch] = _Scratch(filled, read)
        elif found.was_read:
            self._beside.follow(found.read)
        return self._beside

    def end_filling(self, scratch: int) -> None:
        """It has been launched."""
        found = self._scratch[scratch]
        self._beside.record(found.filled)
        found.is_new = True

    def begin_reading(self, memory: int) -> None:
        """Before a product that reads this memory, scratch or not, is launched on the main stream."""
        found = self._scratch.get(memory)
        if found is not None and found.is_new:
            found.is_new = False
            self._main.follow(found.filled)

    def end_reading(self, memory: int) -> None:
        """It has been launched."""
        found = self._scratch.get(memory)
        if found is not None:
            found.was_read = True
            self._main.record(found.read)


class BranchedGraph:
    """A graph that may fill the scratch; launched and destroyed like any other."""

    def __init__(self, aside: Aside, graph: DriverGraph) -> None:
        self._aside = aside
        self._graph = graph

    def launch(self) -> None:
        self._aside.join()
        self._graph.launch()

    def destroy(self) -> None:
        self._graph.destroy()
