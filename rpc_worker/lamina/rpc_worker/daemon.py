"""Start and stop order of the worker: devices, server, health; then the reverse."""

import asyncio
import logging
import os
import signal
import sys
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lamina.kernels.backend import Backend, GraphMode
from lamina.kernels.cpu.threads import usable_cores
from lamina.kernels.registry import select_backend
from lamina.rpc_worker.describe import device_profile, device_table
from lamina.rpc_worker.device_thread import DeviceThread
from lamina.rpc_worker.direct_listener import DirectListener
from lamina.rpc_worker.join import stay_joined
from lamina.rpc_worker.service import WorkerService
from lamina.rpc_worker.settings import WorkerSettings
from lamina.rpc_worker.stage_registry import StageRegistry
from lamina.rpc_worker.tracing import TraceFile
from lamina.spec.address import Address
from lamina.spec.ids import DeviceId, WorkerName
from lamina.v1 import worker_pb2_grpc
from lamina.wire.channel import bind, server_options
from lamina.wire.direct import HAS_DIRECT
from lamina.wire.event_loop import leave_to_stay
from lamina.wire.version import own_version

_log = logging.getLogger(__name__)
_SERVICE = "lamina.v1.Worker"
_GRACE_S = 2.0
_STOP_DEADLINE_S = 10.0
# Whoever holds the interpreter must not do so for the default 5 ms while a compute thread wants it for its next step.
_SWITCH_INTERVAL_S = 1e-4


class Daemon:
    """A serving worker. Built by `start`; `stop` undoes it in reverse order."""

    def __init__(
        self,
        settings: WorkerSettings,
        devices: tuple[DeviceThread, ...],
        registry: StageRegistry,
        server: grpc.aio.Server,
        checks: health.aio.HealthServicer,
        edges: DirectListener | None,
        trace: TraceFile | None,
    ) -> None:
        self.settings = settings
        self.devices = devices
        self.registry = registry
        self._server = server
        self._checks = checks
        self._edges = edges
        self._trace = trace

    @classmethod
    async def start(cls, settings: WorkerSettings) -> "Daemon":
        """Bind, start the devices, serve. The result's `settings` name the ports that were really taken.

        Raises InvalidConfig (port in use), CapacityExceeded, Unsupported.
        """
        server = grpc.aio.server(options=server_options())
        settings = replace(settings, listen=bind(server, settings.listen, "--listen"))
        edges = _listen_for_edges(settings)
        settings = replace(settings, edge_port=None if edges is None else edges.port)
        devices = tuple([await _start_device(name, settings) for name in settings.devices])
        trace = None if settings.trace_directory is None else TraceFile(settings.trace_directory, settings.name)
        registry = StageRegistry(settings, devices, trace)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(settings, devices, registry, edges), server)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        await server.start()
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        await checks.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        return cls(settings, devices, registry, server, checks, edges, trace)

    async def stop(self) -> bool:
        """Tell everybody, end the streams, free the stages, end the threads.

        A device that is deep in a step is not waited for longer than a deadline: its thread ends with the process, and
        the answer is False.
        """
        is_idle = True
        await self._checks.enter_graceful_shutdown()
        self.registry.end_all()
        await self._server.stop(_GRACE_S)
        if self._edges is not None:
            await self._edges.close()
        try:
            async with asyncio.timeout(_STOP_DEADLINE_S):
                await self.registry.close()
                await asyncio.gather(*(device.stop() for device in self.devices))
        except TimeoutError:
            is_idle = False
            _log.warning("a device is still busy after %g s; leaving it behind", _STOP_DEADLINE_S)
        if self._trace is not None:
            self._trace.close()
            _log.info("trace in %s", self._trace.path)
        return is_idle


async def run_worker(settings: WorkerSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises InvalidConfig (port in use), CapacityExceeded, Unsupported."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    daemon = await Daemon.start(settings)
    leave_to_stay()
    try:
        _announce(daemon.settings, daemon.devices)
        await _until_stopped(stop, daemon.settings)
    finally:
        _log.info("stopping, which takes at most %g s", _GRACE_S + _STOP_DEADLINE_S)
        is_idle = await daemon.stop()
    if not is_idle:
        _end_at_once()


def _end_at_once() -> None:
    """End the process, for which Python would wait until those are done whom the busy thread waits for: compilers."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


async def _until_stopped(stop: asyncio.Event, settings: WorkerSettings) -> None:
    """Stay joined, if asked to, until a signal comes. Raises what the coordinator refuses this worker for."""
    waiting = asyncio.create_task(stop.wait())
    tasks: list[asyncio.Task[Any]] = [waiting]
    if settings.join is not None:
        reachable_at = settings.advertise or settings.listen
        tasks.append(asyncio.create_task(stay_joined(settings.join, settings.name, reachable_at)))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _listen_for_edges(settings: WorkerSettings) -> DirectListener | None:
    if settings.edge_port is None or not HAS_DIRECT:
        return None
    return DirectListener.open(Address(settings.listen.host, settings.edge_port))


async def _start_device(name: str, settings: WorkerSettings) -> DeviceThread:
    selection = select_backend(
        name,
        threads=settings.num_threads,
        max_memory_bytes=settings.max_memory_bytes,
        graphs=GraphMode(settings.cuda_graphs),
    )
    if selection.passed_over:
        _log.warning("%s", selection.explain())
    device = DeviceThread(selection.backend, f"compute-{name}", len(settings.devices))
    device.served_by = f"{selection.implementation} ({selection.why_not_better})" if selection.passed_over else ""
    await device.start()
    return device


def _log_choices(settings: WorkerSettings, backend: Backend) -> None:
    """Once per device: whether it replays graphs and why (C-13, C-16), and wishes that it cannot or should not meet."""
    if backend.name == "cuda":
        decision = backend.graph_decision()
        state = "on trial" if decision.probe else "on" if decision.enabled else "off"
        _log.info("%s: CUDA graphs %s: %s", backend.device_facts().name, state, decision.reason)
    if backend.name == "cpu" and (settings.num_threads or 0) > (num_cores := usable_cores()):
        _log.warning(
            "--threads %d is more than the %d core(s) that this process may use, which slows every step; leave it out"
            " for one thread a core",
            settings.num_threads,
            num_cores,
        )
    offered, wish = backend.capabilities.compute_dtypes, settings.compute_dtype
    if wish != "auto" and wish not in offered:
        _log.warning("%s computes in %s; --compute-dtype %s does not concern it", backend.name, offered[0], wish)


def _announce(settings: WorkerSettings, devices: tuple[DeviceThread, ...]) -> None:
    worker = WorkerName(settings.name)
    profiles = [
        device_profile(DeviceId(worker, index), device.backend, device.last_facts)
        for index, device in enumerate(devices)
    ]
    print(device_table(profiles, [device.served_by for device in devices]), end="")
    for device in devices:
        _log_choices(settings, device.backend)
    if settings.trace_directory is not None:
        _log.warning(
            "tracing into %s: steps run op by op, small models tens of times slower on a CPU; the file is complete when"
            " this worker has stopped",
            settings.trace_directory,
        )
    frames = "through gRPC" if settings.edge_port is None else f"on port {settings.edge_port}"
    print(f"worker {settings.name}, {own_version()}, frames {frames}, listening on {settings.listen}", flush=True)
