"""Garbage on every RPC (P-15): the stream it came on ends with a typed error, everything else goes on."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from lamina.coordinator.cluster.client import WorkerClient
from lamina.spec.address import Address
from lamina.spec.device import Version
from lamina.spec.errors import VersionMismatch
from lamina.v1 import step_pb2 as pb
from lamina.v1 import worker_pb2 as wpb
from lamina.wire.channel import connect
from lamina.wire.status import ERROR_KEY
from lamina.wire.version import own_version
from support.loopback import DEADLINE_S, SETTINGS, Cluster, Talk, TinyModel, next_done, run_scene, running_worker

PROMPT = [1, 40, 7, 99, 250, 3, 17]
Says = Callable[[Sequence[int], int], list[int]]
UNARY = ("Describe", "AllocateCache", "LinkStage", "Unload")
STREAMS = ("Steps", "Frames")


async def raw_call(channel: grpc.aio.Channel, method: str, messages: Sequence[bytes]) -> tuple[grpc.StatusCode, str]:
    """Send raw bytes, read to the end: the status and the name of the error type."""
    path = f"/lamina.v1.Worker/{method}"
    call: grpc.aio.Call
    async with asyncio.timeout(DEADLINE_S):
        if method in UNARY:
            call = channel.unary_unary(path)(messages[0])
        else:
            try:
                if method == "LoadStage":
                    call = stream = channel.unary_stream(path)(messages[0])
                else:
                    call = stream = channel.stream_stream(path)()
                    for message in messages:
                        await stream.write(message)
                    await stream.done_writing()
                while await stream.read() is not grpc.aio.EOF:
                    pass
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # refused, perhaps before the end
        code = await call.code()
        trailing = dict(await call.trailing_metadata() or ())
    return code, str(trailing.get(ERROR_KEY, ""))


@pytest.fixture(autouse=True)
def _no_unexpected_exception(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """gRPC logs what a handler raises beside its own refusals: an error nobody thought of. Bytes that are no message at
    all never reach the handler of a unary call."""
    yield
    logged = [record.getMessage() for record in caplog.get_records("call") if record.name.startswith("grpc")]
    assert [text for text in logged if "[DecodeError]" not in text or "Steps]" in text or "Frames]" in text] == []


@asynccontextmanager
async def a_busy_worker(model: TinyModel) -> AsyncIterator[tuple[grpc.aio.Channel, Talk, Cluster]]:
    """A worker with a running sequence of two local stages, and a stranger's channel to it."""
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(running_worker("a"))
        cluster = await stack.enter_async_context(Cluster.over(model, a))
        pipeline = await cluster.deploy((2,), ("a", "a"))
        talk = Talk(pipeline, PROMPT)
        talk.add()
        talk.issue()
        talk.take(await next_done(pipeline))
        channel = await connect(a.settings.listen)
        yield channel, talk, cluster
        await channel.close()


async def goes_on(talk: Talk, cluster: Cluster, says: Says) -> None:
    """The running sequence continues as if nothing had been, and the worker describes itself."""
    while talk.num_issued < 12:
        talk.issue()
        talk.take(await next_done(talk.pipeline))
    assert talk.tokens == says(PROMPT, 12)
    assert len(await cluster.stages("a")) == 2


def sent(**command: Any) -> pb.StepsRequest:
    """One command as it is sent."""
    return pb.StepsRequest(commands=[pb.StepCommand(**command)])


