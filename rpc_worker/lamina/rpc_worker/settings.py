"""Settings of one worker, frozen. Made once by the CLI; nothing reads flags or the environment later."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from lamina.rpc_worker.numerics import COMPUTE_DTYPES
from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig
from lamina.spec.placement import GRAPH_MODES


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What one daemon is told: devices, where it listens, what it may use."""

    name: str
    devices: tuple[str, ...] = ("cpu",)
    listen: Address = field(default_factory=lambda: Address("127.0.0.1", 50051))
    advertise: Address | None = None
    join: Address | None = None
    edge_port: int | None = 0  # for direct connections, on the host of `listen`; 0 is any, None: there are none
    num_threads: int | None = None
    max_memory_bytes: int | None = None
    model_folders: tuple[Path, ...] = ()
    insecure: bool = False
    log_level: str = "info"
    cuda_graphs: str = "auto"
    compute_dtype: str = "auto"
    trace_directory: Path | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.name):
            raise InvalidConfig(f"--name {self.name!r}: use 1 to 64 letters, digits, dots, dashes or underscores")
        if not self.listen.is_loopback and not self.insecure:
            raise InvalidConfig(
                f"--listen {self.listen} can be reached from other machines without authentication; "
                "add --insecure to say that this network is trusted"
            )
        reachable_at = self.advertise or self.listen
        if self.join is not None and reachable_at.is_loopback and not self.join.is_loopback:
            raise InvalidConfig(
                f"--join {self.join} gathers workers of several machines, which cannot reach this one at "
                f"{reachable_at}; use --listen HOST:PORT with an address they can reach, or --advertise"
            )
        for folder in self.model_folders:
            if not folder.is_dir():
                raise InvalidConfig(f"--models {folder}: there is no such folder")
        if self.num_threads is not None and self.num_threads < 1:
            raise InvalidConfig(f"--threads must be at least 1, or 0 for all usable cores, got {self.num_threads}")
        for option, value, choices in (
            ("--cuda-graphs", self.cuda_graphs, GRAPH_MODES),
            ("--compute-dtype", self.compute_dtype, COMPUTE_DTYPES),
        ):
            if value not in choices:
                raise InvalidConfig(f"{option} {value!r} is none of {', '.join(choices)}")


def parse_edge_port(text: str) -> int | None:
    """`any` is 0, `none` is None. Raises InvalidConfig."""
    named = {"any": 0, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise InvalidConfig(f"--edge-port {text!r} is neither any, nor none, nor a port from 1 to 65535")
    return int(text)


def parse_devices(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Device names in order; each bare `cuda` or `gpu` claims the next free index (A-18). Raises InvalidConfig."""
    explicit = {int(text.partition(":")[2]) for text in texts if re.fullmatch(r"(cuda|gpu):\d+", text)}
    devices: list[str] = []
    next_index = 0
    for text in texts:
        match = re.fullmatch(r"(cpu|reference|mock|cuda|gpu)(?::(\d+))?", text)
        if not match or (match[2] and match[1] not in ("cuda", "gpu")):
            raise InvalidConfig(f"--device {text!r} is none of cpu, cuda, cuda:N, reference, mock")
        name = match[1]
        if name in ("cuda", "gpu"):
            if match[2] is None:
                while next_index in explicit:
                    next_index += 1
                explicit.add(next_index)
            name = f"cuda:{int(match[2]) if match[2] else next_index}"
        if name in devices:
            raise InvalidConfig(f"--device {text!r} is given twice")
        devices.append(name)
    return tuple(devices)
