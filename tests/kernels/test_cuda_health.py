"""What a card says of its health through NVML, with an NVML that is a fake."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from lamina.kernels.backend import Unsupported
from lamina.kernels.cuda import health as cuda_health
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.health import CardHealth
from lamina.kernels.cuda.policy import free_bytes
from lamina.spec.device import DeviceHealth
from support.cuda_emulated import EmulatedDevice

UUID = "6b2c9d1e-0000-1111-2222-333344445555"


class FakeNvml:
    """pynvml's functions for one card; `missing` are those that this card does not support."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, uuid: str = f"GPU-{UUID}", missing: tuple[str, ...] = ()) -> None:
        self._uuid = uuid
        answers: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda h: 1,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda h: 4,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda h: 4,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda h: 8,
            "nvmlDeviceGetTemperature": lambda h, sensor: 60 + sensor,
            "nvmlDeviceGetPowerUsage": lambda h: 118_250,
            "nvmlDeviceGetClockInfo": lambda h, clock: {1: 1800, 2: 5005}[clock],
            "nvmlDeviceGetUtilizationRates": lambda h: type("Rates", (), {"gpu": 75})(),
        }
        for name, answer in answers.items():
            setattr(self, name, self._refuse if name in missing else answer)

    def _refuse(self, *args: Any) -> Any:
        raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != self._uuid:
            raise self.NVMLError("Not Found")
        return uuid


@pytest.mark.parametrize("uuid", [UUID, f"GPU-{UUID}"])
@pytest.mark.parametrize("prefix", ["GPU-", "MIG-"])
def test_a_card_is_found_by_its_uuid(uuid: str, prefix: str) -> None:
    """Not by its index, which CUDA_VISIBLE_DEVICES shifts; milliwatts become watts, per cent a share."""
    found = CardHealth(uuid, FakeNvml(prefix + UUID)).read()
    assert found == DeviceHealth(1, 4, 4, 8, 60.0, 118.25, 1800, 5005, 0.75)


def test_a_figure_that_a_card_does_not_have_is_0() -> None:
    missing = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetUtilizationRates")
    found = CardHealth(UUID, FakeNvml(missing=missing)).read()
    assert found == DeviceHealth(0, 4, 4, 8, 60.0, 0.0, 1800, 5005, 0.0)


def test_a_card_that_nvml_does_not_know() -> None:
    with pytest.raises(Unsupported, match="NVML: Not Found"):
        CardHealth("another", FakeNvml())


def test_without_the_library_a_card_works_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """nvidia-ml-py is optional: one line in the log, no figures."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    caplog.set_level("INFO")
    device = EmulatedDevice()
    device.uuid = UUID
    assert CudaBackend(device=device).health() is None
    assert caplog.messages == ["no figures of link, temperature and power: nvidia-ml-py is not installed"]


def test_the_backend_reads_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_health, "CardHealth", lambda uuid: CardHealth(uuid, FakeNvml()))
    device = EmulatedDevice()
    device.uuid = UUID
    health = CudaBackend(device=device).health()
    assert health is not None
    assert health.temperature_c == 60.0
    assert CudaBackend(device=EmulatedDevice()).health() is None  # no card, no figures


def test_free_memory_of_both_kinds_of_card() -> None:
    """B-10, A-23: memory of its own is the driver's figure alone; shared memory is what the host could give, too."""
    assert free_bytes(3 << 30, None) == 3 << 30
    assert free_bytes(3 << 30, 5 << 30) == 5 << 30
    assert free_bytes(3 << 30, 1 << 30) == 3 << 30
