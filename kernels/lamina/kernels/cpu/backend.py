"""The CPU backend: native ops with run-time dispatch, one persistent team of threads, one native call per replay.

Owns the team, its scratch, and the native memory behind every buffer, weight and cache it hands out. Every op adds in
one fixed order whatever the batch, the chunking or the number of threads (`batch_invariant`). One compute thread.
"""

import ctypes
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from lamina.kernels.backend import (
    Capabilities,
    DeviceFacts,
    Graph,
    GraphError,
    KernelChoice,
    Unsupported,
    require_free,
)
from lamina.kernels.buffer import Buffer, DType, Extent, HostTensor, KvCache, StepLimits, StepShape, Weight
from lamina.kernels.cpu import memory
from lamina.kernels.cpu.descriptors import KvDesc, ReplayReport
from lamina.kernels.cpu.governor import ThreadGovernor
from lamina.kernels.cpu.library import ISA_VARIABLE, choose_isa, load_library
from lamina.kernels.cpu.memory import KV_TYPES, CacheMemory
from lamina.kernels.cpu.tape import Tape, TapeBuilder, expert_scratch_bytes
from lamina.kernels.cpu.threads import usable_cores
from lamina.kernels.ledger import LedgerBackend, stacked_rows
from lamina.kernels.ops import Args, OpSpec
from lamina.kernels.quant.kv_bytes import KV_DTYPES
from lamina.kernels.recording import RecordedGraph, RecordingBackend, operand_rows
from lamina.kernels.reference.kv_codec import float32_to_bf16
from lamina.kernels.reference.storage import rows_of, storage_of
from lamina.spec.errors import CapacityExceeded, InvalidConfig, InvalidPlan
from lamina.spec.quant import GgmlType

F32 = NDArray[np.float32]
_MAX_THREADS = 255
_EMPTY_SHAPE = StepShape(0, 0, 0)
_FAILURES = {
    1: "embed: a token id is outside the vocabulary",
    2: "kv_write: a slot is outside the cache",
    3: "attention: a position or block is outside the block table or the cache",
    4: "attention: row_starts do not ascend within the step's rows",
    5: "gather_rows: an index is outside the rows",
    6: "experts: an id is outside those of the weight",
}


class TapeGraph(RecordedGraph):
    """A recording with its tape. `admitted` is the largest shape found to fit its operands so far."""

    def __init__(self, owner: RecordingBackend, launches: list[tuple[OpSpec, Args]], tape: Tape) -> None:
        super().__init__(owner, launches)
        self.tape: Tape | None = tape
        self.admitted = _EMPTY_SHAPE
        self.num_releases = -1  # of the owner when the operands were last seen to be live

    def destroy(self) -> None:
        """Drop the recording; a second time does nothing."""
        super().destroy()
        self.tape = None


