"""What workers say of their memory, stages and edges, as Prometheus metrics. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from lamina.spec.device import LoadedStage, WorkerProfile


@dataclass(frozen=True, slots=True)
class StageLook:
    """A stage as its worker described it; the shares are of the time since the look before."""

    worker: str
    device: str
    stage: LoadedStage
    busy_ratio: float
    steps_per_s: float


def worker_metrics(
    profiles: Mapping[str, WorkerProfile], is_up: Mapping[str, bool], looks: Iterable[StageLook]
) -> Iterator[Metric]:
    """Of every known worker, those without layers too."""
    num_layers: dict[str, int] = {}
    for look in looks:
        num_layers[look.worker] = num_layers.get(look.worker, 0) + len(look.stage.layers)
    up = GaugeMetricFamily("lamina_worker_up", "Whether the worker answers.", labels=["worker"])
    layers = GaugeMetricFamily("lamina_worker_layers", "Layers on the worker.", labels=["worker"])
    memory = GaugeMetricFamily(
        "lamina_worker_memory_bytes", "Memory of its devices.", labels=["worker", "device", "kind"]
    )
    for name, profile in profiles.items():
        up.add_metric([name], float(is_up.get(name, False)))
        layers.add_metric([name], num_layers.get(name, 0))
        for device in profile.devices:
            memory.add_metric([name, str(device.id.index), "total"], device.total_bytes)
            memory.add_metric([name, str(device.id.index), "free"], device.free_bytes)
    yield from (up, layers, memory)


def stage_metrics(looks: Iterable[StageLook]) -> Iterator[Metric]:
    """How long steps take, apart for those with prompts in them, and how much of its time a stage waits."""
    steps = SummaryMetricFamily(
        "lamina_stage_step_seconds",
        "Time inside the stage's operations; phase prefill: steps with a part of a prompt in them.",
        labels=["worker", "stage", "phase"],
    )
    bubble = GaugeMetricFamily(
        "lamina_stage_bubble_ratio", "Share of time the stage waited.", labels=["worker", "stage"]
    )
    for look in looks:
        stage, labels = look.stage, [look.worker, str(look.stage.stage)]
        num_decodes, decode_s = stage.num_steps - stage.num_prefill_steps, stage.busy_s - stage.prefill_busy_s
        steps.add_metric([*labels, "prefill"], stage.num_prefill_steps, stage.prefill_busy_s)
        steps.add_metric([*labels, "decode"], max(0, num_decodes), max(0.0, decode_s))
        bubble.add_metric(labels, 1 - look.busy_ratio)
    yield from (steps, bubble)


def link_metrics(rtts_s: Sequence[float], looks: Iterable[StageLook]) -> Iterator[Metric]:
    """Of the edge from each stage to the next, the last one's back to the first."""
    rtt = GaugeMetricFamily(
        "lamina_link_rtt_seconds", "Round trip to the next stage when the edge was opened.", labels=["stage"]
    )
    num_bytes = CounterMetricFamily("lamina_link_bytes", "Bytes sent to the next stage.", labels=["worker", "stage"])
    depth = GaugeMetricFamily(
        "lamina_link_queue_depth", "Messages that wait to be sent to the next stage.", labels=["worker", "stage"]
    )
    direct = GaugeMetricFamily(
        "lamina_link_direct",
        "Whether frames to the next worker take a direct connection (1) or gRPC (0); absent within one worker.",
        labels=["worker", "stage"],
    )
    for index, seconds in enumerate(rtts_s):
        rtt.add_metric([str(index)], seconds)
    for look in looks:
        labels = [look.worker, str(look.stage.stage)]
        num_bytes.add_metric(labels, look.stage.link_bytes)
        depth.add_metric(labels, look.stage.link_queue_depth)
        if look.stage.link_kind:
            direct.add_metric(labels, float(look.stage.link_kind == "direct"))
    yield from (rtt, num_bytes, depth, direct)
