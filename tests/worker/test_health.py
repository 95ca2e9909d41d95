"""The worker's look at its cards: warnings of a slow link, and a driver that hangs."""

import asyncio
import threading
from dataclasses import replace

import pytest

from lamina.kernels.mock import MockBackend
from lamina.rpc_worker.health import HealthWatch, link_warning
from lamina.spec.device import DeviceHealth

FULL = DeviceHealth(4, 8, 4, 8, 60.0, 120.0, 1800, 5005, busy_ratio=0.9)
RESTING = replace(FULL, pcie_generation=1, pcie_width=4, busy_ratio=0.0)  # seen: 2.5 GT/s x4 and x8 at idle
SLOW = replace(FULL, pcie_generation=3)
NARROW = replace(FULL, pcie_width=4)


class Card(MockBackend):
    """Says what it is told to say, once it may."""

    def __init__(self, *healths: DeviceHealth | None) -> None:
        super().__init__()
        self.healths = list(healths)
        self.may_answer = threading.Event()
        self.may_answer.set()

    def health(self) -> DeviceHealth | None:
        self.may_answer.wait()
        return self.healths.pop(0)


@pytest.mark.parametrize(
    ("health", "warned"),
    [(FULL, False), (RESTING, False), (SLOW, True), (NARROW, True), (DeviceHealth(busy_ratio=1.0), False)],
)
def test_a_link_below_its_capability_counts_under_load_only(health: DeviceHealth, warned: bool) -> None:
    """C-05: an idle card rests its link; one without figures says nothing."""
    warning = link_warning(health)
    assert (warning is not None) == warned
    if warning is not None:
        assert f"generation {health.pcie_generation} x{health.pcie_width}" in warning
        assert "can do generation 4 x8" in warning


def test_one_warning_per_card_until_it_is_well_again(caplog: pytest.LogCaptureFixture) -> None:
    card = Card(SLOW, SLOW, RESTING, NARROW, FULL, SLOW)
    other = Card(*[None] * 6)
    watch = HealthWatch([other, card])

    async def scene() -> list[int]:
        counts = []
        for _ in range(6):
            await watch.read()
            counts.append(len(caplog.messages))
        return counts

    assert asyncio.run(scene()) == [1, 1, 1, 1, 1, 2]
    assert all(message.startswith("device 1: under load") for message in caplog.messages)


def test_a_driver_that_fails_costs_its_figures_only(caplog: pytest.LogCaptureFixture) -> None:
    """The worker is described all the same, and the log says it once."""
    watch = HealthWatch([Card(), Card(FULL, FULL)])  # the first has nothing to pop

    async def scene() -> None:
        assert [await watch.read() for _ in range(2)] == [(None, FULL)] * 2

    asyncio.run(scene())
    assert caplog.messages == ["device 0: its health cannot be read: IndexError: pop from empty list"]


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks gets what was known before, and the question is asked once."""
    monkeypatch.setattr("lamina.rpc_worker.health._PATIENCE_S", 0.05)
    card = Card(FULL, SLOW)

    async def scene() -> None:
        watch = HealthWatch([card])
        assert await watch.read() == (FULL,)
        card.may_answer.clear()
        assert await watch.read() == (FULL,)
        assert await watch.read() == (FULL,)
        card.may_answer.set()
        while await watch.read() != (SLOW,):
            await asyncio.sleep(0.01)

    asyncio.run(scene())
