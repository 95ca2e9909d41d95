"""What workers say of themselves, and what a hop to one of them takes, on either way that frames may take.

python benchmarks/probe.py      commands on standard input, answers on standard output
"""

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contest import serve_commands

from lamina.coordinator.cluster.client import WorkerClient
from lamina.rpc_worker.direct_sender import dial, ping
from lamina.spec.address import Address, parse_address
from lamina.spec.device import LoadedStage
from lamina.v1 import step_pb2 as pb
from lamina.v1 import worker_pb2_grpc
from lamina.wire.channel import connect

_WARM_UP = 50


class Probe:
    """Commands: `busy` and `hop`."""

    def busy(self, workers: Sequence[str]) -> list[dict[str, float]]:
        """Of each worker's stage: seconds inside ops and steps since it was loaded, and the time of asking."""
        return asyncio.run(_busy(workers))

    def hop(
        self,
        worker: str,
        num_stages: int,
        num_pings: int,
        payload_bytes: int,
        pause_s: float = 0.0,
        kind: str = "direct",
    ) -> list[float]:
        """Half round trips of pings to the worker's stage, seconds, in order: on a direct connection, or on the `grpc`
        stream that offers it."""
        return asyncio.run(_hop(worker, num_stages, kind, Pings(num_pings, payload_bytes, pause_s)))


@dataclass(frozen=True, slots=True)
class Pings:
    """How many, of which size, how far apart."""

    count: int
    payload_bytes: int
    pause_s: float


async def _stage_of(client: WorkerClient) -> LoadedStage:
    profile = await client.describe()
    if not profile.stages:
        raise RuntimeError(f"{client.who} holds no stage")
    return profile.stages[-1]


async def _busy(workers: Sequence[str]) -> list[dict[str, float]]:
    found = []
    for worker in workers:
        client = await WorkerClient.dial(parse_address(worker))
        stage = await _stage_of(client)
        found.append({"busy_s": stage.busy_s, "num_steps": stage.num_steps, "at_s": time.monotonic()})
        await client.close()
    return found


async def _hop(worker: str, num_stages: int, kind: str, pings: Pings) -> list[float]:
    address = parse_address(worker)
    client = await WorkerClient.dial(address)
    stage = await _stage_of(client)
    channel = await connect(address)
    call = worker_pb2_grpc.WorkerStub(channel).Frames()
    before = (stage.stage - 1) % num_stages
    opening = pb.FramesOpen(placement=stage.placement, epoch=stage.epoch, from_stage=before, to_stage=stage.stage)
    await call.write(pb.FramesRequest(open=opening))
    response = await call.read()
    if not isinstance(response, pb.FramesResponse):
        raise RuntimeError(f"the edge was refused: {await call.details()}")
    if kind == "direct":
        place = Address(address.host, response.opened.direct_port)
        connection, _ = await dial(place, response.opened.direct_key)
        with connection:
            times = await asyncio.to_thread(_ping_directly, connection, pings)
    else:
        times = await _ping_stream(call, pings)
    call.cancel()
    await channel.close()
    await client.close()
    return times


def _ping_directly(connection: socket.socket, pings: Pings) -> list[float]:
    times = []
    for _ in range(_WARM_UP + pings.count):
        times.append(ping(connection, pings.payload_bytes) / 2)
        time.sleep(pings.pause_s)
    return times[_WARM_UP:]


async def _ping_stream(call: Any, pings: Pings) -> list[float]:
    payload, times = bytes(pings.payload_bytes), []
    for i in range(_WARM_UP + pings.count):
        start = time.perf_counter()
        await call.write(pb.FramesRequest(ping=pb.Ping(id=i, payload=payload)))
        response = await call.read()
        times.append((time.perf_counter() - start) / 2)
        if not isinstance(response, pb.FramesResponse) or response.pong.id != i:
            raise RuntimeError(f"ping {i} was not answered: {await call.details()}")
        if pings.pause_s:
            await asyncio.sleep(pings.pause_s)
    return times[_WARM_UP:]


def main() -> None:
    """Serve commands."""
    probe = Probe()
    serve_commands({"busy": probe.busy, "hop": probe.hop})


if __name__ == "__main__":
    main()
