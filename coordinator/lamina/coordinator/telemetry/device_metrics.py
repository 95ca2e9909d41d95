"""What workers say of their cards and recorded steps, as Prometheus metrics and as plain objects. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lamina.spec.device import GRAPH_VETOES, DeviceHealth, GraphCounts, WorkerProfile

# metric, help, field of DeviceHealth
_GAUGES = (
    ("lamina_device_temperature_celsius", "Temperature of the card.", "temperature_c"),
    ("lamina_device_power_watts", "Power that the card draws.", "power_w"),
    ("lamina_device_clock_mhz", "Clock of its multiprocessors.", "clock_mhz"),
    ("lamina_device_memory_clock_mhz", "Clock of its memory.", "memory_clock_mhz"),
    ("lamina_device_busy_ratio", "Share of the last moments in which a kernel ran.", "busy_ratio"),
    ("lamina_device_pcie_generation", "Generation of the PCIe link now.", "pcie_generation"),
    ("lamina_device_pcie_width", "Lanes of the PCIe link now.", "pcie_width"),
)
_COUNTERS = (
    ("lamina_graph_captures", "Steps recorded.", "captures"),
    ("lamina_graph_replays", "Steps run by replay.", "replays"),
    ("lamina_graph_evictions", "Recordings given back.", "evictions"),
)


def health_metrics(profiles: Mapping[str, WorkerProfile]) -> Iterator[Metric]:
    """One gauge for each figure, of the devices that have one."""
    measured = [
        ([name, str(device.id.index)], device.health)
        for name, profile in profiles.items()
        for device in profile.devices
        if device.health is not None
    ]
    for metric, text, field in _GAUGES:
        gauge = GaugeMetricFamily(metric, text, labels=["worker", "device"])
        for labels, health in measured:
            gauge.add_metric(labels, getattr(health, field))
        yield gauge


def graph_metrics(stages: Iterable[tuple[str, int, GraphCounts]]) -> Iterator[Metric]:
    """Of (worker, stage, counts)."""
    stages = list(stages)
    labels = ["worker", "stage"]
    for metric, text, field in _COUNTERS:
        counter = CounterMetricFamily(metric, text, labels=labels)
        for worker, stage, counts in stages:
            counter.add_metric([worker, str(stage)], getattr(counts, field))
        yield counter
    held = GaugeMetricFamily("lamina_graph_held", "Recordings alive.", labels=labels)
    held_bytes = GaugeMetricFamily("lamina_graph_bytes", "Device memory that they take.", labels=labels)
    vetoes = CounterMetricFamily(
        "lamina_graph_vetoes", "Steps run op by op though recordings are on.", labels=[*labels, "reason"]
    )
    for worker, stage, counts in stages:
        held.add_metric([worker, str(stage)], counts.held)
        held_bytes.add_metric([worker, str(stage)], counts.held_bytes)
        by_label: Counter[str] = Counter()  # a worker's strings are no labels: each would be a time series
        for reason, count in counts.vetoes.items():
            by_label[reason if reason in GRAPH_VETOES else "other"] += count
        for label, count in by_label.items():
            vetoes.add_metric([worker, str(stage), label], count)
    yield from (held, held_bytes, vetoes)


def health_object(health: DeviceHealth | None) -> dict[str, float] | None:
    """For /admin/cluster."""
    return None if health is None else asdict(health)


def graphs_object(counts: GraphCounts) -> dict[str, object]:
    """For /admin/cluster."""
    return asdict(counts)
