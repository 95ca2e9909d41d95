"""What breaks while steps run: a worker, an edge, the coordinator. One names the cause, the others live on."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from lamina.coordinator.cluster.client import StepsCall, WorkerClient
from lamina.rpc_worker.daemon import Daemon
from lamina.spec.address import Address
from lamina.spec.errors import InvalidPlan, Unavailable, WorkerLost, WorkerUnreachable
from lamina.spec.ids import Epoch, SeqId, StepId, WorkerName
from lamina.spec.step import SeqSlice, StepPlan, Tokens
from lamina.wire import channel
from lamina.wire.channel import channel_options
from support.loopback import Cluster, Talk, TinyModel, failure_of, next_done, run_scene, running_worker
from support.proxy import Proxy, running_proxy

PROMPT = [1, 40, 7, 99, 250, 3, 17]
Says = Callable[[Sequence[int], int], list[int]]


async def three(stack: AsyncExitStack, model: TinyModel) -> tuple[list[Daemon], Cluster]:
    daemons = [await stack.enter_async_context(running_worker(name)) for name in "abc"]
    return daemons, await stack.enter_async_context(Cluster.over(model, *daemons))


@asynccontextmanager
async def relinked(cluster: Cluster, talk: Talk, stage: int, daemon: Daemon, kind: str) -> AsyncIterator[Proxy]:
    """Have a stage reach its successor, on `daemon`, through a proxy; on a direct connection if that is the `kind`."""
    placement = talk.pipeline.placement
    spec = placement.stages[stage]
    following = (stage + 1) % len(placement.stages)
    edge_port = daemon.settings.edge_port or 0
    async with running_proxy(daemon.settings.listen, edge_port if kind == "direct" else 0) as proxy:
        await cluster.workers[spec.device.worker].link_stage(placement, spec, following, proxy.address)
        assert (await cluster.stages(spec.device.worker))[0].link_kind == kind
        assert proxy.num_connections == {daemon.settings.listen.port: 1} | ({edge_port: 1} if kind == "direct" else {})
        yield proxy


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_middle_worker_is_lost(model: TinyModel, whole_model_says: Says, how: str) -> None:
    """The error names the worker, its layers and the cause; the others answer, forget the epoch, and serve the next."""

    async def scene() -> None:
        async with AsyncExitStack() as stack:
            daemons, cluster = await three(stack, model)
            pipeline = await cluster.deploy((1, 2), ("a", "b", "c"))
            talk = Talk(pipeline, PROMPT)
            talk.add()
            for _ in range(3):
                talk.issue()
            await next_done(pipeline)
            if how == "killed":
                await daemons[1]._server.stop(None)
            else:
                await daemons[1].stop()
            error = await failure_of(pipeline)
            assert isinstance(error, WorkerLost | Unavailable)
            named = "worker b at .* \\(layers 1\\)|b \\(layers 1\\): the worker is shutting down|edge to stage 1 lost"
            with pytest.raises(type(error), match=named):
                raise error
            with pytest.raises(type(error)):  # what ended it is what everybody hears
                await pipeline.next_done()
            await pipeline.close(unload=False)
            for name in "ac":
                await cluster.until_orphaned(name)
                assert [stage.num_sequences for stage in await cluster.stages(name)] == [0]
            again = await cluster.deploy((2,), ("a", "c"), epoch=2)
            assert await Talk(again, PROMPT).run(8) == whole_model_says(PROMPT, 8)

    run_scene(scene)


@pytest.mark.parametrize("broken", ["grpc", "direct", "direct connection alone"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_forward_edge_breaks(model: TinyModel, stage: int, broken: str) -> None:
    """Both workers live: the one before the edge says which edge, and of which layers it is."""

    async def scene() -> None:
        async with AsyncExitStack() as stack:
            daemons, cluster = await three(stack, model)
            pipeline = await cluster.deploy((1, 2), ("a", "b", "c"))
            talk = Talk(pipeline, PROMPT)
            following = daemons[stage + 1]
            kind = "grpc" if broken == "grpc" else "direct"
            proxy = await stack.enter_async_context(relinked(cluster, talk, stage, following, kind))
            talk.add()
            talk.issue()
            talk.take(await next_done(pipeline))
            proxy.cut(following.settings.edge_port if broken == "direct connection alone" else None)
            error = await failure_of(pipeline)
            assert isinstance(error, WorkerLost)
            worker = "ab"[stage]
            assert str(error).startswith(
                f"{worker} (layers {stage}): edge to stage {stage + 1} lost: stage {stage + 1} at"
            )
            for name in "abc":
                assert len(await cluster.stages(name)) == 1

    run_scene(scene)


@pytest.mark.parametrize("kind", ["grpc", "direct"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_feedback_edge_breaks_with_answers_on_it(
    model: TinyModel, whole_model_says: Says, num_stages: int, kind: str
) -> None:
    """Stage 0 gets the swallowed tokens, and all later ones, through the coordinator: the text is the same."""

    async def scene() -> None:
        async with AsyncExitStack() as stack:
            daemons, cluster = await three(stack, model)
            pipeline = await cluster.deploy((1, 2)[: num_stages - 1], ("a", "b", "c")[:num_stages])
            talk = Talk(pipeline, PROMPT)
            proxy = await stack.enter_async_context(relinked(cluster, talk, num_stages - 1, daemons[0], kind))
            talk.add()
            for _ in range(4):
                talk.issue()
                talk.take(await next_done(pipeline))
            proxy.stall()
            for _ in range(3):
                talk.issue()
            talk.take(await next_done(pipeline))  # sampled, but stage 0 does not hear of it
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pipeline.next_done(), 0.3)
            proxy.cut()
            while talk.num_issued < 20:
                talk.take(await next_done(pipeline))
                talk.issue()
            while len(talk.tokens) < 20:
                talk.take(await next_done(pipeline))
            assert talk.tokens == whole_model_says(PROMPT, 20)

    run_scene(scene)


def test_no_feedback_edge_at_all(model: TinyModel, whole_model_says: Says) -> None:
    """The last stage was never linked (or its edge was refused): every token takes the way through the coordinator."""

    async def scene() -> None:
        async with AsyncExitStack() as stack:
            daemons, cluster = await three(stack, model)
            pipeline = await cluster.deploy((2,), ("a", "b"))
            await next(iter(daemons[1].registry)).close_link()
            assert await Talk(pipeline, PROMPT).run(15) == whole_model_says(PROMPT, 15)

    run_scene(scene)


def test_a_silent_worker_is_noticed_within_ten_seconds(model: TinyModel) -> None:
    """P-27: a suspended laptop keeps its connections and says nothing; an idle pipeline must notice nevertheless."""

    async def scene() -> None:
        async with running_worker("a") as a, running_proxy(a.settings.listen) as proxy:
            worker = await WorkerClient.dial(proxy.address)
            cluster = Cluster(model, {WorkerName("a"): worker})
            pipeline = await cluster.deploy()
            proxy.stall()
            start = time.monotonic()
            error = await failure_of(pipeline)
            assert isinstance(error, WorkerLost)
            assert time.monotonic() - start < 10
            proxy.cut()
            await pipeline.close(unload=False)
            await worker.close()

    run_scene(scene)


def test_a_worker_that_hangs_while_it_is_loaded_holds_up_nobody(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-27: its silence is waited for once; it is not asked to unload what the others then do, and may load anew."""
    patient = dict(channel_options())
    hasty = {**patient, "grpc.keepalive_time_ms": 2_100, "grpc.http2.ping_timeout_ms": 500}
    monkeypatch.setattr(channel, "channel_options", lambda: [*hasty.items()])

    async def scene() -> None:
        async with AsyncExitStack() as stack:
            a, b = [await stack.enter_async_context(running_worker(name)) for name in "ab"]
            proxy = await stack.enter_async_context(running_proxy(b.settings.listen))
            cluster = Cluster(
                model,
                {
                    WorkerName("a"): await WorkerClient.dial(a.settings.listen),
                    WorkerName("b"): await WorkerClient.dial(proxy.address),
                },
            )
            hung = cluster.workers[WorkerName("b")]
            open_steps = hung.open_steps

            async def hang(*arguments: Any) -> StepsCall:
                proxy.stall()
                try:
                    return await open_steps(*arguments)
                finally:
                    noticed_s.append(time.monotonic())

            noticed_s: list[float] = []
            monkeypatch.setattr(hung, "open_steps", hang)
            with pytest.raises(WorkerLost, match=r"worker b at .*: has stopped answering \(hung, suspended"):
                await cluster.deploy((2,), ("a", "b"))
            assert time.monotonic() - noticed_s[0] < 1
            assert await cluster.stages("a") == ()
            proxy.cut()
            for client in cluster.workers.values():
                await client.close()

    run_scene(scene)


