"""The receiving end of an edge for tests: a stage that remembers what came, a listener, who is hung up on."""

import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lamina.rpc_worker.device_thread import DeviceThread, Feed
from lamina.rpc_worker.direct_listener import DirectListener
from lamina.spec.address import Address
from lamina.spec.errors import StaleEpoch
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.wire.frames import Frame
from support.loopback import eventually


class Taker:
    """A stage that takes frames of epoch 1, and remembers what came. Its compute thread reads on, if there is one."""

    def __init__(self, device: DeviceThread | None = None) -> None:
        self.device = device
        self.num_lent = 0
        self.frames: list[Frame] = []
        self.answers: list[tuple[int, list[tuple[SeqId, int, int]]]] = []

    def expect_frame(self, frame: Frame) -> None:
        assert not len(frame.payload), "not read yet"
        if frame.epoch != 1:
            raise StaleEpoch(f"epoch {frame.epoch}")

    def take_frame(self, frame: Frame) -> None:
        self.expect_frame(frame._replace(payload=b""))
        assert len(frame.payload) == frame.num_bytes
        self.frames.append(frame)

    def take_tokens(self, epoch: Epoch, step: StepId, tokens: Sequence[tuple[SeqId, int, int]]) -> None:
        if step == 13:
            raise ValueError("unlucky")
        assert epoch == 1
        self.answers.append((step, list(tokens)))

    def lend(self, feed: Feed) -> bool:
        is_lent = self.device is not None and self.device.lend(feed)
        self.num_lent += is_lent
        return is_lent


@asynccontextmanager
async def listening() -> AsyncIterator[DirectListener]:
    listener = DirectListener.open(Address("127.0.0.1", 0))
    try:
        yield listener
    finally:
        await listener.close()
        await eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("edge")])


def hangs_up(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
