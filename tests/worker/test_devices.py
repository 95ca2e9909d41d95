"""Several devices of one worker: how they are named, that they are data, and whose memory is whose (A-18 to A-23)."""

import asyncio

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import DType, Extent, HostTensor, StepShape
from lamina.kernels.cuda import backend as cuda_backend
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.ops import LaunchError
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker.settings import parse_devices
from lamina.spec.errors import CapacityExceeded, InvalidConfig
from lamina.spec.quant import GgmlType
from support.cuda_emulated import EmulatedDevice
from support.loopback import running_worker


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("", ""),
        ("cpu", "cpu"),
        ("cuda", "cuda:0"),
        ("gpu", "cuda:0"),
        ("cuda cuda", "cuda:0 cuda:1"),
        ("gpu cuda gpu", "cuda:0 cuda:1 cuda:2"),
        ("cuda:1", "cuda:1"),
        ("cuda cuda:0", "cuda:1 cuda:0"),
        ("cuda:1 cuda cuda", "cuda:1 cuda:0 cuda:2"),
        ("cuda cuda:7 cuda", "cuda:0 cuda:7 cuda:1"),
        ("cpu cuda", "cpu cuda:0"),
        ("cuda cpu cuda", "cuda:0 cpu cuda:1"),
        ("mock cpu reference gpu:3", "mock cpu reference cuda:3"),
        ("cuda " * 8, " ".join(f"cuda:{i}" for i in range(8))),
    ],
)
def test_names_of_devices(given: str, taken: str) -> None:
    """A-18: a bare cuda claims the next index that nobody names, cuda:N is obeyed, a CPU may stand beside them."""
    assert parse_devices(tuple(given.split())) == tuple(taken.split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cpu cpu", "'cpu' is given twice"),
        ("cuda:0 cuda:0", "'cuda:0' is given twice"),
        ("cuda:1 gpu:1", "'gpu:1' is given twice"),
        ("cuda:01 cuda:1", "'cuda:1' is given twice"),
        ("cpu:0", "'cpu:0' is none of"),
        ("mixed", "'mixed' is none of"),
        ("cuda:", "'cuda:' is none of"),
        ("cuda:-1", "'cuda:-1' is none of"),
        ("CUDA", "'CUDA' is none of"),
    ],
)
def test_names_that_are_refused(given: str, said: str) -> None:
    """A-18: duplicates, however they are spelled, and devices that do not exist."""
    with pytest.raises(InvalidConfig, match=said):
        parse_devices(tuple(given.split()))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedDevice]:
    """The machine's cards; a test fills the list."""
    found: list[EmulatedDevice] = []

    def open_device(index: int) -> EmulatedDevice:
        if index >= len(found):
            raise Unsupported(f"cuda:{index} is not there: the NVIDIA driver shows {len(found)} GPUs")
        return found[index]

    monkeypatch.setattr(cuda_backend, "open_device", open_device)
    return found


class Card(EmulatedDevice):
    """A card of some generation on which others use memory, too."""

    def __init__(self, index: int, cc: tuple[int, int] = (8, 9)) -> None:
        super().__init__(cc)
        self.name = f"card {index}"
        self.foreign_bytes = 0

    def memory_bytes(self) -> tuple[int, int]:
        free, total = super().memory_bytes()
        return max(0, free - self.foreign_bytes), total


@pytest.mark.parametrize("given", ["cpu", "cuda:1", "cuda cpu", "cuda cuda", "cpu cuda cuda:2 cuda reference"])
def test_the_list_of_devices_is_data(cards: list[EmulatedDevice], given: str) -> None:
    """A-19, A-22: none, one, two or three cards, first or not, with a CPU or without, through the same start."""
    cards.extend(Card(index) for index in range(3))
    names = parse_devices(tuple(given.split()))

    async def scene() -> None:
        async with running_worker("a", names) as daemon:
            found = [device.backend.device_facts() for device in daemon.devices]
            for name, facts in zip(names, found, strict=True):
                assert facts.name == f"card {name[-1]}" if name.startswith("cuda") else facts.kind == "cpu"

    asyncio.run(scene())


@pytest.mark.parametrize(("num_cards", "given"), [(0, "cuda"), (1, "cuda cuda"), (2, "cpu cuda:2")])
def test_a_card_that_is_not_there(cards: list[EmulatedDevice], num_cards: int, given: str) -> None:
    """A-22: the refusal says which, and how many there are; the worker does not start without it."""
    cards.extend(Card(index) for index in range(num_cards))

    async def scene() -> None:
        async with running_worker("a", parse_devices(tuple(given.split()))):
            raise AssertionError("it started")

    with pytest.raises(Unsupported, match=rf"cuda:{num_cards} is not there: the NVIDIA driver shows {num_cards} GPUs"):
        asyncio.run(scene())


def test_a_device_computes_on_its_own_tensors_only(cards: list[EmulatedDevice]) -> None:
    """A-21: layouts and kernels belong to the device that loaded the tensor; another's is refused, not guessed at."""
    cards.extend((Card(0, (6, 1)), Card(1, (8, 9))))
    backends = [CudaBackend(0), CudaBackend(1), ReferenceBackend()]
    data = np.arange(4 * 34, dtype=np.uint8).reshape(4, 34)
    weights = [backend.load_weight([HostTensor(GgmlType.Q8_0, 4, 32, data)]) for backend in backends]
    for i, backend in enumerate(backends):
        backend.set_shape(StepShape(1, 1, 0))
        x, out = backend.alloc((1, 32), DType.F32, Extent.ROWS), backend.alloc((1, 4), DType.F32, Extent.ROWS)
        for j, weight in enumerate(weights):
            if i == j:
                ops.linear(backend, x, weight, out)
                continue
            with pytest.raises(LaunchError, match="belongs to another backend"):
                ops.linear(backend, x, weight, out)
    files = [{call.program.file for call in card.calls if "linear" in call.program.file} for card in cards]
    assert files[0] == {"linear_dp4a.cu"} != files[1]


def test_memory_is_each_cards_own(cards: list[EmulatedDevice]) -> None:
    """A-23, C-04: free is what the driver has left now, under --max-memory; no card counts another's or the host's."""
    first, second = Card(0), Card(1)
    cards.extend((first, second))
    one, two = CudaBackend(0), CudaBackend(1, max_memory_bytes=64 << 20)
    total = first.memory_bytes()[1]
    assert (one.device_facts().free_bytes, two.device_facts().free_bytes) == (total, 64 << 20)
    one.alloc((1 << 20, 4), DType.F32)
    two.alloc((1 << 20, 4), DType.F32)
    assert (one.device_facts().free_bytes, two.device_facts().free_bytes) == (total - (16 << 20), 48 << 20)
    second.foreign_bytes = total - (40 << 20)  # somebody starts a game
    assert two.device_facts().free_bytes == 24 << 20
    assert one.device_facts().free_bytes == total - (16 << 20)
    with pytest.raises(CapacityExceeded, match=r"needs 32\.0 MiB, card 1 has 24\.0 MiB free"):
        two.alloc((1 << 21, 4), DType.F32)
    two.alloc((1 << 20, 4), DType.F32)