def test_a_call_whose_connection_is_given_up_is_a_lost_worker() -> None:
    """As when the pipeline is lost while a request's grammar is compiled; who is cancelled himself stays cancelled."""

    async def scene() -> None:
        async with running_worker("a") as a, running_proxy(a.settings.listen) as proxy:
            worker = await WorkerClient.dial(proxy.address)
            proxy.stall()
            calls = [asyncio.create_task(worker.describe()) for _ in range(2)]
            await asyncio.sleep(0.05)
            calls[0].cancel()
            await worker.close()
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(ends[0], asyncio.CancelledError)
            assert isinstance(ends[1], WorkerLost)
            assert "worker a at" in str(ends[1])
            proxy.cut()

    run_scene(scene)


def test_open_but_silent_port() -> None:
    """Something listens and never speaks: refused at the connect deadline, with what to check (P-27)."""

    async def scene() -> None:
        held: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        start = time.monotonic()
        with pytest.raises(WorkerUnreachable, match=rf"worker {host}:{port}: no connection within 0.5 s; is"):
            await WorkerClient.dial(Address(host, port), deadline_s=0.5)
        assert time.monotonic() - start < 3
        server.close()
        for writer in held:
            writer.close()

    run_scene(scene)


def test_a_wrong_plan_ends_this_epoch_only(model: TinyModel, whole_model_says: Says) -> None:
    """InvalidPlan on the compute thread: the stage says who, which layers, what; another placement goes on."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            pipeline, other = await cluster.deploy(), await cluster.deploy(id_="q")
            talk = Talk(pipeline, PROMPT)
            talk.add()
            talk.issue()
            gap = SeqSlice(SeqId(0), 9, 1, Tokens((1,)), ((),), True)
            pipeline.issue(StepPlan(Epoch(1), StepId(1), (gap,)))
            error = await failure_of(pipeline)
            assert isinstance(error, InvalidPlan)
            assert str(error) == "a (layers 0-3): sequence 0 at position 9: its next position is 7"
            assert await Talk(other, PROMPT).run(5) == whole_model_says(PROMPT, 5)

    run_scene(scene)


def test_streams_that_are_given_up_at_once(model: TinyModel) -> None:
    """A coordinator that vanishes anywhere while it opens its stream leaves no controller behind."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            epoch = 0
            for moment in range(12):
                epoch += 1
                pipeline = await cluster.deploy(epoch=epoch)
                await pipeline.close(unload=False)
                await cluster.until_orphaned("a")
                epoch += 1
                placement = cluster.placement("p", epoch, (), ("a",))
                worker, stage = cluster.workers[WorkerName("a")], placement.stages[0]
                async for _ in worker.load_stage(placement, stage, model.spec, str(model.path), cluster.settings):
                    pass
                await worker.allocate_cache(placement, stage, pipeline.num_blocks)
                opening = asyncio.create_task(worker.open_steps(placement, stage, cluster.settings))
                for _ in range(moment):
                    await asyncio.sleep(0)
                opening.cancel()
                for call in await asyncio.gather(opening, return_exceptions=True):
                    if not isinstance(call, BaseException):
                        call.cancel()
                await cluster.until_orphaned("a")
            assert len(await cluster.stages("a")) == 1

    run_scene(scene)
