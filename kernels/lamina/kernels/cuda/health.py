"""What NVML knows of a card beyond its memory: PCIe link, temperature, power, clocks.

NVML is the driver's own library, reached through nvidia-ml-py (the `cuda` extra). It needs no CUDA context and may be
asked from any thread. Without it a card works all the same, and says nothing of its health.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from lamina.kernels.backend import Unsupported
from lamina.spec.device import DeviceHealth

_log = logging.getLogger(__name__)


class CardHealth:
    """Reads one card, named by its UUID: NVML does not count cards as CUDA_VISIBLE_DEVICES does."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        """`nvml` is the module pynvml, or what a test puts in its place. Raises Unsupported, saying why."""
        try:
            self._nvml = nvml or import_module("pynvml")
        except ImportError:
            raise Unsupported("nvidia-ml-py is not installed") from None
        try:
            self._nvml.nvmlInit()
            self._handle = self._find(uuid.removeprefix("GPU-"))
        except self._nvml.NVMLError as error:
            raise Unsupported(f"NVML: {error}") from None

    def _find(self, uuid: str) -> Any:
        """A whole card, or a part of one (MIG)."""
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def read(self) -> DeviceHealth:
        """The card now; 0 for what NVML does not say of it."""
        nvml, handle = self._nvml, self._handle
        return DeviceHealth(
            pcie_generation=int(self._ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)),
            pcie_width=int(self._ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)),
            max_pcie_generation=int(self._ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)),
            max_pcie_width=int(self._ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)),
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=self._ask(nvml.nvmlDeviceGetPowerUsage, handle) / 1e3,  # NVML: milliwatts
            clock_mhz=int(self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=int(self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM)),
            busy_ratio=self._ask(lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu, handle) / 100,
        )

    def _ask(self, question: Callable[..., Any], *args: Any) -> float:
        try:
            return float(question(*args))
        except self._nvml.NVMLError:  # a card, or a virtual one, need not know everything
            return 0.0


def open_health(uuid: str) -> CardHealth | None:
    """For a card's backend: None, said in the log, where nothing tells of the card; "" is a card without a UUID."""
    if not uuid:
        return None
    try:
        return CardHealth(uuid)
    except Unsupported as error:
        _log.info("no figures of link, temperature and power: %s", error)
        return None
