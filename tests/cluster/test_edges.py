"""Edges between workers of their own: direct connections, gRPC in their place, what either leaves behind."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from lamina.rpc_worker.daemon import Daemon
from lamina.rpc_worker.link import RemoteLink
from lamina.spec.errors import InvalidPlan, LaminaError, StaleEpoch
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.placement import WIRE_DTYPES
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import SeqSlice, StepPlan, Tokens
from lamina.v1 import step_pb2 as pb
from support.loopback import SETTINGS, Cluster, Talk, TinyModel, eventually, next_done, run_scene, running_worker
from support.proxy import running_proxy

PROMPT = [1, 40, 7, 99, 250, 3, 17]
Says = Callable[[Sequence[int], int], list[int]]


@asynccontextmanager
async def two(
    model: TinyModel, edge_ports: tuple[int | None, int | None] = (0, 0)
) -> AsyncIterator[tuple[list[Daemon], Cluster]]:
    async with AsyncExitStack() as stack:
        daemons = [
            await stack.enter_async_context(running_worker(name, edge_port=port))
            for name, port in zip("ab", edge_ports, strict=True)
        ]
        yield daemons, await stack.enter_async_context(Cluster.over(model, *daemons))


@pytest.mark.parametrize(
    ("edge_ports", "kind"), [((0, 0), "direct"), ((None, None), "grpc"), ((0, None), "grpc"), ((None, 0), "grpc")]
)
def test_the_text_is_the_same_on_every_kind_of_edge(
    model: TinyModel, whole_model_says: Says, edge_ports: tuple[int | None, int | None], kind: str
) -> None:
    """A worker without an edge port neither offers a direct connection nor opens one."""

    async def scene() -> None:
        async with two(model, edge_ports) as (daemons, cluster):
            assert [daemon.settings.edge_port is None for daemon in daemons] == [port is None for port in edge_ports]
            pipeline = await cluster.deploy((2,), ("a", "b"))
            assert await Talk(pipeline, PROMPT).run(12) == whole_model_says(PROMPT, 12)
            stages = [(await cluster.stages(name))[0] for name in "ab"]
            assert [stage.link_kind for stage in stages] == [kind] * 2
            frames_bytes = 4 * model.spec.hidden * (len(PROMPT) + 11)
            assert frames_bytes < stages[0].link_bytes < frames_bytes + 12 * 60
            assert 0 < stages[1].link_bytes < 12 * 60
            assert all(0 < rtt_s < 1 for rtt_s in pipeline.link_rtts_s)

    run_scene(scene)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_values_arrive_as_they_do_through_grpc(model: TinyModel, wire_dtype: str) -> None:
    """Sampled with log-probabilities, which differ if a bit of a hidden state does."""
    found = []

    async def scene() -> None:
        for edge_port in (0, None):
            async with two(model, (edge_port, edge_port)) as (_, cluster):
                cluster.settings = replace(SETTINGS, wire_dtype=wire_dtype)
                talk = Talk(await cluster.deploy((2,), ("a", "b")), PROMPT, sampling=SamplingParams(num_logprobs=0))
                talk.add()
                logprobs = []
                for _ in range(6):
                    talk.issue()
                    logprobs += [token.logprob for token in (await next_done(talk.pipeline)).tokens]
                found.append(logprobs)

    run_scene(scene)
    assert len(found[0]) == 6
    assert found[0] == found[1]


def test_a_port_that_is_not_forwarded_costs_one_line(
    model: TinyModel, whole_model_says: Says, caplog: pytest.LogCaptureFixture
) -> None:
    """It says that frames go through gRPC, why, and what to open; the text is the same."""

    async def scene() -> None:
        async with two(model) as (daemons, cluster), running_proxy(daemons[1].settings.listen) as proxy:
            pipeline = await cluster.deploy((2,), ("a", "b"))
            placement = pipeline.placement
            worker = cluster.workers[placement.stages[0].device.worker]
            caplog.clear()
            await worker.link_stage(placement, placement.stages[0], 1, proxy.address)
            assert await Talk(pipeline, PROMPT).run(5) == whole_model_says(PROMPT, 5)
            port = daemons[1].settings.edge_port
            assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
                f"stage 1 at {proxy.address}: frames go through gRPC, which takes longer: no direct connection to"
                f" {proxy.address.host}:{port} (connection refused); let this machine reach that port, which"
                " --edge-port of the worker there fixes"
            ]
            assert [(await cluster.stages(name))[0].link_kind for name in "ab"] == ["grpc", "direct"]

    run_scene(scene)


def plan_of(step: int, epoch: int = 1, num_rows: int = 1) -> StepPlan:
    piece = SeqSlice(SeqId(0), 0, num_rows, Tokens(tuple(range(num_rows))), ((),), True)
    return StepPlan(Epoch(epoch), StepId(step), (piece,))


@pytest.mark.parametrize("kind", ["direct", "grpc"])
@pytest.mark.parametrize(
    ("plan", "error", "says"),
    [
        (plan_of(0, epoch=9), StaleEpoch, "frame of step 0 is of epoch 9, this stage is in epoch 1"),
        (plan_of(500), InvalidPlan, "frame of step 500 is not expected; step 0 runs next"),
        (plan_of(0, num_rows=SETTINGS.max_rows + 1), InvalidPlan, "up to 64 rows"),
    ],
    ids=["epoch", "step", "rows"],
)
def test_who_sends_what_cannot_be_hears_why(
    model: TinyModel, kind: str, plan: StepPlan, error: type[LaminaError], says: str
) -> None:
    """By the stream's status, whichever way it came; the stage lives on (P-15)."""

    async def scene() -> None:
        async with two(model) as (daemons, cluster):
            pipeline = await cluster.deploy((2,), ("a", "b"))
            lost: list[LaminaError] = []
            opening = pb.FramesOpen(placement="p", epoch=1, from_stage=0, to_stage=1)
            link = await RemoteLink.open(
                daemons[1].settings.listen, opening, lost.append, "f32", dials=kind == "direct"
            )
            assert link.kind == kind
            link.take_hidden(plan, np.ones((plan.num_rows, model.spec.hidden), np.float32))
            await eventually(lambda: bool(lost))
            assert type(lost[0]) is error
            assert says in str(lost[0])
            await link.close()
            assert len(await Talk(pipeline, PROMPT).run(3)) == 3
            assert len(lost) == 1

    run_scene(scene)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors by /proc")
