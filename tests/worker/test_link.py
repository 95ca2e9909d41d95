"""The edge to a stage in another process: faults in its own tasks are heard of."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
import pytest

from lamina.rpc_worker.link import RemoteLink
from lamina.spec.errors import LaminaError, WorkerLost
from lamina.spec.ids import Epoch, StepId
from lamina.spec.step import StepDone


class Call:
    """A Frames stream that fails where it is told to."""

    def __init__(self, broken: str) -> None:
        self._broken = broken

    async def write(self, message: bytes) -> None:
        if self._broken == "write":
            raise ValueError("no")

    async def read(self) -> object:
        if self._broken == "read":
            raise ValueError("no")
        return await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        pass


class Channel:
    async def close(self) -> None:
        pass


@pytest.mark.parametrize("broken", ["write", "read"])
def test_a_fault_of_a_task_loses_the_edge(broken: str) -> None:
    """Nobody awaits the tasks: both stages would wait for ever."""

    async def scene() -> None:
        lost: list[LaminaError] = []
        link = RemoteLink(cast(grpc.aio.Channel, Channel()), cast(Any, Call(broken)), "stage 1 at h:1", lost.append)
        task: Callable[[], Awaitable[None]] = link._write if broken == "write" else link._watch
        link._tasks = [asyncio.create_task(cast(Any, task()))]
        link.take_done(StepDone(Epoch(1), StepId(0), ()))
        async with asyncio.timeout(5):
            while not lost:
                await asyncio.sleep(0)
        assert [(type(error), str(error)) for error in lost] == [
            (WorkerLost, "stage 1 at h:1: the edge failed: ValueError: no")
        ]
        await link.close()

    asyncio.run(scene())
