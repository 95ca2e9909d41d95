"""Which kernel serves what on a card, asked of the planner itself: ops are planned for a card on paper, and counted.

Nothing is allocated or launched, so a Pascal card is explained on a machine without a GPU, and no table here can
disagree with what runs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, cast

import numpy as np

from lamina.kernels import ops
from lamina.kernels.backend import KernelChoice
from lamina.kernels.buffer import BLOCK_TOKENS, Buffer, DType, Extent, HostTensor, KvCache, StepShape, Weight
from lamina.kernels.cuda.device import Call, Device, KernelCall, Memory
from lamina.kernels.cuda.dispatch import OpPlanner
from lamina.kernels.cuda.kv_pages import Pages
from lamina.kernels.cuda.policy import BYTE_MMA, HALF_MMA, ComputeCapability
from lamina.kernels.cuda.weights import CudaWeight, plan_weight
from lamina.kernels.ops import Args, OpSpec
from lamina.spec.quant import GgmlType

_WIDTH = 4096
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_EXPERTS, _EXPERTS_USED = 8, 2
_MANY_ROWS = 512
_ROW_COUNTS = (*range(1, 129), _MANY_ROWS)
_PREPARATION = frozenset(  # beside the kernel proper
    {"prepare", "set_shape", "dequantise", "convert", "finish", "bin", "prepare_pairs", "combine"}
)


class _PaperDevice:
    """As much of a card as planning asks for: its capability, its size, and addresses that nothing will follow."""

    name = "a card on paper"

    def __init__(self, cc: ComputeCapability, num_multiprocessors: int) -> None:
        self.compute_capability = cc
        self.num_multiprocessors = num_multiprocessors
        self._next_address = 1 << 20

    def memory_bytes(self) -> tuple[int, int]:
        return 1 << 34, 1 << 34

    def allocate(self, num_bytes: int) -> Memory:
        self._next_address += -(-num_bytes // 256) * 256
        return Memory(self._next_address, num_bytes, None)

    def upload(self, *args: object) -> None: ...

    def run(self, call: Call) -> None: ...


class CardOnPaper:
    """Plans single ops for a card of this capability, computing in `compute`."""

    def __init__(self, cc: ComputeCapability, compute: DType, num_multiprocessors: int = 60) -> None:
        self._cc = cc
        self._compute = compute
        self._device = _PaperDevice(cc, num_multiprocessors)
        self._planner = OpPlanner(cast(Device, self._device), compute)

    def explain(
        self, weights: Iterable[GgmlType], caches: Iterable[DType], experts: Iterable[GgmlType] = ()
    ) -> list[KernelChoice]:
        """Linears and experts by weight type and rows, attention by cache type and phase."""
        choices: list[KernelChoice] = []
        for kind in weights:
            choices += self._products("linear", kind, self._weight(kind), self._linear_kernel)
        for kind in experts:
            choices += self._products("experts", kind, self._weight(kind, _EXPERTS), self._expert_kernel)
        for dtype in caches:
            choices += self._attentions(dtype)
        return choices

    def _products(
        self, op: str, kind: GgmlType, weight: Weight, kernel_of: Callable[[Weight, int], str]
    ) -> Iterator[KernelChoice]:
        found = [(num_rows, kernel_of(weight, num_rows)) for num_rows in _ROW_COUNTS]
        stored = cast(CudaWeight, weight.storage).parts[0]
        decoded = "" if getattr(stored, "stored_from", kind) is getattr(stored, "type", kind) else "decoded to f32; "
        for kernel, run in groupby(found, key=lambda item: item[1]):
            rows = [num_rows for num_rows, _ in run]
            yield KernelChoice(op, kind.name, _span(rows), kernel, decoded + self._why(kernel, kind))

    def _linear_kernel(self, weight: Weight, num_rows: int) -> str:
        x, out = self._floats(num_rows, _WIDTH), self._floats(num_rows, _WIDTH)
        calls = self._plan(ops.LINEAR, {"x": x, "weight": weight, "out": out, "accumulate": False}, num_rows, num_rows)
        return _name(calls, self._compute)

    def _expert_kernel(self, weight: Weight, num_rows: int) -> str:
        args: dict[str, Any] = {
            "x": self._floats(num_rows, _EXPERTS_USED * _WIDTH),
            "experts": self._ints((num_rows, _EXPERTS_USED), Extent.ROWS),
            "shares": self._floats(num_rows, _EXPERTS_USED),
            "weight": weight,
            "out": self._floats(num_rows, _WIDTH),
            "accumulate": True,
        }
        return _name(self._plan(ops.EXPERT_LINEAR, args, num_rows, num_rows), self._compute)

    def _attentions(self, dtype: DType) -> Iterator[KernelChoice]:
        for phase, num_rows, num_seqs in (("decode", 8, 8), ("prefill", _MANY_ROWS, 1)):
            kernel = self._attention_kernel(dtype, num_rows, num_seqs)
            yield KernelChoice("attention", dtype.value, phase, kernel, self._why(kernel, dtype))

    def _attention_kernel(self, dtype: DType, num_rows: int, num_seqs: int) -> str:
        num_blocks = 64
        memory = self._device.allocate(1 << 24)
        cache = KvCache(num_blocks, _KV_HEADS, _HEAD_DIM, _HEAD_DIM, dtype, 1 << 24, Pages(memory, 1 << 23))
        args: dict[str, Any] = {
            "q": self._floats(num_rows, _HEADS * _HEAD_DIM),
            "cache": cache,
            "positions": self._ints((num_rows,), Extent.ROWS),
            "row_starts": self._ints((num_seqs + 1,), Extent.FIXED),
            "block_table": self._ints((num_seqs, num_blocks * BLOCK_TOKENS), Extent.SEQS),
            "out": self._floats(num_rows, _HEADS * _HEAD_DIM),
            "scale": 1.0,
            "window": 0,
            "softcap": 0.0,
            "sinks": None,
        }
        return _name(self._plan(ops.ATTENTION, args, num_rows, num_seqs), self._compute)

    def _plan(self, op: OpSpec, args: Args, num_rows: int, num_seqs: int) -> list[Call]:
        calls: list[Call] = []
        self._planner.sink = calls.append
        self._planner.forget()
        self._planner.set_shape(StepShape(num_rows, num_seqs, 0), one_row_each=num_rows == num_seqs)
        self._planner.plan(op, args)
        self._planner.flush()
        return calls

    def _weight(self, kind: GgmlType, num_parts: int = 1) -> Weight:
        tensors = [HostTensor(kind, _WIDTH, _WIDTH, np.empty((0, 0), np.uint8))] * num_parts
        parts, bias_offset, num_bytes = plan_weight(tensors, False)
        stored = CudaWeight(self._device.allocate(num_bytes), parts, bias_offset)
        return Weight(_WIDTH, (_WIDTH,) * num_parts, num_bytes, stored)

    def _floats(self, rows: int, columns: int) -> Buffer:
        memory = self._device.allocate(4 * rows * columns)
        return Buffer((rows, columns), DType.F32, Extent.ROWS, memory, columns)

    def _ints(self, shape: tuple[int, ...], extent: Extent) -> Buffer:
        return Buffer(shape, DType.I32, extent, self._device.allocate(4 * int(np.prod(shape))), shape[-1])

    def _why(self, kernel: str, operand: object) -> str:
        """What about the card or the type leads there."""
        if kernel == f"cuBLAS {self._compute.value}":
            return f"many rows are worth decoding the matrix for; {_compute_reason(self._cc, self._compute)}"
        if kernel.startswith("cuBLAS"):
            return "many rows; the matrix is kept in this type"
        match kernel.partition(":")[0]:
            case "linear_dp4a" if self._cc < BYTE_MMA:
                return "8-bit activations by dp4a: no int8 tensor cores before 7.5"
            case "linear_dp4a":
                return "8-bit activations by dp4a: the type does not fit the one-row kernel of the tensor cores"
            case "linear_row" | "linear_rows":
                return "8-bit activations on int8 tensor cores (7.5 and later)"
            case "expert_row":
                more = ": no int8 tensor cores before 7.5" if self._cc < BYTE_MMA else ", few rows"
                return f"each row by the experts it chose, 8-bit activations{more}"
            case "expert_rows":
                return "rows sorted by expert, 8-bit activations on int8 tensor cores (7.5 and later)"
            case "dense" | "expert_dense":
                return "weights are floats as stored, sums in f32"
            case "attention_plain" if operand is DType.F32:
                return "a cache of f32 is read without tensor cores"
            case "attention_plain" if self._cc < HALF_MMA:
                return "no bf16 tensor cores before 8.0"
            case "attention_few" | "attention_many":
                return "16-bit tensor cores (8.0 and later)"
            case "attention_wgmma":
                return "16-bit tensor cores by whole warpgroups (9.0 alone)"
        return "the planner's choice for this card"


def _compute_reason(cc: ComputeCapability, compute: DType) -> str:
    match compute:
        case DType.BF16:
            return "bf16 is native from 8.0 on"
        case DType.F16:
            return "f16 on tensor cores" if cc >= (7, 0) else "f16 as configured"
        case _:
            return "f32: f16 runs at a 64th of its rate before 7.0" if cc < (7, 0) else "f32 holds what f16 does not"


def _name(calls: Sequence[Call], compute: DType) -> str:
    """The kernels proper of an op, each once: source, and entry point where the source has several."""
    names: list[str] = []
    for call in calls:
        if not isinstance(call, KernelCall):
            names.append(f"cuBLAS {call.x.dtype.value}")
        elif call.program.function not in _PREPARATION:
            names.append(call.program.file.removesuffix(".cu"))
    return " + ".join(dict.fromkeys(names))


def _span(rows: list[int]) -> str:
    if rows[-1] == _MANY_ROWS:
        return f"{rows[0]} and more"
    return str(rows[0]) if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
