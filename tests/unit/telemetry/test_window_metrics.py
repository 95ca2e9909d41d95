"""The blocks of layers with a sliding window, as Prometheus sees them."""

import pytest

from lamina.coordinator.telemetry.metrics import Metrics
from support.sim_engine import SimEngine, config, request


@pytest.mark.parametrize("windows", [(), (None, 8)])
def test_blocks_of_the_window_are_told_apart(windows: tuple[int | None, ...]) -> None:
    """By state, and only where there are any."""
    sim = SimEngine(config(num_blocks=(64, 12), windows=windows))
    metrics = Metrics()
    metrics.watch(sim.scheduler)
    sim.add(request(range(1, 50)))
    sim.issue()

    def value(state: str) -> float | None:
        return metrics.registry.get_sample_value("lamina_kv_cache_window_blocks", {"state": state})

    found = [value(state) for state in ("used", "cached", "free")]
    assert found == ([4, 0, 8] if windows else [None] * 3)