def random_messages(rng: random.Random) -> list[bytes]:
    """Bytes of many kinds: none, noise, truncated and mutated messages, huge lengths and numbers."""
    steps = pb.StepsRequest(open=pb.StepsOpen(placement="p", epoch=1, stage=0)).SerializeToString()
    plan = sent(plan=pb.StepPlan(epoch=1, seq=[1], pos=[2**32 - 1], num_tokens=[2**32 - 1])).SerializeToString()
    load = wpb.LoadStageRequest(
        placement="p", epoch=2**64 - 1, num_layers=2**32 - 1, stage=2**32 - 1
    ).SerializeToString()
    seeds = [steps, plan, load, b"\x0a\xff\xff\xff\xff\x0f", b"\x08" + b"\xff" * 9 + b"\x01", b"\x0a" * 200]
    messages = [b""]
    for seed in seeds:
        mutated = bytearray(seed)
        for _ in range(3):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        messages += [seed, seed[: len(seed) // 2], bytes(mutated), rng.randbytes(rng.randrange(1, 40))]
    return messages


@pytest.mark.parametrize("method", [*UNARY, "LoadStage", *STREAMS])
def test_random_bytes(model: TinyModel, whole_model_says: Says, method: str) -> None:
    """Nothing that a stranger without the placement's id can send disturbs the placement."""

    async def scene() -> None:
        async with a_busy_worker(model) as (channel, talk, cluster):
            rng = random.Random(method)
            for message in random_messages(rng):
                code, _ = await raw_call(channel, method, [message, rng.randbytes(8)])
                if method not in ("Describe", "Unload"):
                    assert code is not grpc.StatusCode.OK, message
            await goes_on(talk, cluster, whole_model_says)

    run_scene(scene)


def opened(kind: str, **changes: object) -> pb.StepsRequest | pb.FramesRequest:
    """The first message of a stream to the running placement, or one that is wrong in one field."""
    if kind == "Steps":
        fields: dict[str, object] = {"placement": "p", "epoch": 1, "stage": 1, "settings_digest": SETTINGS.digest()}
        return pb.StepsRequest(open=pb.StepsOpen(**(fields | changes)))  # type: ignore[arg-type]
    fields = {"placement": "p", "epoch": 1, "from_stage": 0, "to_stage": 1}
    return pb.FramesRequest(open=pb.FramesOpen(**(fields | changes)))  # type: ignore[arg-type]


FIRST_MESSAGES = [
    ("Steps", [], "InvalidPlan"),
    ("Steps", [pb.StepsRequest()], "InvalidPlan"),
    ("Steps", [sent(remove_sequence=pb.RemoveSequence(seq=1))], "InvalidPlan"),
    ("Steps", [pb.StepsRequest(open=opened("Steps").open, commands=[pb.StepCommand()])], "InvalidPlan"),
    ("Steps", [opened("Steps", placement="x")], "InvalidRequest"),
    ("Steps", [opened("Steps", epoch=2)], "StaleEpoch"),
    ("Steps", [opened("Steps", epoch=2**64 - 1)], "StaleEpoch"),
    ("Steps", [opened("Steps", stage=2)], "InvalidRequest"),
    ("Steps", [opened("Steps", settings_digest=b"")], "InvalidRequest"),
    ("Steps", [opened("Steps")], "Unavailable"),
    ("Frames", [], "InvalidPlan"),
    ("Frames", [pb.FramesRequest()], "InvalidPlan"),
    ("Frames", [pb.FramesRequest(ping=pb.Ping(id=1))], "InvalidPlan"),
    ("Frames", [opened("Frames", placement="x")], "InvalidRequest"),
    ("Frames", [opened("Frames", epoch=0)], "StaleEpoch"),
    ("Frames", [opened("Frames", from_stage=7)], "InvalidPlan"),
    ("Frames", [opened("Frames", to_stage=2**32 - 1)], "InvalidRequest"),
    ("Frames", [opened("Frames"), opened("Frames")], "InvalidPlan"),
    ("Frames", [opened("Frames"), pb.FramesRequest()], "InvalidPlan"),
    ("Frames", [opened("Frames"), pb.FramesRequest(done=pb.StepDone(epoch=1))], "InvalidPlan"),
    ("Frames", [opened("Frames"), pb.FramesRequest(frame=pb.Frame(epoch=1, step=0))], "InvalidPlan"),
    ("Frames", [opened("Frames"), pb.FramesRequest(frame=pb.Frame(epoch=1, step=9, rows=2**32 - 1))], "InvalidPlan"),
    ("Frames", [opened("Frames"), pb.FramesRequest(frame=pb.Frame(epoch=9, step=1))], "StaleEpoch"),
    ("Frames", [opened("Frames", from_stage=1, to_stage=0), pb.FramesRequest(frame=pb.Frame(epoch=1))], "InvalidPlan"),
    (
        "Frames",
        [opened("Frames", from_stage=1, to_stage=0), pb.FramesRequest(done=pb.StepDone(epoch=1, step=99))],
        "InvalidPlan",
    ),
    (
        "Frames",
        [
            opened("Frames", from_stage=1, to_stage=0),
            pb.FramesRequest(done=pb.StepDone(epoch=1, seq=[1], pos=[1], token=[2**32 - 1], finish=[0])),
        ],
        "InvalidPlan",
    ),
]


@pytest.mark.timeout(60)
def test_well_formed_messages_out_of_order(model: TinyModel, whole_model_says: Says) -> None:
    """P-26: each is refused with its type, and the controller and neighbours of the stage notice nothing."""

    async def scene() -> None:
        async with a_busy_worker(model) as (channel, talk, cluster):
            for method, messages, expected in FIRST_MESSAGES:
                raw = [message.SerializeToString() for message in messages]
                code, name = await raw_call(channel, method, raw)
                assert (code is not grpc.StatusCode.OK, name) == (True, expected), (method, messages)
            await goes_on(talk, cluster, whole_model_says)

    run_scene(scene)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (pb.StepsRequest(), "InvalidPlan"),
        (sent(), "InvalidPlan"),
        (opened("Steps"), "InvalidPlan"),
        (sent(plan=pb.StepPlan(epoch=1, step=0)), "InvalidPlan"),
        (sent(plan=pb.StepPlan(epoch=2, step=0, seq=[1], pos=[0], num_tokens=[1])), "InvalidPlan"),
        (sent(sample_token=pb.SampleToken(epoch=7)), "StaleEpoch"),
        (sent(sample_token=pb.SampleToken(epoch=1, token=2**32 - 1)), "InvalidPlan"),
        (sent(add_sequence=pb.AddSequence(seq=1)), "InvalidRequest"),
    ],
    ids=range(8),
)
def test_the_controller_itself_sends_nonsense(model: TinyModel, command: pb.StepsRequest, error: str) -> None:
    """It hears why, its stream ends, and the stage is an orphan that the next coordinator adopts."""

    async def scene() -> None:
        async with running_worker("a") as a, Cluster.over(model, a) as cluster:
            pipeline = await cluster.deploy()
            call = pipeline._calls[0]
            pipeline._outboxes[0].put(command.SerializeToString())
            with pytest.raises(Exception, match=r"a \(layers 0-3\): ") as caught:
                await next_done(pipeline)
            assert type(caught.value).__name__ == error
            assert await call.code() is grpc.StatusCode.OK
            await cluster.until_orphaned("a")
            again = await cluster.deploy(epoch=2)
            assert len(await Talk(again, PROMPT).run(2)) == 2

    run_scene(scene)


