"""Where a step of the CUDA backend spends its time: one line per kind of kernel, by torch's profiler (CUPTI).

`busy` sums how long the kernels ran; a kernel may start before its predecessor has ended, so `step`, the
time by which each kernel moved the end of all work, is what adds up to the step. GB/s counts packed weights. Run on a
machine with an NVIDIA GPU, torch installed for its profiler:

    PYTHONPATH=proto:coordinator:rpc_worker:kernels:tests python benchmarks/cuda_profile.py --model qwen7b
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_backend import MODELS, Stack, step_seconds

from lamina.kernels.backend import Graph
from lamina.kernels.buffer import BLOCK_TOKENS, StepShape
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.device import Call, KernelCall
from lamina.kernels.cuda.formats import PACKED_FORMATS
from lamina.kernels.cuda.graph import Bucket
from lamina.kernels.ops import Args, OpSpec
from lamina.spec.quant import GgmlType

REPLAYS = 5


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel of the trace: name, start and end in microseconds."""

    name: str
    start: float
    end: float


def label_of(call: Call) -> tuple[str, int]:
    """What to list a call under, and the bytes of packed weights that it reads."""
    if not isinstance(call, KernelCall):
        return f"cuBLAS {call.x.rows} x {call.x.columns} x {call.weight.rows}", 0
    name = f"{call.program.file.removesuffix('.cu')}.{call.program.function}"
    defines = dict(call.program.defines)
    if call.program.function != "linear" or "FORMAT" not in defines:
        return name, 0
    parts = [(defines["FORMAT"], int(call.args[2]))]
    if "FORMAT_B" in defines:
        parts.append((defines["FORMAT_B"], int(call.args[8])))
    chunks = int(call.args[17])  # of Problem, after two parts
    num_bytes = sum(groups * PACKED_FORMATS[GgmlType[str(kind)]].group_bytes(64 * chunks) for kind, groups in parts)
    which = " ".join(f"{kind}:{groups}" for kind, groups in parts)
    return f"{name} {which} x {chunks} ({call.num_threads} threads)", num_bytes


def trace(run: object, backend: CudaBackend) -> list[Ran]:
    """The kernels of REPLAYS runs in order of their starts."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            run()  # type: ignore[operator]
        backend.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [Ran(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    return sorted(kernels, key=lambda kernel: kernel.start)


def matched(calls: Sequence[Call], kernels: Sequence[Ran]) -> Iterator[tuple[Call, Ran]]:
    """Each kernel of a run with its call; a product may be several kernels."""
    own = {call.program.function for call in calls if isinstance(call, KernelCall)}
    at = 0
    for kernel in kernels:
        while at < len(calls) and isinstance(calls[at], KernelCall) != (kernel.name in own):
            at += 1
        if at == len(calls):
            return
        yield calls[at], kernel
        at += isinstance(calls[at], KernelCall)


def capture(stack: Stack, backend: CudaBackend, shape: StepShape) -> tuple[Graph, list[Call]]:
    """A step's recording and the calls in it."""
    calls: list[Call] = []
    plan = backend._plan

    def noted(launches: Sequence[tuple[OpSpec, Args]], bucket: Bucket | None, shape: StepShape) -> list[Call]:
        calls.extend(plan(launches, bucket, shape))
        return calls

    backend._plan = noted  # type: ignore[method-assign]
    graph = backend.capture(stack.launch_all, shape)
    del backend._plan
    return graph, calls


def profile_step(stack: Stack, shape: StepShape, title: str) -> None:
    """Print the table of one step."""
    backend = stack.backend
    assert isinstance(backend, CudaBackend)
    seconds = step_seconds(stack, shape, 10)
    graph, calls = capture(stack, backend, shape)
    backend.replay(graph, shape)
    kernels = trace(lambda: backend.replay(graph, shape), backend)
    graph.destroy()
    own = [k for k in kernels if k.name != "set_shape"]
    per_run = len(own) // REPLAYS
    rows: dict[str, list[float]] = {}
    for first in range(0, per_run * REPLAYS, per_run):
        end = own[first].start
        for call, kernel in matched(calls, own[first : first + per_run]):
            label, num_bytes = label_of(call)
            row = rows.setdefault(label, [0.0, 0.0, 0.0, 0.0])
            row[0] += 1
            row[1] += kernel.end - kernel.start
            row[2] += max(0.0, kernel.end - end)
            row[3] += num_bytes
            end = max(end, kernel.end)
    print(f"\n== {title}: {seconds * 1e6:.0f} us a step, {len(calls)} calls, {per_run} kernels")
    print(f"{'kernel':64s} {'count':>5s} {'busy us':>9s} {'step us':>9s} {'each us':>8s} {'GB/s':>6s}")
    for label, (count, busy, step, num_bytes) in sorted(rows.items(), key=lambda item: -item[1][2]):
        rate = f"{num_bytes / step / 1e3:6.0f}" if num_bytes else ""
        each = f"{count / REPLAYS:5.0f} {busy / REPLAYS:9.1f} {step / REPLAYS:9.1f} {step / count:8.2f}"
        print(f"{label:64s} {each} {rate}")
    print(f"{'sum':64s} {'':5s} {'':9s} {sum(row[2] for row in rows.values()) / REPLAYS:9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="qwen7b")
    parser.add_argument("--steps", default="1x1,1x512,1x2048,8x1,32x1", help="sequences x rows of each")
    parser.add_argument("--depth", type=int, default=0, help="tokens in the cache before")
    args = parser.parse_args()
    backend = CudaBackend()
    stack = Stack(backend, MODELS[args.model], 2048, 32, -(-(args.depth + 2048) // BLOCK_TOKENS) + 33)
    stack.fill_caches(1, args.depth)
    for step in args.steps.split(","):
        seqs, rows = (int(part) for part in step.split("x"))
        profile_step(stack, stack.stage_inputs(seqs, rows, args.depth if seqs == 1 else 0), f"{args.model} {step}")
    backend.close()


if __name__ == "__main__":
    main()
