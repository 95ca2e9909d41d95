"""What a placement tells the scheduler about its pipeline."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock, create_autospec

import pytest

from lamina.coordinator.cluster.client import WorkerClient
from lamina.coordinator.planner.memory import StagePlan
from lamina.coordinator.session import dial_all, pipeline_width
from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig
from lamina.spec.memory import StageMemory
from lamina.spec.model import LayerRange
from support.planner_models import device


def stage(device_number: int, start: int, stop: int) -> StagePlan:
    return StagePlan(device(device_number, 2**30, 32.0), LayerRange(start, stop), StageMemory(1, 1, 1))


@pytest.mark.parametrize(
    ("stages", "width"),
    [
        ([(0, 0, 16)], 1.0),
        ([(0, 0, 8), (1, 8, 16)], 2.0),
        ([(0, 0, 11), (1, 11, 16)], 16 / 11),
        ([(0, 0, 4), (0, 4, 9), (0, 9, 16)], 1.0),
        ([(0, 0, 6), (1, 6, 12), (0, 12, 18)], 1.5),
    ],
)
def test_width_of_a_pipeline(stages: list[tuple[int, int, int]], width: float) -> None:
    """As many as stages where they are equal; the busiest device bounds it, and stages of one device take turns."""
    assert pipeline_width([stage(*values) for values in stages]) == width


def test_workers_of_one_name_are_told_apart_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which of several to rename; all connections are closed."""
    clients = [create_autospec(WorkerClient, instance=True, profile=SimpleNamespace(name=n)) for n in ("a", "vm", "vm")]
    monkeypatch.setattr(WorkerClient, "dial", AsyncMock(side_effect=clients))
    with pytest.raises(InvalidConfig, match="workers at h:2 and h:3 are called 'vm': give each its own --name"):
        asyncio.run(dial_all([Address("h", port) for port in (1, 2, 3)]))
    for client in clients:
        client.close.assert_awaited_once()
