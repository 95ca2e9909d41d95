"""The receiving end of direct connections: what is checked before it is read, who reads, how it ends."""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from lamina.rpc_worker import direct_receiver
from lamina.rpc_worker.direct_listener import Offer
from lamina.rpc_worker.direct_sender import dial, ping
from lamina.spec.address import Address
from lamina.spec.errors import InvalidPlan, LaminaError, StaleEpoch, WorkerLost
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.step import SampledToken, SeqSlice, StepDone, StepPlan, Tokens
from lamina.wire.direct import (
    FRAME,
    MAX_PING_BYTES,
    MAX_TOKENS,
    PING,
    PONG,
    TOKENS,
    encode_ping,
    encode_tokens,
    frame_beginning,
)
from lamina.wire.frames import MAX_PAYLOAD_BYTES
from support.edges import Taker, hangs_up, listening
from support.loopback import eventually, run_scene
from support.spinning import spinning_thread

WAYS = ["its own thread reads", "the compute thread reads"]


@asynccontextmanager
async def edge(way: str = WAYS[0]) -> AsyncIterator[tuple[Taker, Offer, socket.socket]]:
    """A stage, the offer of its edge, and a connection that was accepted for it and, on one way, has been lent."""
    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(listening())
        taker = Taker()
        if way == WAYS[1]:
            taker.device = await stack.enter_async_context(spinning_thread(30.0))
        offer = stack.enter_context(listener.offer(taker))
        connection, _ = await dial(Address("127.0.0.1", offer.port), offer.key)
        stack.enter_context(connection)
        if taker.device is not None:
            connection.sendall(done_message())
            await eventually(lambda: taker.num_lent == 1)
            taker.answers.clear()
        yield taker, offer, connection


