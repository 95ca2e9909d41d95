"""What a card may do, decided from its compute capability alone: build, arithmetic, KV dtypes, graphs. Pure.

Touches no device, so every rule is tested without a GPU.
"""

from collections.abc import Iterable

from lamina.kernels.backend import GraphDecision, GraphMode, Unsupported
from lamina.kernels.buffer import DType

ComputeCapability = tuple[int, int]
Version = tuple[int, int]

OLDEST: ComputeCapability = (6, 1)  # dp4a
BYTE_MMA: ComputeCapability = (7, 5)
HALF_MMA: ComputeCapability = (8, 0)
DEPENDENT_LAUNCH: ComputeCapability = (9, 0)
HOPPER: ComputeCapability = (9, 0)  # wgmma, in code for sm_90a alone
OLDEST_OF_CUDA_13: ComputeCapability = (7, 5)
# Where both are installed, those of CUDA 13 are found first.
_ADVICE = "pip uninstall nvidia-cuda-nvrtc nvidia-cublas, then pip install 'lamina[cuda12]'"


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


def require_supported(device: str, cc: ComputeCapability, driver: Version, compiler: Version) -> None:
    """Raise Unsupported, saying what to install, unless a CUDA toolkit of this version can run the card (B-08).

    `driver` is the newest CUDA that the driver understands, `compiler` NVRTC's version.
    """
    name = f"{device} has compute capability {_dotted(cc)}"
    if cc < OLDEST:
        raise Unsupported(f"{name}; lamina needs {_dotted(OLDEST)} or later")
    if compiler[0] >= 13 and cc < OLDEST_OF_CUDA_13:
        oldest = _dotted(OLDEST_OF_CUDA_13)
        raise Unsupported(f"{name}, the installed CUDA {_dotted(compiler)} serves {oldest} and later; {_ADVICE}")
    if driver[0] < compiler[0]:
        raise Unsupported(
            f"the driver of {device} is for CUDA {_dotted(driver)}, the installed libraries are of {_dotted(compiler)};"
            f" install a newer driver, or: {_ADVICE}"
        )


def compile_target(cc: ComputeCapability, known: Iterable[ComputeCapability]) -> str:
    """What to compile for: the very card, if the compiler knows it, with all that only such cards have (sm_90a).

    Else PTX for the newest that it knows before it, which the driver translates. Raises Unsupported for a card older
    than all.
    """
    older = sorted(each for each in known if each <= cc)
    if not older:
        raise Unsupported(f"the installed CUDA compiles for nothing as old as compute capability {_dotted(cc)}")
    major, minor = older[-1]
    if (major, minor) != cc:
        return f"compute_{major}{minor}"
    return f"sm_{major}{minor}{'a' if cc == HOPPER else ''}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
