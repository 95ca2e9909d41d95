"""Looks at the health of a worker's cards for those who ask, and warns of a slow PCIe link (C-05).

Owned by the event loop; NVML is asked on a thread, and never waited for long.
"""

import asyncio
import logging
from collections.abc import Sequence

from lamina.kernels.backend import Backend
from lamina.spec.device import DeviceHealth

_log = logging.getLogger(__name__)
_PATIENCE_S = 0.5
_LOADED = 0.5  # busy for more than half of the time: no card rests its link then

Healths = tuple[DeviceHealth | None, ...]


class HealthWatch:
    """The cards of one worker, in the order of its devices."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = tuple(backends)
        self._last: Healths = (None,) * len(self._backends)
        self._reading: asyncio.Task[Healths] | None = None
        self._warned: set[int] = set()
        self._failed: set[int] = set()  # the asking thread's own

    async def read(self) -> Healths:
        """Now; as last read where the driver takes longer than a moment. None for a device without figures."""
        reading = self._reading = self._reading or asyncio.create_task(asyncio.to_thread(self._ask))
        await asyncio.wait([reading], timeout=_PATIENCE_S)
        if reading.done() and self._reading is reading:
            self._reading = None
            self._last = reading.result()
            self._warn()
        return self._last

    def _ask(self) -> Healths:
        return tuple(self._ask_one(index, backend) for index, backend in enumerate(self._backends))

    def _ask_one(self, index: int, backend: Backend) -> DeviceHealth | None:
        try:
            return backend.health()
        except Exception as error:  # whatever a driver may say: the device works without figures
            if index not in self._failed:
                self._failed.add(index)
                _log.warning("device %d: its health cannot be read: %s: %s", index, type(error).__name__, error)
            return None

    def _warn(self) -> None:
        """Once per card, and again once it has been well in between."""
        for index, health in enumerate(self._last):
            if health is None or health.busy_ratio < _LOADED:
                continue
            warning = link_warning(health)
            if warning is None:
                self._warned.discard(index)
            elif index not in self._warned:
                self._warned.add(index)
                _log.warning("device %d: %s", index, warning)


def link_warning(health: DeviceHealth) -> str | None:
    """What is wrong with a card's PCIe link, None if nothing is. An idle card rests its link: that is no fault."""
    if health.busy_ratio < _LOADED or not (health.pcie_generation and health.pcie_width):
        return None
    slower = health.pcie_generation < health.max_pcie_generation
    narrower = health.pcie_width < health.max_pcie_width
    if not (slower or narrower):
        return None
    return (
        f"under load its PCIe link runs at generation {health.pcie_generation} x{health.pcie_width}, card and slot"
        f" can do generation {health.max_pcie_generation} x{health.max_pcie_width}; loading and hops are slower for"
        " it: look at the slot, the riser and the BIOS"
    )