class CpuBackend(LedgerBackend):
    """See the module docstring.

    `threads`: None for every usable core, as far as a team goes. `max_memory_bytes` caps what is allocated, scratch
    included. `pin` binds each thread to a core. `isa`: "scalar", "avx2", "avx512", "amx" or "neon"; None asks
    LAMINA_CPU_ISA, else the best that works.
    Raises Unsupported if the native library is not built, InvalidConfig for an `isa` or `threads` that cannot be.
    """

    name = "cpu"

    def __init__(
        self,
        *,
        threads: int | None = None,
        max_memory_bytes: int | None = None,
        pin: bool = False,
        isa: str | None = None,
    ) -> None:
        super().__init__()
        self._functions = load_library().functions
        self._isa = choose_isa(isa or os.environ.get(ISA_VARIABLE))
        wanted = _team_size(threads)
        team = self._functions.lamina_team_create(self._isa, wanted, pin)
        if not team:
            raise CapacityExceeded(f"the system refused a team of {wanted} threads")
        self._team: int | None = team
        self.num_threads: int = self._functions.lamina_team_num_threads(team)
        self._governor = ThreadGovernor(self.num_threads)
        self._max_memory_bytes = max_memory_bytes
        self._num_releases = 0
        self._report = ReplayReport()
        self.capabilities = Capabilities(
            graphs=True,
            batch_invariant=True,
            kv_dtypes=KV_DTYPES,
            kernel=self._isa.name.lower(),
            num_threads=self.num_threads,
        )

    # -- memory

    def device_facts(self) -> DeviceFacts:
        ram = psutil.virtual_memory()
        total, free = ram.total, ram.available
        if self._max_memory_bytes is not None:
            used = self.ledger.used_bytes + self._functions.lamina_team_scratch_bytes(self._team)
            total = min(total, self._max_memory_bytes)
            free = min(free, self._max_memory_bytes - used)
        return DeviceFacts("cpu", _processor_name(), total, max(0, free))

    def alloc(self, shape: tuple[int, ...], dtype: DType, extent: Extent = Extent.FIXED) -> Buffer:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        self._reserve(f"a {dtype.value} buffer of {shape}", num_bytes)
        raw = memory.allocate(self._functions, num_bytes)
        values = raw[:num_bytes].view(dtype.host_dtype).reshape(shape)
        self.ledger.add(values, num_bytes)
        return Buffer(shape, dtype, extent, values, shape[1] if len(shape) == 2 else 1)

    def free(self, buffer: Buffer) -> None:
        super().free(buffer)
        self._give_back(storage_of(buffer, np.ndarray))

    def _upload(self, buffer: Buffer, values: NDArray[np.generic]) -> None:
        if buffer.dtype is DType.BF16 and values.dtype == np.float32:
            values = float32_to_bf16(values.astype(np.float32, copy=False))
        rows_of(buffer, len(values))[...] = values

    def _download(self, buffer: Buffer, num_rows: int) -> NDArray[np.generic]:
        return rows_of(buffer, num_rows).copy()

    def _copy(self, source: Buffer, target: Buffer, num_rows: int) -> None:
        rows_of(target, num_rows)[...] = rows_of(source, num_rows)

    def load_weight(self, parts: Sequence[HostTensor], bias: F32 | None = None) -> Weight:
        """Raises ValueError if the parts' columns differ or `bias` has not one value per row."""
        in_features, part_rows = stacked_rows(parts, bias)
        num_bytes = memory.part_offsets(self._functions, self._isa, parts, 0 if bias is None else len(bias))[-1]
        self._reserve(f"a weight of {sum(part_rows)} x {in_features}", num_bytes)
        packed = memory.pack_weight(self._functions, self._live_team(), self._isa, parts, bias)
        self.ledger.add(packed, num_bytes)
        return Weight(in_features, part_rows, num_bytes, packed)

    def weight_bits(self, tensor_type: GgmlType) -> float:
        """Of the packed layout, or 32 where this instruction set has no kernel for the type."""
        rows, cols = 16, 256 * 16
        stored = memory.stored_type(self._functions, self._isa, tensor_type)
        num_bytes: int = self._functions.lamina_packed_bytes(self._isa, stored, rows, cols)
        return 8.0 * num_bytes / (rows * cols)

    def explain(
        self, weights: Sequence[GgmlType], caches: Sequence[DType], experts: Sequence[GgmlType] = ()
    ) -> list[KernelChoice]:
        isa = self._isa.name.lower()
        asked_for = os.environ.get(ISA_VARIABLE)
        why = f"{ISA_VARIABLE} asks for it" if asked_for else "the best instruction set that works here"
        found = []
        for op, kind in [*(("linear", kind) for kind in weights), *(("experts", kind) for kind in experts)]:
            packed = memory.stored_type(self._functions, self._isa, kind) is kind
            how = "" if packed else f"; no {isa} kernel for this type, decoded to F32 when loaded"
            found.append(KernelChoice(op, kind.name, "any", f"{isa} {kind.name if packed else 'F32'}", why + how))
        found += [KernelChoice("attention", dtype.value, "any", f"{isa} {dtype.value}", why) for dtype in caches]
        return found

    def free_weight(self, weight: Weight) -> None:
        super().free_weight(weight)
        self._give_back(storage_of(weight, memory.PackedWeight).memory)

    def alloc_kv(self, num_blocks: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType) -> KvCache:
        num_bytes = num_blocks * self.kv_bytes_per_block(num_kv_heads, key_dim, value_dim, dtype)
        self._reserve(f"a KV cache of {num_blocks} blocks", num_bytes)
        pages = memory.allocate(self._functions, num_bytes)
        desc = KvDesc(pages.ctypes.data, num_blocks, num_kv_heads, key_dim, value_dim, KV_TYPES[dtype])
        storage = CacheMemory(pages, desc)
        self.ledger.add(storage, num_bytes)
        return KvCache(num_blocks, num_kv_heads, key_dim, value_dim, dtype, num_bytes, storage)

    def free_kv(self, cache: KvCache) -> None:
        super().free_kv(cache)
        self._give_back(storage_of(cache, CacheMemory).memory)

    def kv_bytes_per_block(self, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType) -> int:
        """Raises Unsupported like `alloc_kv`. V rows are padded to 16 values."""
        if dtype not in KV_TYPES or not self._functions.lamina_kv_supports(KV_TYPES[dtype], key_dim, value_dim):
            raise Unsupported(f"cpu has no kernel for a {dtype.value} KV cache of head sizes {key_dim} and {value_dim}")
        num_bytes: int = self._functions.lamina_kv_block_bytes(KV_TYPES[dtype], num_kv_heads, key_dim, value_dim)
        return num_bytes

    def copy_kv_block(self, cache: KvCache, source: int, target: int) -> None:
        self._require_usable("copy_kv_block", cache)
        pages = storage_of(cache, CacheMemory).memory.reshape(cache.num_blocks, -1)
        pages[target] = pages[source]

    def read_kv(self, cache: KvCache, blocks: Sequence[int], num_tokens: int) -> tuple[F32, F32]:
        """Raises ValueError if a block is not one of the cache's or they hold fewer tokens."""
        self._require_usable("read_kv", cache)
        table = np.asarray(blocks, np.int32)
        if num_tokens > 16 * len(table) or (len(table) and not 0 <= table.min() <= table.max() < cache.num_blocks):
            raise ValueError(f"blocks {list(blocks)} do not hold {num_tokens} tokens of {cache.num_blocks} blocks")
        k, v = (np.empty((num_tokens, cache.num_kv_heads, dim), np.float32) for dim in (cache.key_dim, cache.value_dim))
        desc = ctypes.byref(storage_of(cache, CacheMemory).desc)
        self._functions.lamina_kv_read(desc, table.ctypes.data, num_tokens, k.ctypes.data, v.ctypes.data)
        return k, v

    def workspace_bytes(self, limits: StepLimits, max_in_features: int, max_out_features: int) -> int:
        """What linears share and each thread's for experts; attention's, known when it is recorded, comes on top."""
        own, shared = self._scratch_bytes(limits, max_in_features, max_out_features)
        return own * self.num_threads + shared

    def reserve_workspace(self, limits: StepLimits, max_in_features: int, max_out_features: int) -> None:
        self._ensure_scratch(*self._scratch_bytes(limits, max_in_features, max_out_features))

    def _scratch_bytes(self, limits: StepLimits, max_in: int, max_out: int) -> tuple[int, int]:
        """Of each thread and of all."""
        shared = self._functions.lamina_linear_scratch_bytes(self._isa, limits.max_rows, max_in, max_out)
        own = 0 if limits.experts is None else expert_scratch_bytes(self._functions, self._isa, limits)
        return own, shared

    def bind_to_thread(self) -> None:
        """Pins the calling thread to the team's first core, if the team is pinned."""
        self._functions.lamina_team_pin_caller(self._live_team())

    # -- ops

    def capture(self, fn: Callable[[], None], shape: StepShape) -> TapeGraph:
        """Record what `fn` launches as a tape. Raises GraphError inside another capture."""
        launches = super().capture(fn, shape).launches or []
        return TapeGraph(self, launches, self._build(launches))

    def replay(self, graph: Graph, shape: StepShape) -> None:
        """Run the tape in one native call. Raises LaunchError if the shape exceeds its operands, InvalidPlan if the
        step's arrays name tokens, slots, blocks or rows that do not exist."""
        self._require_no_capture("replay")
        if not isinstance(graph, TapeGraph) or graph.owner is not self:
            raise GraphError(f"{self.name} can replay its own recordings only")
        if graph.tape is None or graph.launches is None:
            raise GraphError(f"{self.name}: the recording was destroyed; capture again")
        if graph.num_releases != self._num_releases or not _within(shape, graph.admitted):
            self._admit(graph, graph.launches, shape)
        self._execute(graph.tape, shape, (id(graph), shape))

    def _admit(self, graph: TapeGraph, launches: list[tuple[OpSpec, Args]], shape: StepShape) -> None:
        """Check every launch against this shape and remember it: each limit concerns one dimension of it alone."""
        for op, args in launches:
            self.ledger.require_live(op.name, args.values())
            operand_rows(op, args, shape)
        before = graph.admitted
        graph.admitted = StepShape(
            max(shape.num_rows, before.num_rows),
            max(shape.num_seqs, before.num_seqs),
            max(shape.num_logit_rows, before.num_logit_rows),
        )
        graph.num_releases = self._num_releases

    def _compute(self, op: OpSpec, args: Args, shape: StepShape, num_rows: int) -> None:
        self._execute(self._build([(op, args)]), shape, None)

    def _build(self, launches: list[tuple[OpSpec, Args]]) -> Tape:
        builder = TapeBuilder(self._functions, self._isa, self.num_threads)
        for op, args in launches:
            builder.add(op, args)
        tape = builder.finish()
        self._ensure_scratch(tape.own_bytes, tape.shared_bytes)
        return tape

    def _execute(self, tape: Tape, shape: StepShape, key: object) -> None:
        start = time.perf_counter()
        threads = self.num_threads if key is None else self._governor.threads(key, start)
        status = self._functions.lamina_replay(
            self._live_team(),
            tape.ops,
            len(tape.ops),
            shape.num_rows,
            shape.num_seqs,
            shape.num_logit_rows,
            threads,
            ctypes.byref(self._report),
        )
        if key is not None:
            end = time.perf_counter()
            self._governor.record(key, end - start, self._report.num_long_waits > 0, end)
        if status:
            raise InvalidPlan(_FAILURES[status])

    # -- the team

    def close(self) -> None:
        """Ends the threads and frees their scratch; buffers, weights and caches are given back by their owners."""
        if self._team is not None:
            self._functions.lamina_team_destroy(self._team)
            self._team = None

    def _live_team(self) -> int:
        if self._team is None:
            raise GraphError("cpu: the backend was closed")
        return self._team

    def _ensure_scratch(self, own_bytes: int, shared_bytes: int) -> None:
        wanted = own_bytes * self.num_threads + shared_bytes
        growth = wanted - self._functions.lamina_team_scratch_bytes(self._live_team())
        if growth > 0:
            require_free("scratch of the CPU ops", growth, self.device_facts())
        if not self._functions.lamina_team_reserve(self._live_team(), own_bytes, shared_bytes):
            raise CapacityExceeded(f"the system refused {shared_bytes / 2**20:.1f} MiB of scratch")

    def _give_back(self, values: NDArray[np.generic]) -> None:
        self._num_releases += 1
        memory.release(self._functions, values)


def _within(shape: StepShape, limit: StepShape) -> bool:
    return (
        shape.num_rows <= limit.num_rows
        and shape.num_seqs <= limit.num_seqs
        and shape.num_logit_rows <= limit.num_logit_rows
    )


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _team_size(threads: int | None) -> int:
    if threads is None:
        return min(usable_cores(), _MAX_THREADS)
    if not 1 <= threads <= _MAX_THREADS:
        raise InvalidConfig(f"threads={threads} is not within 1 .. {_MAX_THREADS}")
    return threads
