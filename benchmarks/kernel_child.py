"""One backend's ops, timed one kind at a time; what `kernels.py` starts once per thread count.

python benchmarks/kernel_child.py      commands on standard input, answers on standard output
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
from contest import serve_commands
from gguf import GGMLQuantizationType
from shapes import Tensor, values_of

from lamina.kernels import ops
from lamina.kernels.backend import Backend, Graph
from lamina.kernels.buffer import (
    BLOCK_TOKENS,
    Buffer,
    DType,
    Extent,
    HostTensor,
    KvCache,
    StepLimits,
    StepShape,
    Weight,
)
from lamina.kernels.registry import create_backend
from lamina.spec.quant import GgmlType

MAX_ROWS = 512


class KernelChild:
    """A backend and one recording at a time: many launches of one op over memory that no cache holds."""

    def __init__(self) -> None:
        self._rng = np.random.Generator(np.random.SFC64(3))
        self._graph: Graph | None = None
        self._buffers: list[Buffer] = []
        self._weights: list[Weight] = []
        self._caches: list[KvCache] = []
        self._num_launches = 0

    def open(self, device: str, threads: int) -> str:
        """Start the backend; which kernels it has."""
        self._backend: Backend = create_backend(device, threads=threads)
        self._backend.bind_to_thread()
        return self._backend.capabilities.kernel

    def linear(self, kind: str, out_features: int, in_features: int, set_bytes: int) -> dict[str, int]:
        """Prepare as many equal matrices as fill `set_bytes` once loaded. Bytes of all, launches of a replay."""
        self._release()
        b, tensor_type = self._backend, GgmlType[kind]
        tensor = Tensor("matrix", GGMLQuantizationType[kind], out_features, in_features)
        blocks = np.asarray(values_of(tensor, self._rng), np.uint8)
        host = HostTensor(tensor_type, out_features, in_features, blocks)
        self._weights = [b.load_weight([host])]
        while sum(weight.num_bytes for weight in self._weights) < set_bytes:
            self._weights.append(b.load_weight([host]))
        b.reserve_workspace(StepLimits(MAX_ROWS, 1, 1, 1), in_features, out_features)
        x, y = self._floats(MAX_ROWS, in_features), self._floats(MAX_ROWS, out_features)
        return self._record([lambda w=weight: ops.linear(b, x, w, y) for weight in self._weights])

    def attention(
        self, context: int, heads: int, kv_heads: int, head_dim: int, kv_dtype: str, num_layers: int
    ) -> dict[str, int]:
        """Prepare decode attention of one sequence at `context` tokens over `num_layers` caches."""
        self._release()
        b = self._backend
        num_blocks = -(-context // BLOCK_TOKENS)
        for _ in range(num_layers):
            self._caches.append(b.alloc_kv(num_blocks, kv_heads, head_dim, head_dim, DType(kv_dtype)))
        query, out = self._floats(MAX_ROWS, heads * head_dim), self._floats(MAX_ROWS, heads * head_dim)
        positions = self._ints(np.full(MAX_ROWS, context - 1), Extent.ROWS)
        row_starts = self._ints(np.array([0, 1]), Extent.FIXED)
        table = self._ints(self._rng.permutation(num_blocks)[None, :], Extent.SEQS)
        scale = head_dim**-0.5

        def launch(cache: KvCache) -> Callable[[], None]:
            return lambda: ops.attention(b, query, cache, positions, row_starts, table, out, scale=scale)

        return self._record([launch(cache) for cache in self._caches])

    def rows(self, name: str, columns: int, head_dim: int, num_launches: int) -> dict[str, int]:
        """Prepare a row op (rms_norm, rope, add, kv_write, argmax) on `columns` columns."""
        self._release()
        b = self._backend
        x, y = self._floats(MAX_ROWS, columns), self._floats(MAX_ROWS, columns)
        positions = self._ints(np.arange(MAX_ROWS), Extent.ROWS)
        match name:
            case "rms_norm":
                weight = self._floats(1, columns, vector=True)
                launch = lambda: ops.rms_norm(b, x, weight, y, 1e-6)  # noqa: E731
            case "rope":
                frequencies = self._floats(1, head_dim // 2, vector=True)
                launch = lambda: ops.rope(b, x, positions, frequencies, head_dim=head_dim, layout="neox")  # noqa: E731
            case "add":
                launch = lambda: ops.add(b, x, y, x)  # noqa: E731
            case "kv_write":
                self._caches = [
                    b.alloc_kv(MAX_ROWS // BLOCK_TOKENS, columns // head_dim, head_dim, head_dim, DType.F16)
                ]
                launch = lambda: ops.kv_write(b, x, y, positions, self._caches[0])  # noqa: E731
            case "argmax":
                best = self._ints(np.zeros(MAX_ROWS, np.int32), Extent.ROWS)
                launch = lambda: ops.argmax(b, x, best)  # noqa: E731
            case other:
                raise ValueError(f"no row op {other!r}")
        return self._record([launch] * num_launches)

    def time(self, num_rows: int, num_seqs: int = 1, min_s: float = 0.2) -> float:
        """Seconds of one launch at so many rows: median over replays of the whole recording."""
        if self._graph is None:
            raise RuntimeError("nothing is prepared")
        shape = StepShape(num_rows, num_seqs, 0)
        self._backend.replay(self._graph, shape)
        self._backend.synchronize()
        times: list[float] = []
        while len(times) < 3 or sum(times) < min_s:
            start = time.perf_counter()
            self._backend.replay(self._graph, shape)
            self._backend.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times) / self._num_launches

    def _record(self, launches: list[Callable[[], None]]) -> dict[str, int]:
        def run_all() -> None:
            for launch in launches:
                launch()

        self._graph = self._backend.capture(run_all, StepShape(1, 1, 0))
        self._num_launches = len(launches)
        held = [*self._weights, *self._caches]
        return {"num_launches": len(launches), "num_bytes": sum(item.num_bytes for item in held)}

    def _floats(self, rows: int, columns: int, *, vector: bool = False) -> Buffer:
        shape = (columns,) if vector else (rows, columns)
        buffer = self._backend.alloc(shape, DType.F32, Extent.FIXED if vector else Extent.ROWS)
        self._backend.upload(buffer, self._rng.normal(0.0, 1.0, shape).astype(np.float32))
        self._buffers.append(buffer)
        return buffer

    def _ints(self, values: np.ndarray, extent: Extent) -> Buffer:
        buffer = self._backend.alloc(values.shape, DType.I32, extent)
        self._backend.upload(buffer, values.astype(np.int32))
        self._buffers.append(buffer)
        return buffer

    def _release(self) -> None:
        if self._graph is not None:
            self._graph.destroy()
            self._graph = None
        for weight in self._weights:
            self._backend.free_weight(weight)
        for cache in self._caches:
            self._backend.free_kv(cache)
        for buffer in self._buffers:
            self._backend.free(buffer)
        self._weights, self._caches, self._buffers = [], [], []


def main() -> None:
    """Serve commands."""
    child = KernelChild()
    serve_commands({name: getattr(child, name) for name in ("open", "linear", "attention", "rows", "time")})


if __name__ == "__main__":
    main()
