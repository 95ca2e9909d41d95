"""What a worker prints at start."""

import asyncio

import pytest

from lamina.kernels import registry
from lamina.kernels.backend import Backend, Unsupported
from lamina.kernels.registry import Candidate, DeviceRequest
from lamina.rpc_worker.daemon import _start_device
from lamina.rpc_worker.describe import device_table
from lamina.rpc_worker.settings import WorkerSettings
from lamina.spec.address import Address
from lamina.spec.device import DeviceProfile
from lamina.spec.ids import DeviceId, WorkerName


def test_the_devices_fit_80_columns() -> None:
    """Nothing is cut, however long a card's name is."""
    name = "NVIDIA GeForce RTX 4080 Laptop GPU in a box whose name goes on for longer than a line"
    profiles = [
        DeviceProfile(
            DeviceId(WorkerName("w"), index), "cuda", name, 16 << 30, 12 << 30, "cuBLAS", "bf16", ("f16",), True, 4, {}
        )
        for index in range(2)
    ]
    why = "reference (not native: [/lib] is of another ABI, as it may be; reinstall lamina, which takes a compiler)"
    text = device_table(profiles, ["", why])
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).count(name) == 2
    for part in ("0: cuda", "1: cuda", "12.0 of 16.0 GiB free", "cuBLAS, 4 threads", "bf16, graphs on"):
        assert part in text
    assert text.count("served by") == 1
    assert f"served by {why}" in " ".join(text.split())


def test_a_device_keeps_why_something_slower_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of another ABI costs nine tenths of the speed: the table at start says so."""

    def fail(request: DeviceRequest) -> Backend:
        raise Unsupported("a library of another ABI; reinstall lamina")

    candidates = [candidate for candidate in registry._CANDIDATES if candidate.implementation == "reference"]
    monkeypatch.setattr(registry, "_CANDIDATES", (*candidates, Candidate("cpu", "native", 9, fail)))

    async def served_by(name: str) -> str:
        device = await _start_device(name, WorkerSettings("w", (name,), Address("127.0.0.1", 0)))
        await device.stop()
        return device.served_by

    assert asyncio.run(served_by("cpu")) == "reference (not native: a library of another ABI; reinstall lamina)"
    assert asyncio.run(served_by("reference")) == ""
