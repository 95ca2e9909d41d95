"""Which implementation serves a device name: a table of candidates by priority, and why the others were passed over.

Owns the table only. Implementations are imported when asked for, so that a CPU host needs no CUDA package.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import cast

from lamina.kernels.backend import Backend, GraphMode, Unsupported
from lamina.spec.errors import InvalidConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A device name taken apart, and what the worker's settings say about it."""

    index: int
    threads: int | None
    max_memory_bytes: int | None
    graphs: GraphMode = GraphMode.AUTO


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation for a kind of device; `build` raises Unsupported or ImportError if it cannot serve here."""

    kind: str
    implementation: str
    priority: int
    build: Callable[[DeviceRequest], Backend]


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend chosen for a device, and (implementation, reason) of each better one that could not be."""

    device: str
    implementation: str
    backend: Backend
    passed_over: tuple[tuple[str, str], ...]

    def explain(self) -> str:
        """One line: what serves the device, and why not something faster."""
        chosen = f"{self.device}: {self.implementation} ({self.backend.capabilities.kernel})"
        return f"{chosen}; {self.why_not_better}" if self.passed_over else chosen

    @property
    def why_not_better(self) -> str:
        """Why each better implementation does not serve; empty for the best."""
        return "; ".join(f"not {name}: {reason}" for name, reason in self.passed_over)


def select_backend(
    device: str,
    *,
    threads: int | None = None,
    max_memory_bytes: int | None = None,
    graphs: GraphMode = GraphMode.AUTO,
) -> Selection:
    """The best implementation for `device`: "cpu", "cuda", "cuda:1", "reference" or "mock".

    Raises InvalidConfig for another name, Unsupported with every reason if none can serve here.
    """
    kind, index = _parse(device)
    request = DeviceRequest(index, threads, max_memory_bytes, graphs)
    passed_over: list[tuple[str, str]] = []
    for candidate in sorted(_CANDIDATES, key=lambda c: -c.priority):
        if candidate.kind != kind:
            continue
        try:
            backend = candidate.build(request)
        except (Unsupported, ImportError) as error:
            passed_over.append((candidate.implementation, " ".join(str(error).split())))
        else:
            return Selection(device, candidate.implementation, backend, tuple(passed_over))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise Unsupported(f"device {device} cannot be served here ({reasons})")


def create_backend(
    device: str,
    *,
    threads: int | None = None,
    max_memory_bytes: int | None = None,
    graphs: GraphMode = GraphMode.AUTO,
) -> Backend:
    """`select_backend`; why a better implementation could not serve is a warning in the log."""
    selection = select_backend(device, threads=threads, max_memory_bytes=max_memory_bytes, graphs=graphs)
    if selection.passed_over:
        _log.warning("%s", selection.explain())
    return selection.backend


def present_devices() -> tuple[str, ...]:
    """The CPU and every GPU of this machine; without the `cuda` extra there is none."""
    try:
        num_gpus = cast(int, import_module("lamina.kernels.cuda.toolkit").num_devices())
    except ImportError:
        num_gpus = 0
    return ("cpu", *(f"cuda:{index}" for index in range(num_gpus)))


def cpu_variants() -> dict[str, Callable[[], Backend]]:
    """One native backend for each instruction set that works here, best first; the reference where none is built."""
    try:
        library = import_module("lamina.kernels.cpu.library")
        names = [isa.name.lower() for isa in library.working_isas()]
    except Unsupported:
        return {"cpu (reference)": lambda: _build_reference(DeviceRequest(0, None, None))}
    module = import_module("lamina.kernels.cpu.backend")
    return {f"cpu ({name})": partial(module.CpuBackend, isa=name) for name in names}


def _parse(device: str) -> tuple[str, int]:
    kinds = sorted({candidate.kind for candidate in _CANDIDATES})
    kind, colon, index = device.partition(":")
    if kind not in kinds or (colon and (kind != "cuda" or not index.isdecimal())):
        raise InvalidConfig(f"device {device!r} is none of {', '.join(kinds)} (cuda:N for the N-th GPU)")
    return kind, int(index or 0)


def _build_native(request: DeviceRequest) -> Backend:
    module = import_module("lamina.kernels.cpu.backend")
    return cast(Backend, module.CpuBackend(threads=request.threads, max_memory_bytes=request.max_memory_bytes))


def _build_cuda(request: DeviceRequest) -> Backend:
    module = import_module("lamina.kernels.cuda.backend")
    try:
        backend = module.CudaBackend(request.index, max_memory_bytes=request.max_memory_bytes, graphs=request.graphs)
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}; pip install 'lamina[cuda]', or -e '.[cuda]' in a clone") from None
    return cast(Backend, backend)


def _build_reference(request: DeviceRequest) -> Backend:
    from lamina.kernels.reference import ReferenceBackend

    return ReferenceBackend(max_memory_bytes=request.max_memory_bytes)


def _build_mock(request: DeviceRequest) -> Backend:
    from lamina.kernels.mock import MockBackend

    return MockBackend() if request.max_memory_bytes is None else MockBackend(total_bytes=request.max_memory_bytes)


_CANDIDATES = (
    Candidate("cpu", "native", 1, _build_native),
    Candidate("cpu", "reference", 0, _build_reference),
    Candidate("cuda", "cuda", 0, _build_cuda),
    Candidate("reference", "reference", 0, _build_reference),
    Candidate("mock", "mock", 0, _build_mock),
)
