"""What workers say of themselves, and what a hop to one of them takes, over the same gRPC stack that links use.

python benchmarks/probe.py      commands on standard input, answers on standard output
"""

import asyncio
import time
from collections.abc import Sequence

from contest import serve_commands

from lamina.coordinator.cluster.client import WorkerClient
from lamina.spec.address import parse_address
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
        self, worker: str, num_stages: int, num_pings: int, payload_bytes: int, pause_s: float = 0.0
    ) -> list[float]:
        """Half round trips of Ping messages on a Frames stream of the worker's stage, seconds, in order."""
        return asyncio.run(_hop(worker, num_stages, num_pings, payload_bytes, pause_s))


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


async def _hop(worker: str, num_stages: int, num_pings: int, payload_bytes: int, pause_s: float) -> list[float]:
    address = parse_address(worker)
    client = await WorkerClient.dial(address)
    stage = await _stage_of(client)
    channel = await connect(address)
    call = worker_pb2_grpc.WorkerStub(channel).Frames()
    before = (stage.stage - 1) % num_stages
    opening = pb.FramesOpen(placement=stage.placement, epoch=stage.epoch, from_stage=before, to_stage=stage.stage)
    await call.write(pb.FramesRequest(open=opening))
    await call.read()
    payload = bytes(payload_bytes)
    times = []
    for i in range(_WARM_UP + num_pings):
        start = time.perf_counter()
        await call.write(pb.FramesRequest(ping=pb.Ping(id=i, payload=payload)))
        response = await call.read()
        elapsed = time.perf_counter() - start
        if not isinstance(response, pb.FramesResponse) or response.pong.id != i:
            raise RuntimeError(f"ping {i} was not answered: {await call.details()}")
        if i >= _WARM_UP:
            times.append(elapsed / 2)
        if pause_s:
            await asyncio.sleep(pause_s)
    call.cancel()
    await channel.close()
    await client.close()
    return times


def main() -> None:
    """Serve commands."""
    probe = Probe()
    serve_commands({"busy": probe.busy, "hop": probe.hop})


if __name__ == "__main__":
    main()
