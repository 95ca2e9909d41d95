"""Stages, edges and workers in /metrics and in the list of devices."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from lamina.coordinator.cluster.attendance import Attendance
from lamina.coordinator.telemetry import cluster_watch
from lamina.coordinator.telemetry.cluster_watch import ClusterWatch
from lamina.coordinator.telemetry.metrics import Metrics
from lamina.coordinator.telemetry.stage_metrics import StageLook, link_metrics, stage_metrics, worker_metrics
from lamina.spec.address import Address
from lamina.spec.device import LoadedStage, WorkerProfile
from lamina.spec.errors import WorkerLost
from lamina.spec.ids import Epoch, PlacementId, WorkerName
from lamina.spec.model import LayerRange
from lamina.wire.version import own_version

STAGE = LoadedStage(
    PlacementId("p"), Epoch(1), 1, 0, LayerRange(10, 30), "", b"", 1, 2, 3, True, 100, 7.5, 2,
    num_prefill_steps=10, prefill_busy_s=2.5, link_bytes=4096, link_queue_depth=3, link_kind="direct",
)  # fmt: skip
LOOK = StageLook("w1", "w1/0", STAGE, 0.75, 50.0)


def profile(name: str) -> WorkerProfile:
    return WorkerProfile(own_version(), WorkerName(name), "", (), (), 1.0)


def exposed(metrics: Iterable[Metric]) -> str:
    class Source:
        def collect(self) -> list[Metric]:
            return list(metrics)

    registry = CollectorRegistry()
    registry.register(Source())
    return generate_latest(registry).decode()


def test_steps_by_phase_and_the_bubble() -> None:
    text = exposed(stage_metrics([LOOK]))
    for phase, count, total in (("prefill", 10, 2.5), ("decode", 90, 5.0)):
        labels = f'{{phase="{phase}",stage="1",worker="w1"}}'
        assert f"lamina_stage_step_seconds_count{labels} {count}.0" in text
        assert f"lamina_stage_step_seconds_sum{labels} {total}" in text
    assert 'lamina_stage_bubble_ratio{stage="1",worker="w1"} 0.25' in text


def test_counts_of_a_worker_that_cannot_be_are_not_negative() -> None:
    """Prometheus takes no counter below 0."""
    text = exposed(stage_metrics([replace(LOOK, stage=replace(STAGE, num_prefill_steps=101, prefill_busy_s=8.0))]))
    labels = '{phase="decode",stage="1",worker="w1"}'
    assert f"lamina_stage_step_seconds_count{labels} 0.0" in text
    assert f"lamina_stage_step_seconds_sum{labels} 0.0" in text


def test_edges() -> None:
    text = exposed(link_metrics([0.001, 0.002], [LOOK]))
    assert 'lamina_link_rtt_seconds{stage="1"} 0.002' in text
    assert 'lamina_link_bytes_total{stage="1",worker="w1"} 4096.0' in text
    assert 'lamina_link_queue_depth{stage="1",worker="w1"} 3.0' in text
    for kind, found in (("direct", "1.0"), ("grpc", "0.0"), ("", None)):
        text = exposed(link_metrics([], [replace(LOOK, stage=replace(STAGE, link_kind=kind))]))
        values = [line.rsplit(" ")[-1] for line in text.splitlines() if line.startswith("lamina_link_direct{")]
        assert values == ([found] if found else [])


def test_workers_with_and_without_layers() -> None:
    text = exposed(worker_metrics({name: profile(name) for name in ("w0", "w1")}, {"w1": True}, [LOOK]))
    assert 'lamina_worker_up{worker="w0"} 0.0' in text
    assert 'lamina_worker_up{worker="w1"} 1.0' in text
    assert 'lamina_worker_layers{worker="w1"} 20.0' in text


def test_replans_are_counted_by_reason() -> None:
    metrics = Metrics()
    metrics.count_replan(WorkerLost("w1"))
    assert b'lamina_replans_total{reason="worker_lost"} 1.0' in metrics.exposition()


def test_a_worker_that_joined_late_is_listed_while_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`coordinator devices` shows the spare machine, too, and not another one that has its address now."""
    answers = {"10.0.0.3": profile("late"), "10.0.0.4": profile("other")}

    async def find(addresses: Sequence[Address]) -> Attendance:
        return Attendance({a: answers[a.host] for a in addresses}, {})

    async def scene() -> None:
        watch = ClusterWatch()
        watch._clients = ()  # type: ignore[assignment]
        watch.idle = {WorkerName("late"): Address("10.0.0.3", 1), WorkerName("gone"): Address("10.0.0.4", 1)}
        watch._spares = await watch._find_spares()
        workers = watch.snapshot()["workers"]
        assert [(w["name"], w["address"], w["up"]) for w in workers] == [("late", "10.0.0.3:1", True)]  # type: ignore[attr-defined]
        assert 'lamina_worker_up{worker="late"} 1.0' in exposed(watch.metrics())

    monkeypatch.setattr(cluster_watch, "call_roll", find)
    asyncio.run(scene())
