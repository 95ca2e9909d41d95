"""What a card may do, decided from its compute capability alone: build, arithmetic, KV dtypes, graphs. Pure.

Knows no torch and touches no device, so every rule is tested without a GPU.
"""

import re
from collections.abc import Iterable

from lamina.kernels.backend import GraphDecision, GraphMode, Unsupported
from lamina.kernels.buffer import DType

ComputeCapability = tuple[int, int]

OLDEST: ComputeCapability = (6, 1)  # dp4a
BYTE_MMA: ComputeCapability = (7, 5)
HALF_MMA: ComputeCapability = (8, 0)
DEPENDENT_LAUNCH: ComputeCapability = (9, 0)


def graph_policy(cc: ComputeCapability, worker: GraphMode, cluster: GraphMode = GraphMode.AUTO) -> GraphDecision:
    """C-13, C-14: the worker's wish, else the cluster's, else on from 7.0, a probe on 6.x, off below."""
    name = f"compute capability {cc[0]}.{cc[1]}"
    mode, whose = (cluster, "the coordinator") if worker is GraphMode.AUTO else (worker, "this worker's configuration")
    if mode is GraphMode.OFF:
        return GraphDecision(False, f"switched off by {whose}")
    if mode is GraphMode.ON:
        return GraphDecision(True, f"switched on by {whose} ({name})")
    if cc >= (7, 0):
        return GraphDecision(True, f"{name} supports them")
    if cc[0] == 6:
        return GraphDecision(True, f"{name}: kept only if a trial is equal bit for bit and faster", probe=True)
    return GraphDecision(False, f"{name} is below 6.0")


def compute_dtypes(cc: ComputeCapability) -> tuple[DType, ...]:
    """What large matrix products can multiply in, best first (A-01).

    bf16 where it is native, f16 on tensor cores without it, and f32 on Pascal, which has f16 at a 64th of its rate.
    """
    if cc >= HALF_MMA:
        return (DType.BF16, DType.F32, DType.F16)
    return (DType.F16, DType.F32) if cc[0] == 7 else (DType.F32, DType.F16)


def compute_dtype(cc: ComputeCapability) -> DType:
    """The first of `compute_dtypes`."""
    return compute_dtypes(cc)[0]


def kv_dtypes() -> frozenset[DType]:
    """KV cache types with kernels, the same on every card."""
    return frozenset({DType.F32, DType.F16, DType.BF16, DType.Q8_0})


def free_bytes(driver_bytes: int, host_available_bytes: int | None) -> int:
    """Free memory of a card (B-10). `host_available_bytes` is None for a card with memory of its own.

    One that shares the host's memory may have the page cache's as well, which the driver counts as used.
    """
    return driver_bytes if host_available_bytes is None else max(driver_bytes, host_available_bytes)


def require_supported(
    device: str, cc: ComputeCapability, torch_archs: Iterable[str], nvrtc_version: tuple[int, int]
) -> None:
    """Raise Unsupported, naming the card's capability and the build's, unless this build can run the card (B-08)."""
    name = f"{device} has compute capability {cc[0]}.{cc[1]}"
    if cc < OLDEST:
        raise Unsupported(f"{name}; lamina needs {OLDEST[0]}.{OLDEST[1]} or later")
    archs = tuple(torch_archs)
    if not any(_arch_serves(arch, cc) for arch in archs):
        raise Unsupported(f"{name}, the installed torch is built for {', '.join(archs)}; install {wheel_for(cc)}")
    if nvrtc_version >= (13, 0) and cc < (7, 5):
        version = ".".join(map(str, nvrtc_version))
        raise Unsupported(f"{name}, the installed CUDA {version} compiles for 7.5 and later; install {wheel_for(cc)}")


def wheel_for(cc: ComputeCapability) -> str:
    """The packages that serve a card, as one would install them."""
    if cc < (7, 5):
        return "torch (index .../whl/cu126) and cupy-cuda12x"
    return "torch (index .../whl/cu130) and cupy-cuda13x"


def _arch_serves(arch: str, cc: ComputeCapability) -> bool:
    """Whether code for `arch` runs on `cc`: machine code within its major version, PTX on anything later.

    Architecture-specific code (sm_90a) runs on exactly its own card; family code (sm_100f) within its major version.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    kind, built, suffix = match[1], (int(match[2]), int(match[3])), match[4]
    if suffix == "a":
        return built == cc
    if kind == "compute" and not suffix:
        return built <= cc
    return built[0] == cc[0] and built <= cc