def frame_message(payload: bytes, epoch: int = 1, step: int = 0) -> bytes:
    plan = StepPlan(Epoch(epoch), StepId(step), (SeqSlice(SeqId(0), 0, 1, Tokens((1,)), ((),), True),))
    return frame_beginning(plan, np.empty((1, len(payload) // 4)), "f32", len(payload)) + payload


def done_message(step: int = 0, num_tokens: int = 1) -> bytes:
    tokens = tuple(SampledToken(SeqId(seq), 2, 3) for seq in range(num_tokens))
    return encode_tokens(StepDone(Epoch(1), StepId(step), tokens))


async def end_of(offer: Offer) -> LaminaError:
    async with asyncio.timeout(10):
        return await offer.ended


@pytest.mark.parametrize("way", WAYS)
def test_messages_arrive_whole_however_they_are_cut(way: str) -> None:
    """Pieces of random sizes, from one byte to several messages."""

    async def scene() -> None:
        rng = random.Random(1)
        async with edge(way) as (taker, offer, connection):
            payloads = [rng.randbytes(4 * size) for size in (1, 5, 100, 16_383, 16_384, 60_000, 500_000, 3)]
            counts = (0, 1, 7, 5000, 1, MAX_TOKENS, 2, 0)
            stream = b"".join(
                frame_message(p, step=i) + done_message(i, count)
                for i, (p, count) in enumerate(zip(payloads, counts, strict=True))
            )
            start = 0
            while start < len(stream):
                size = rng.choice([1, 7, 1000, 65_536, 300_000])
                await asyncio.to_thread(connection.sendall, stream[start : start + size])
                start += size
                if size < 10:
                    await asyncio.sleep(0.001)
            await eventually(lambda: len(taker.answers) == len(payloads))
            assert [bytes(frame.payload) for frame in taker.frames] == payloads
            assert [frame.step for frame in taker.frames] == [step for step, _ in taker.answers] == [*range(8)]
            assert [tokens for _, tokens in taker.answers] == [[(seq, 2, 3) for seq in range(n)] for n in counts]
            assert all(isinstance(frame.payload, np.ndarray) for frame in taker.frames)
            assert not offer.ended.done()
            assert taker.num_lent == (way == WAYS[1]), "lent for as long as there is something to do"

    run_scene(scene)


def beginning(kind: int, head_bytes: int, payload_bytes: int) -> bytes:
    return struct.pack("<III", kind, head_bytes, payload_bytes)


NO_SUCH = "cannot begin with"
REFUSED: list[tuple[str, bytes, type[LaminaError], str]] = [
    ("no kind", beginning(0, 0, 0), InvalidPlan, NO_SUCH),
    ("an unknown kind", beginning(5, 0, 0), InvalidPlan, r"\(kind, bytes, bytes\) \(5, 0, 0\)"),
    ("a frame's head too large", beginning(FRAME, 29, 0), InvalidPlan, NO_SUCH),
    ("a payload too large", beginning(FRAME, 28, MAX_PAYLOAD_BYTES + 1), InvalidPlan, NO_SUCH),
    ("tokens with a payload", beginning(TOKENS, 32, 4), InvalidPlan, NO_SUCH),
    ("half a token", beginning(TOKENS, 24, 0), InvalidPlan, NO_SUCH),
    ("tokens of no step", beginning(TOKENS, 15, 0), InvalidPlan, NO_SUCH),
    ("too many tokens", beginning(TOKENS, 16 + 16 * (MAX_TOKENS + 1), 0), InvalidPlan, NO_SUCH),
    ("a ping too large", beginning(PING, 0, MAX_PING_BYTES + 1), InvalidPlan, NO_SUCH),
    ("a ping with a head", beginning(PING, 1, 0), InvalidPlan, NO_SUCH),
    ("a pong", beginning(PONG, 0, 0), InvalidPlan, "a pong is out of order"),
    ("a frame that is not due, whose payload never comes", frame_message(bytes(400), epoch=2)[:50], StaleEpoch, "2"),
    ("a frame that is not due", frame_message(bytes(400), epoch=2), StaleEpoch, "2"),
    ("a fault of ours", done_message(13), LaminaError, "ValueError: unlucky"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("sent", "error", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_is_wrong_ends_the_connection_with_its_reason(
    sent: bytes, error: type[LaminaError], says: str, way: str
) -> None:
    """P-15: before anything is allocated for it, or waited for."""

    async def scene() -> None:
        async with edge(way) as (taker, offer, connection):
            connection.sendall(sent)
            found = await end_of(offer)
            assert type(found) is error
            with pytest.raises(error, match=says):
                raise found
            assert await asyncio.to_thread(hangs_up, connection)
            assert taker.frames == taker.answers == []

    run_scene(scene)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [0, 4, 20, 80])
def test_a_connection_in_use_that_breaks_is_a_loss(cut: int, way: str) -> None:
    """Between two messages as well as within one."""

    async def scene() -> None:
        async with edge(way) as (taker, offer, connection):
            connection.sendall(frame_message(bytes(100)) + frame_message(bytes(100))[:cut])
            await eventually(lambda: len(taker.frames) == 1)
            connection.close()
            assert isinstance(await end_of(offer), WorkerLost)

    run_scene(scene)


def test_a_connection_that_was_given_up_before_its_first_frame_is_no_loss() -> None:
    """The sender took too long to open it, and goes on through gRPC."""

    async def scene() -> None:
        async with edge() as (_, offer, connection):
            connection.close()
            await eventually(lambda: not [t for t in threading.enumerate() if t.name == "edge-reader"])
            await asyncio.sleep(0)
            assert not offer.ended.done()

    run_scene(scene)


@pytest.mark.parametrize("way", WAYS)
def test_the_end_of_the_offer_ends_the_connection(way: str) -> None:
    async def scene() -> None:
        async with edge(way) as (taker, offer, connection):
            connection.sendall(frame_message(bytes(8)))
            await eventually(lambda: len(taker.frames) == 1)
            offer.receiver.close()
            assert await asyncio.to_thread(hangs_up, connection)
            await eventually(lambda: not [t for t in threading.enumerate() if t.name == "edge-reader"])
            await asyncio.sleep(0)
            assert not offer.ended.done(), "nobody lost anything"

    run_scene(scene)


def test_pings_are_answered() -> None:
    """Also one larger than the buffer has room for."""

    async def scene() -> None:
        async with edge() as (_, _, connection):
            for size in (0, 8192, MAX_PING_BYTES, 10):
                assert 0 < await asyncio.to_thread(ping, connection, size) < 5

    run_scene(scene)


@pytest.mark.parametrize("way", WAYS)
def test_a_connection_in_use_answers_no_pings(way: str) -> None:
    """The compute thread would wait for a peer that does not read the answers."""

    async def scene() -> None:
        async with edge(way) as (_, offer, connection):
            connection.sendall(done_message() + encode_ping(bytes(100)))
            with pytest.raises(InvalidPlan, match="a ping is out of order"):
                raise await end_of(offer)
            assert await asyncio.to_thread(hangs_up, connection)

    run_scene(scene)


def test_a_feed_that_is_handed_back_is_read_by_its_thread_and_lent_again() -> None:
    """In the middle of a frame as well."""

    async def scene() -> None:
        async with edge(WAYS[1]) as (taker, _, connection):
            assert taker.device is not None
            for count in range(1, 6):
                message = frame_message(bytes(400_000))
                connection.sendall(message[: 100_000 * (count % 3)])
                await asyncio.sleep(0.01)
                await taker.device.call(lambda: None)  # hands everything back
                await asyncio.to_thread(connection.sendall, message[100_000 * (count % 3) :])
                await eventually(lambda count=count: len(taker.frames) == count)  # type: ignore[misc]
            assert taker.num_lent > 3

    run_scene(scene)


class LongStep:
    """What the compute thread is at until it may go on: kernels that are compiled, say."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def advance(self) -> None:
        self.may_end.wait(20)

    def awaited(self) -> None: ...

    def note_unfinished(self) -> None: ...


@pytest.mark.parametrize("is_due", [True, False])
def test_a_step_that_takes_long_does_not_stop_the_sender(monkeypatch: pytest.MonkeyPatch, is_due: bool) -> None:
    """TCP would give the connection up: far more than its buffers hold is taken meanwhile, or refused."""
    monkeypatch.setattr(direct_receiver, "_UNREAD_S", 0.05)

    async def scene() -> None:
        async with edge(WAYS[1]) as (taker, offer, connection):
            step = LongStep()
            assert taker.device is not None
            taker.device.wake(step)
            try:
                for count in range(1, 4):
                    await asyncio.to_thread(connection.sendall, frame_message(bytes(16_000_000), step=count))
                await eventually(lambda: len(taker.frames) == 3)
                if not is_due:
                    connection.sendall(frame_message(bytes(4), epoch=2))
                    assert isinstance(await end_of(offer), StaleEpoch)
            finally:
                step.may_end.set()
            if is_due:
                connection.sendall(done_message())
                await eventually(lambda: len(taker.answers) == 1)
                assert taker.num_lent == 1, "it is still lent"

    run_scene(scene)
