"""Copies from one device of a process to another, in the order of both streams, with no host in between."""

import ctypes
from typing import Any

import numpy as np
import pytest

from lamina.kernels.backend import Backend, Unsupported
from lamina.kernels.buffer import Buffer, DType
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.driver import Driver
from lamina.kernels.cuda.libcuda import CudaError
from lamina.kernels.mock import MockBackend
from lamina.kernels.ops import LaunchError
from lamina.kernels.reference import ReferenceBackend
from support.backends import Bench
from support.cuda_emulated import EmulatedDevice
from support.deferred import DeferredDevice


def test_every_backend_reaches_itself_alone(bench: Bench) -> None:
    """A copy from itself is a copy; another kind of device has nothing that could be taken without the host."""
    backend = bench.backend
    source, target = (backend.alloc((3, 4), DType.F32) for _ in range(2))
    backend.upload(source, np.ones((3, 4), np.float32))
    assert backend.reaches(backend)
    backend.copy_from(backend, source, target, 2)
    if bench.entry.compute:
        assert bench.read(target)[:, 0].tolist() == [1, 1, 0]
    other: Backend = ReferenceBackend() if backend.name == "mock" else MockBackend()
    assert not backend.reaches(other)
    with pytest.raises(Unsupported, match="cannot copy from"):
        backend.copy_from(other, other.alloc((3, 4), DType.F32), target, 2)


def filled(backend: Backend, value: float) -> Buffer:
    buffer = backend.alloc((4, 3), DType.F32)
    backend.upload(buffer, np.full((4, 3), value, np.float32))
    return buffer


def test_another_card_is_reached() -> None:
    """Rows and views like those of `copy`; what was freed there, or does not fit here, is refused."""
    one, two = (CudaBackend(device=EmulatedDevice(cc)) for cc in ((6, 1), (9, 0)))
    source, target = filled(one, 5.0), filled(two, 1.0)
    assert one.reaches(two)
    assert two.reaches(one)
    two.copy_from(one, source.rows(1, 3), target.rows(2, 4), 2)
    assert two.download(target, 4)[:, 0].tolist() == [1, 1, 5, 5]
    two.copy_from(one, source.columns(0, 2), target.columns(1, 3), 2)
    assert two.download(target, 4)[0].tolist() == [1, 5, 5]
    with pytest.raises(ValueError, match="copy of f32"):
        two.copy_from(one, source.columns(0, 2), target, 2)
    with pytest.raises(ValueError, match="5 rows"):
        two.copy_from(one, source, target, 5)
    one.free(source)
    with pytest.raises(LaunchError, match="was freed"):
        two.copy_from(one, source, target, 2)


@pytest.mark.parametrize("looks", [1, 4])
def test_streams_wait_for_each_other(looks: int) -> None:
    """The copy runs after what was launched before the event, and what follows its own event after the copy.

    Each record counts for those who follow it then.
    """
    one, two = (CudaBackend(device=DeferredDevice(looks)) for _ in range(2))
    source, target = filled(one, 0.0), filled(two, 0.0)
    found = [two.host_copy(target) for _ in range(3)]
    given = [one.host_copy(source) for _ in range(3)]
    written, taken = one.create_event(), two.create_event()
    for i in range(3):
        given[i].values[...] = i + 1
        if i:
            one.follow(taken)
        given[i].upload(4)
        one.record_event(written)
        two.follow(written)
        two.copy_from(one, source, target, 4)
        two.record_event(taken)
        found[i].download(4)
    assert not any(copy.values[0, 0] in (1, 2, 3) for copy in found), "nothing has run yet"
    while not one.event_done(written):
        pass
    two.synchronize()
    assert [copy.values[0].tolist() for copy in found] == [[i + 1.0] * 3 for i in range(3)]


class FakeLibrary:
    """Two cards' contexts by their streams; remembers what it is asked for. `statuses` by function."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses
        self.asked: list[Any] = []

    def cuStreamGetCtx(self, stream: Any, context: Any) -> int:  # noqa: N802
        context._obj.value = stream.value + 0x1000
        return 0

    def cuMemcpyPeerAsync(self, *arguments: Any) -> int:  # noqa: N802
        self.asked.append(("copy", *(getattr(argument, "value", argument) for argument in arguments)))
        return self.statuses.get("copy", 0)

    def cuCtxEnablePeerAccess(self, context: Any, flags: Any) -> int:  # noqa: N802
        self.asked.append(("allow", context.value, flags))
        return self.statuses.get("allow", 0)

    def cuCtxDisablePeerAccess(self, context: Any) -> int:  # noqa: N802
        self.asked.append(("forbid", context.value))
        return self.statuses.get("forbid", 0)

    def cuGetErrorName(self, status: Any, name: Any) -> int:  # noqa: N802
        name._obj.value = ctypes.c_char_p(b"CUDA_ERROR_INJECTED").value
        return 0


def drivers(library: FakeLibrary) -> tuple[Driver, Driver]:
    return Driver(library, 0x55, dependent_launch=False), Driver(library, 0x66, dependent_launch=False)


def test_the_driver_names_both_contexts() -> None:
    """Target first, each address with its own card's context, 64 bits of size, the taker's stream."""
    library = FakeLibrary()
    owner, taker = drivers(library)
    taker.copy_from(owner, 0xFE_0000_2000, 0x7FFF_0000_1000, 5 << 32)
    taker.allow_peer(owner)
    taker.forbid_peer(owner)
    assert library.asked == [
        ("copy", 0x7FFF_0000_1000, 0x1066, 0xFE_0000_2000, 0x1055, 5 << 32, 0x66),
        ("allow", 0x1055, 0),
        ("forbid", 0x1055),
    ]


def test_peer_access_may_be_there_already() -> None:
    owner, taker = drivers(FakeLibrary(allow=704))
    taker.allow_peer(owner)
    owner, taker = drivers(FakeLibrary(allow=217, copy=700))
    with pytest.raises(CudaError, match="peer access failed: CUDA_ERROR_INJECTED"):
        taker.allow_peer(owner)
    with pytest.raises(CudaError, match="a copy from another card failed"):
        taker.copy_from(owner, 0x1000, 0x2000, 4)
