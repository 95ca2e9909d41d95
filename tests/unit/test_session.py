"""What a placement tells the scheduler about its pipeline."""

import pytest

from lamina.coordinator.planner.memory import StagePlan
from lamina.coordinator.session import pipeline_width
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