def test_something_else_answers_there(model: TinyModel) -> None:
    """A gRPC server that is no lamina worker."""

    async def scene() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with pytest.raises(VersionMismatch, match=rf"worker 127.0.0.1:{port}: what answers there is no lamina worker"):
            await WorkerClient.dial(Address("127.0.0.1", port))
        await server.stop(None)

    run_scene(scene)


@pytest.mark.parametrize("side", ["coordinator", "worker"])
def test_another_schema_is_named_on_both_sides(model: TinyModel, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """P-25, C-03: old with new both ways; the message has both versions."""
    other = Version("9.9", 1, 0, b"\x01" * 32)
    where = "lamina.coordinator.cluster.client" if side == "coordinator" else "lamina.rpc_worker.service"
    monkeypatch.setattr(f"{where}.own_version", lambda: other)
    both = rf"wire schemas differ: .* runs {other}, this side {own_version()}".replace("(", r"\(").replace(")", r"\)")
    both = both.replace("+", r"\+")

    async def scene() -> None:
        async with running_worker("a") as a:
            if side == "worker":
                with pytest.raises(VersionMismatch, match=both):
                    await WorkerClient.dial(a.settings.listen)
            else:
                async with Cluster.over(model, a) as cluster:
                    with pytest.raises(VersionMismatch, match=both):
                        await cluster.deploy()

    run_scene(scene)
