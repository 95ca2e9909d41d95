"""`rpc-worker --explain`: what each device would run, and why: dtype, graphs, and the kernel of every op and type."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lamina.kernels.backend import Backend, KernelChoice
from lamina.kernels.buffer import DType
from lamina.rpc_worker.numerics import overflows_f16, resolve_compute
from lamina.spec.digest import model_digest
from lamina.spec.errors import LaminaError
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.model import ModelSpec
from lamina.spec.quant import WEIGHT_TYPES, GgmlType


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device; with `failure` the rest is empty."""

    device: str
    name: str = ""
    compute_dtype: str = ""
    compute_why: str = ""
    graphs: str = ""
    graphs_why: str = ""
    kernels: tuple[KernelChoice, ...] = ()
    failure: str = ""

    def to_json(self) -> dict[str, object]:
        """As it is printed with --json."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ModelTypes:
    """What a model asks of a device: its description, and how many matrices it has of each type."""

    spec: ModelSpec
    matrices: Mapping[GgmlType, int]
    experts: tuple[GgmlType, ...] = ()  # of those that belong to experts


def read_types(path: Path) -> ModelTypes:
    """From the header alone. Raises what reading it raises."""
    file = read_gguf(path)
    kinds = Counter(tensor.type for tensor in file.tensors.values() if tensor.rows > 1)
    experts = {tensor.type for name, tensor in file.tensors.items() if "_exps." in name}
    return ModelTypes(model_spec(file, model_digest(file)), kinds, tuple(sorted(experts)))


def explain_device(device: str, create: Callable[[], Backend], model: ModelTypes | None, wish: str) -> DeviceReport:
    """Open the device, ask it, close it. A device that cannot be opened says why."""
    try:
        backend = create()
    except (LaminaError, ImportError) as error:
        return DeviceReport(device, failure=str(error))
    try:
        return _report(device, backend, model, wish)
    finally:
        backend.close()


def _report(device: str, backend: Backend, model: ModelTypes | None, wish: str) -> DeviceReport:
    can, graphs = backend.capabilities, backend.graph_decision()
    overflowing = model is not None and overflows_f16(model.spec)
    dtype = resolve_compute(wish, can.compute_dtypes, overflowing=overflowing)
    backend.set_compute(dtype)
    weights = sorted(WEIGHT_TYPES if model is None else model.matrices)
    experts = weights if model is None else model.experts
    caches = sorted(can.kv_dtypes, key=lambda kind: kind.value)
    return DeviceReport(
        device,
        backend.device_facts().name,
        dtype.value,
        _why(dtype, wish, can.compute_dtypes, model if overflowing else None),
        "on trial" if graphs.probe else "on" if graphs.enabled else "off",
        graphs.reason,
        tuple(backend.explain(weights, caches, experts)),
    )


def _why(dtype: DType, wish: str, offered: tuple[str, ...], overflowing: ModelTypes | None) -> str:
    if wish == dtype.value:
        return "--compute-dtype asks for it"
    if overflowing is not None and offered[0] == "f16":
        spec = overflowing.spec
        why = f"f16, its fastest, is too narrow for {spec.architecture} of width {spec.hidden}"
    else:
        why = "the best that this device has"
    return why if wish == "auto" else f"{why}; it has no {wish}"


def print_report(report: DeviceReport, model: ModelTypes | None) -> None:
    """For people: a few lines, the commonest reason among them, and a table."""
    if report.failure:
        print(f"{report.device}: {report.failure}")
        return
    print(f"{report.device}: {report.name}")
    print(f"  large products in {report.compute_dtype}: {report.compute_why}")
    print(f"  recorded steps {report.graphs}: {report.graphs_why}")
    headers = ["op", "operand", "rows", "kernel"]
    common = Counter(choice.why for choice in report.kernels).most_common(2)
    if common:
        print(f"  kernels: {common[0][0]}")
    if len(common) > 1:
        headers.append("besides")
    table = Table(*headers, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for choice in report.kernels:
        why = choice.why.removeprefix(common[0][0]).removeprefix("; ")
        cells = (choice.op, _operand(choice, model), choice.rows, choice.kernel, why)
        table.add_row(*cells[: len(headers)])
    Console(width=None if sys.stdout.isatty() else 110, markup=False).print(table)


def _operand(choice: KernelChoice, model: ModelTypes | None) -> str:
    counts = {} if model is None else {kind.name: count for kind, count in model.matrices.items()}
    count = counts.get(choice.operand) if choice.op == "linear" else None
    return choice.operand if count is None else f"{choice.operand} ({count} matrices)"