def test_epochs_leave_no_thread_and_no_descriptor(model: TinyModel) -> None:
    """Ended by the coordinator or by unloading, with steps under way or not; no garbage collection is waited for."""

    def edge_threads() -> int:
        return sum(thread.name.startswith("edge") for thread in threading.enumerate())

    async def scene() -> None:
        async with two(model) as (_, cluster):
            num_held = 0
            for epoch in range(1, 13):
                pipeline = await cluster.deploy((2,), ("a", "b"), epoch=epoch)
                assert edge_threads() == 4, "a reader and a writer of either edge"
                talk = Talk(pipeline, PROMPT)
                if epoch % 2:
                    await talk.run(2)
                else:
                    talk.add()
                    talk.issue()
                await pipeline.close(unload=epoch % 3 == 0)
                for name in "ab":
                    await cluster.until_orphaned(name)
                await eventually(lambda: edge_threads() == 0)
                if epoch <= 2:
                    num_held = num_descriptors()
                await eventually(lambda held=num_held: num_descriptors() <= held)  # type: ignore[misc]

    run_scene(scene)


def test_strangers_on_the_edge_port_disturb_nobody(model: TinyModel, whole_model_says: Says) -> None:
    """Noise, wrong keys and silence beside a running sequence (P-15)."""

    async def scene() -> None:
        async with two(model) as (daemons, cluster):
            pipeline = await cluster.deploy((2,), ("a", "b"))
            strangers = []
            talk = Talk(pipeline, PROMPT)
            talk.add()
            for index in range(24):
                port = daemons[index % 2].settings.edge_port
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write([b"", b"\0" * 100, b"lamina-edge\x01" + bytes(32)][index % 3])
                strangers.append(writer)
                if index % 2:
                    talk.issue()
                    talk.take(await next_done(pipeline))
            assert talk.tokens == whole_model_says(PROMPT, 12)
            for writer in strangers:
                writer.close()

    run_scene(scene)
