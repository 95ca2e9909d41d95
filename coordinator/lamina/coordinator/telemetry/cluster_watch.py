"""The last look at the workers: up or not, memory, stages, how busy. One task asks every few seconds.

Owned by the coordinator's loop. Nothing here is on a token's path, nothing waits for an answer to show what is known.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from lamina.coordinator.cluster.attendance import call_roll
from lamina.coordinator.cluster.client import WorkerClient
from lamina.coordinator.telemetry.device_metrics import graph_metrics, graphs_object, health_metrics, health_object
from lamina.coordinator.telemetry.stage_metrics import StageLook, link_metrics, stage_metrics, worker_metrics
from lamina.spec.address import Address
from lamina.spec.device import WorkerProfile
from lamina.spec.errors import LaminaError
from lamina.spec.ids import WorkerName
from lamina.spec.placement import Placement

PERIOD_S = 2.0
_log = logging.getLogger(__name__)


def idle_workers(placement: Placement, known: Mapping[WorkerName, Address]) -> dict[WorkerName, Address]:
    """Those of the known workers that hold no stage, in their order."""
    used = {stage.device.worker for stage in placement.stages}
    return {name: address for name, address in known.items() if name not in used}


class ClusterWatch:
    """Follows the workers of one placement at a time."""

    def __init__(self) -> None:
        self._clients: tuple[WorkerClient, ...] = ()
        self._placement: Placement | None = None
        self._link_rtts_s: tuple[float, ...] = ()
        self._profiles: dict[str, WorkerProfile] = {}
        self._addresses: dict[str, Address] = {}
        self._is_up: dict[str, bool] = {}
        self._looks: dict[int, StageLook] = {}
        self._last_s = 0.0
        self._spares: dict[str, WorkerProfile] = {}  # of the idle ones, those that joined later and answer
        # As whoever keeps the session sees them: workers without a stage, and those that the split does without.
        self.idle: Mapping[WorkerName, Address] = {}
        self.absent: tuple[Address, ...] = ()

    def follow(self, clients: Sequence[WorkerClient], placement: Placement, link_rtts_s: Sequence[float]) -> None:
        """Look at these from now on; `link_rtts_s` are the round trips of the edges in stage order."""
        self._clients = tuple(clients)
        self._placement = placement
        self._link_rtts_s = tuple(link_rtts_s)
        self._profiles = {client.profile.name: client.profile for client in clients}
        self._addresses = {client.profile.name: client.address for client in clients}
        self._is_up = dict.fromkeys(self._profiles, True)
        self._looks.clear()

    def lose_all(self) -> None:
        """Nobody is followed any more; what was known last stays to be shown, not up until a worker answers anew."""
        self._clients = ()
        self.idle = {}
        self.absent = ()
        self._spares = {}
        self._is_up = dict.fromkeys(self._is_up, False)

    async def run(self, period_s: float = PERIOD_S) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(period_s)

    async def look(self) -> None:
        """Ask every worker once; between two placements, dial those of the last one."""
        clients = self._clients
        if not clients:
            await self._dial_known()
            return
        answers = await asyncio.gather(*(client.describe() for client in clients), return_exceptions=True)
        spares = await self._find_spares()
        if clients is not self._clients:
            return  # others are followed by now
        self._spares = spares
        now = time.monotonic()
        elapsed_s, self._last_s = now - self._last_s, now
        for client, answer in zip(clients, answers, strict=True):
            name = client.profile.name
            if isinstance(answer, WorkerProfile):
                self._profiles[name] = answer
                self._take_stages(answer, elapsed_s)
            elif not isinstance(answer, LaminaError):
                _log.error("looking at worker %s failed: %r", name, answer)
            self._is_up[name] = isinstance(answer, WorkerProfile)

    async def _find_spares(self) -> dict[str, WorkerProfile]:
        """Workers that joined after the split are nobody's yet, so each look dials them anew."""
        late = [(name, address) for name, address in self.idle.items() if name not in self._profiles]
        found = (await call_roll([address for _, address in late])).present
        return {name: found[address] for name, address in late if address in found and found[address].name == name}

    async def _dial_known(self) -> None:
        """So that a lost worker can be told from those that only lost their pipeline."""
        known = self._addresses
        found = (await call_roll(list(known.values()))).present
        if self._clients:
            return
        for name, address in known.items():
            profile = found.get(address)
            self._is_up[name] = profile is not None and profile.name == name
            if profile is not None and self._is_up[name]:
                self._profiles[name] = profile

    def snapshot(self) -> dict[str, object]:
        """For /admin/cluster."""
        return {
            "epoch": self._placement.epoch if self._placement else 0,
            "workers": [self._worker_object(p) for p in (*self._profiles.values(), *self._spares.values())],
            "idle_workers": [{"name": name, "address": str(address)} for name, address in self.idle.items()],
            "absent_workers": [str(address) for address in self.absent],
            "stages": [self._stage_object(index) for index in sorted(self._looks)],
            "links": [
                {"from_stage": i, "to_stage": (i + 1) % len(self._link_rtts_s), "rtt_s": rtt_s}
                for i, rtt_s in enumerate(self._link_rtts_s)
            ],
        }

    def metrics(self) -> Iterator[Metric]:
        """For Prometheus."""
        looks = list(self._looks.values())
        known = {**self._profiles, **self._spares}
        yield from worker_metrics(known, self._is_up | dict.fromkeys(self._spares, True), looks)
        yield from stage_metrics(looks)
        yield from link_metrics(self._link_rtts_s, looks)
        yield from health_metrics(known)
        yield from graph_metrics((look.worker, index, look.stage.graphs) for index, look in self._looks.items())
        epoch = self._placement.epoch if self._placement else 0
        yield GaugeMetricFamily("lamina_placement_epoch", "Epoch of the placement.", epoch)

    def _take_stages(self, profile: WorkerProfile, elapsed_s: float) -> None:
        placement = self._placement
        for stage in profile.stages:
            if placement is None or stage.placement != placement.id:
                continue
            before = self._looks.get(stage.stage)
            busy_s = stage.busy_s - before.stage.busy_s if before else 0.0
            num_steps = stage.num_steps - before.stage.num_steps if before else 0
            self._looks[stage.stage] = StageLook(
                worker=profile.name,
                device=str(placement.stages[stage.stage].device),
                stage=stage,
                busy_ratio=min(1.0, max(0.0, busy_s / elapsed_s)) if elapsed_s > 0 else 0.0,
                steps_per_s=max(0.0, num_steps / elapsed_s) if elapsed_s > 0 else 0.0,
            )

    def _worker_object(self, profile: WorkerProfile) -> dict[str, object]:
        return {
            "name": profile.name,
            "address": str(self._addresses.get(profile.name) or self.idle.get(profile.name) or ""),
            "up": profile.name in self._spares or self._is_up[profile.name],
            "version": profile.version.product,
            "uptime_s": round(profile.uptime_s, 1),
            "devices": [
                {
                    "index": device.id.index,
                    "kind": device.kind,
                    "name": device.name,
                    "total_bytes": device.total_bytes,
                    "free_bytes": device.free_bytes,
                    "kernel": device.kernel,
                    "compute_dtype": device.compute_dtype,
                    "threads": device.threads,
                    "health": health_object(device.health),
                }
                for device in profile.devices
            ],
        }

    def _stage_object(self, index: int) -> dict[str, object]:
        look = self._looks[index]
        stage = look.stage
        return {
            "stage": index,
            "worker": look.worker,
            "device": look.device,
            "first_layer": stage.layers.start,
            "num_layers": len(stage.layers),
            "weight_bytes": stage.weight_bytes,
            "cache_bytes": stage.cache_bytes,
            "arena_bytes": stage.arena_bytes,
            "num_steps": stage.num_steps,
            "steps_per_s": round(look.steps_per_s, 2),
            "busy_ratio": round(look.busy_ratio, 4),
            "num_sequences": stage.num_sequences,
            "link_bytes": stage.link_bytes,
            "link_queue_depth": stage.link_queue_depth,
            "link_kind": stage.link_kind,
            "compute_dtype": stage.compute_dtype,
            "graphs": graphs_object(stage.graphs),
        }
