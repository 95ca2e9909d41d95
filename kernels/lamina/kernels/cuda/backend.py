"""The CUDA backend: memory, weights and caches on one GPU, ops planned as kernel calls, steps captured as graphs.

Owns the glue between the Backend contract, the planner (which calls an op becomes) and the device (how calls run).
What a real card needs is imported when one is asked for, by `open_device`. One compute thread.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import (
    Backend,
    Capabilities,
    DeviceFacts,
    Event,
    EventProbe,
    Graph,
    GraphDecision,
    GraphError,
    GraphMode,
    HostCopy,
    KernelChoice,
)
from lamina.kernels.buffer import Buffer, DType, Extent, HostTensor, KvCache, StepLimits, StepShape, Weight
from lamina.kernels.cuda import kv_pages
from lamina.kernels.cuda.device import Call, Device, KernelCall, Span
from lamina.kernels.cuda.dispatch import OpPlanner
from lamina.kernels.cuda.expert_plan import experts_regions
from lamina.kernels.cuda.explain import CardOnPaper
from lamina.kernels.cuda.formats import PACKED_FORMATS
from lamina.kernels.cuda.graph import Bucket, CudaGraph, bucket_capacity, bucket_of, largest_step
from lamina.kernels.cuda.health import open_health
from lamina.kernels.cuda.host_copy import CudaHostCopy
from lamina.kernels.cuda.planner import memory_of
from lamina.kernels.cuda.policy import compute_dtypes, graph_policy, kv_dtypes
from lamina.kernels.cuda.weights import CudaWeight, plan_weight, store_weight
from lamina.kernels.cuda.workspace import region_sizes
from lamina.kernels.ledger import LedgerBackend, stacked_rows
from lamina.kernels.ops import Args, LaunchError, OpSpec
from lamina.kernels.recording import operand_rows
from lamina.spec.device import DeviceHealth
from lamina.spec.quant import FLOAT_TYPES, GgmlType, quant_format


@dataclass(eq=False)
class CudaEvent(Event):
    """An event of the device."""

    handle: object


def open_device(index: int) -> Device:
    """The index-th GPU. Raises ImportError without the `cuda` extra, Unsupported for a card that it cannot run."""
    from lamina.kernels.cuda.cuda_device import CudaDevice
    from lamina.kernels.cuda.toolkit import kernel_folder, load_libraries

    return CudaDevice(index, load_libraries(), kernel_folder())


class CudaBackend(LedgerBackend):
    """See the module docstring. `max_memory_bytes` caps what it allocates (None: what the card has)."""

    name = "cuda"

    def __init__(
        self,
        index: int = 0,
        *,
        max_memory_bytes: int | None = None,
        graphs: GraphMode = GraphMode.AUTO,
        device: Device | None = None,
        compute: DType | None = None,
    ) -> None:
        super().__init__()
        self.device = device or open_device(index)
        self._graphs = graphs
        self._health = open_health(self.device.uuid)
        self._max_memory_bytes = max_memory_bytes
        self._planner = OpPlanner(self.device, compute)
        self._device_shape: StepShape | None = None  # what the device was told last
        self.capabilities = Capabilities(
            graphs=self.graph_decision().enabled,
            streams=False,
            events=True,
            pinned_memory=True,
            asynchronous=True,
            kv_dtypes=kv_dtypes(),
            compute_dtype=self._planner.compute.value,
            compute_dtypes=tuple(dtype.value for dtype in compute_dtypes(self.device.compute_capability)),
            kernel=f"int8 {'tensor cores' if self._planner.has_byte_mma else 'dp4a'}, "
            f"cuBLAS {self._planner.compute.value}",
        )

    # -- memory

    def health(self) -> DeviceHealth | None:
        return None if self._health is None else self._health.read()

    def device_facts(self) -> DeviceFacts:
        free, total = self.device.memory_bytes()
        if self._max_memory_bytes is not None:
            total = min(total, self._max_memory_bytes)
            free = min(free, self._max_memory_bytes - self.ledger.used_bytes)
        return DeviceFacts("cuda", self.device.name, total, free)

    def alloc(self, shape: tuple[int, ...], dtype: DType, extent: Extent = Extent.FIXED) -> Buffer:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        self._reserve(f"a {dtype.value} buffer of {shape}", num_bytes)
        memory = self.device.allocate(num_bytes)
        self.ledger.add(memory, num_bytes)
        return Buffer(shape, dtype, extent, memory, shape[1] if len(shape) == 2 else 1)

    def free(self, buffer: Buffer) -> None:
        super().free(buffer)
        self._planner.forget()
        self.device.release(memory_of(buffer))

    def _upload(self, buffer: Buffer, values: NDArray[np.generic]) -> None:
        self._settle()
        if buffer.dtype in (DType.F16, DType.BF16) and values.dtype == np.float32:
            values = _rounded(values, buffer.dtype)
        if len(values):
            host = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
            self.device.upload(_rows(buffer, len(values)), host)

    def _download(self, buffer: Buffer, num_rows: int) -> NDArray[np.generic]:
        self._planner.flush()
        if num_rows == 0:
            return np.empty((0, *buffer.shape[1:]), buffer.dtype.host_dtype)
        raw = self.device.download(_rows(buffer, num_rows))
        return np.ascontiguousarray(raw).view(buffer.dtype.host_dtype).reshape(num_rows, *buffer.shape[1:])

    def host_copy(self, buffer: Buffer) -> HostCopy:
        self._require_usable("a copy on the host", buffer)
        return CudaHostCopy(self.device, buffer, _rows(buffer, buffer.shape[0]), self._before_transfer)

    def _before_transfer(self, buffer: Buffer, *, writes: bool) -> None:
        self._require_usable("a transfer", buffer)
        self._planner.flush()
        if writes:
            self._planner.forget()

    def _copy(self, source: Buffer, target: Buffer, num_rows: int) -> None:
        self._settle()
        if num_rows:
            self.device.copy(_rows(source, num_rows), _rows(target, num_rows))

    def reaches(self, other: Backend) -> bool:
        return isinstance(other, CudaBackend) and self.device.reaches(other.device)

    def _copy_from(self, owner: Backend, source: Buffer, target: Buffer, num_rows: int) -> None:
        self._settle()
        if num_rows and isinstance(owner, CudaBackend):
            self.device.copy_from(owner.device, _rows(source, num_rows), _rows(target, num_rows))

    def load_weight(self, parts: Sequence[HostTensor], bias: NDArray[np.float32] | None = None) -> Weight:
        """Raises ValueError if the parts' columns differ or `bias` has not one value per row."""
        in_features, part_rows = stacked_rows(parts, bias)
        planned, bias_offset, num_bytes = plan_weight(parts, bias is not None)
        self._reserve(f"a weight of {sum(part_rows)} x {in_features}", num_bytes)
        stored = CudaWeight(self.device.allocate(num_bytes), planned, bias_offset)
        try:
            store_weight(self.device, stored, parts, bias)
        except BaseException:  # there may be no memory for the checkpoint's blocks beside it
            self.device.release(stored.memory)
            raise
        self.ledger.add(stored, num_bytes)
        return Weight(in_features, part_rows, num_bytes, stored)

    def explain_weight(self, weight: Weight) -> str:
        """One line: how each part of a weight is kept, and whether it had to be converted."""
        return weight.storage.explain() if isinstance(weight.storage, CudaWeight) else "not a weight of this backend"

    def weight_bits(self, tensor_type: GgmlType) -> float:
        """Packed types take up to 3 % more than the checkpoint, types without kernels 32 bits."""
        if tensor_type in PACKED_FORMATS:
            return PACKED_FORMATS[tensor_type].bits_per_value
        return quant_format(tensor_type, tensor_type.name).bits_per_value if tensor_type in FLOAT_TYPES else 32.0

    def free_weight(self, weight: Weight) -> None:
        super().free_weight(weight)
        if isinstance(weight.storage, CudaWeight):
            self.device.release(weight.storage.memory)

    def alloc_kv(self, num_blocks: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType) -> KvCache:
        num_bytes = num_blocks * self.kv_bytes_per_block(num_kv_heads, key_dim, value_dim, dtype)
        self._reserve(f"a KV cache of {num_blocks} blocks", num_bytes)
        v_offset = num_blocks * num_kv_heads * kv_pages.key_page_bytes(dtype, key_dim)
        pages = kv_pages.Pages(self.device.allocate(num_bytes), v_offset)
        self.ledger.add(pages, num_bytes)
        return KvCache(num_blocks, num_kv_heads, key_dim, value_dim, dtype, num_bytes, pages)

    def free_kv(self, cache: KvCache) -> None:
        super().free_kv(cache)
        self.device.release(kv_pages.pages_of(cache).memory)

    def kv_bytes_per_block(self, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType) -> int:
        """Raises Unsupported like `alloc_kv`."""
        return num_kv_heads * (kv_pages.key_page_bytes(dtype, key_dim) + kv_pages.value_page_bytes(dtype, value_dim))

    def copy_kv_block(self, cache: KvCache, source: int, target: int) -> None:
        self._require_usable("copy_kv_block", cache)
        self._planner.flush()
        pages = kv_pages.pages_of(cache)
        key_bytes = kv_pages.key_page_bytes(cache.dtype, cache.key_dim)
        value_bytes = kv_pages.value_page_bytes(cache.dtype, cache.value_dim)
        for offset, page_bytes in ((0, key_bytes), (pages.v_offset, value_bytes)):
            size = cache.num_kv_heads * page_bytes
            spans = [Span(pages.memory, offset + block * size, 1, size, size) for block in (source, target)]
            self.device.copy(spans[0], spans[1])

    def read_kv(
        self, cache: KvCache, blocks: Sequence[int], num_tokens: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self._require_usable("read_kv", cache)
        self._planner.flush()
        return kv_pages.read_pages(self.device, cache, blocks, num_tokens)

    def workspace_bytes(self, limits: StepLimits, max_in_features: int, max_out_features: int) -> int:
        return sum(self._region_sizes(limits, max_in_features, max_out_features).values())

    def reserve_workspace(self, limits: StepLimits, max_in_features: int, max_out_features: int) -> None:
        sizes = self._region_sizes(limits, max_in_features, max_out_features)
        self._reserve("the CUDA workspace", sum(sizes.values()))
        self._planner.workspace.reserve(sizes)

    def _region_sizes(self, limits: StepLimits, max_in: int, max_out: int) -> dict[str, int]:
        total = self.device.memory_bytes()[1]
        may_be_f32 = self._planner.compute is DType.F32 or "bf16" not in self.capabilities.compute_dtypes
        compute_bytes = 4 if may_be_f32 else 2  # f16 that overflows falls back without an allocation
        sizes = region_sizes(limits, max_in, max_out, total, self.device.num_multiprocessors, compute_bytes)
        most_bytes = self._planner.slice_bytes
        return experts_regions(sizes, limits.experts, limits.max_rows, most_bytes) if limits.experts else sizes

    def alloc_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        return self.device.alloc_pinned(num_bytes)

    # -- launches

    def _compute(self, op: OpSpec, args: Args, shape: StepShape, num_rows: int) -> None:
        self._tell(shape)
        self._planner.set_shape(shape, one_row_each=shape.num_rows == shape.num_seqs)
        self._planner.plan(op, args)

    def explain(
        self, weights: Sequence[GgmlType], caches: Sequence[DType], experts: Sequence[GgmlType] = ()
    ) -> list[KernelChoice]:
        device = self.device
        card = CardOnPaper(device.compute_capability, self._planner.compute, device.num_multiprocessors)
        return card.explain(weights, caches, experts)

    def set_compute(self, dtype: DType) -> None:
        super().set_compute(dtype)
        if dtype is not self._planner.compute:
            self._settle()
            self._planner.set_compute(dtype)

    def set_shape(self, shape: StepShape) -> None:
        if shape != self._shape:
            self._settle()
        super().set_shape(shape)

    def _tell(self, shape: StepShape) -> None:
        """Have the device know the sizes of what is launched next."""
        if shape != self._device_shape:
            self._planner.flush()
            self._planner.write_counts(shape)
            self._device_shape = shape

    def _settle(self) -> None:
        """Launch what waits, and forget what buffers held."""
        self._planner.flush()
        self._planner.forget()

    def synchronize(self) -> None:
        self._planner.flush()
        self.device.synchronize()

    def bind_to_thread(self) -> None:
        self.device.bind_to_thread()

    # -- graphs

    def graph_decision(self, cluster: GraphMode = GraphMode.AUTO) -> GraphDecision:
        return graph_policy(self.device.compute_capability, self._graphs, cluster)

    def graph_bucket(self, shape: StepShape) -> Hashable | None:
        """Sizes rounded up, see `graph.bucket_of`; steps of more than 4,096 rows run op by op."""
        return bucket_of(shape, self._planner.max_byte_rows)

    def capture(self, fn: Callable[[], None], shape: StepShape) -> Graph:  # type: ignore[override]
        """Record what `fn` launches as one CUDA graph of this shape's bucket. Raises GraphError, LaunchError (B-09)."""
        recorded = super().capture(fn, shape)
        launches = recorded.launches or []
        for op, args in launches:
            self.ledger.require_live(op.name, args.values())
            operand_rows(op, args, shape)
        self._settle()
        bucket = bucket_of(shape, self._planner.max_byte_rows)
        calls = self._plan(launches, bucket, shape)
        self.device.prepare([call.program for call in calls if isinstance(call, KernelCall)])
        free = self.device.memory_bytes()[0]
        executable = self.device.capture(calls) if calls else None
        graph = CudaGraph(self, executable, len(calls), bucket, largest_step(launches))
        graph.num_bytes = max(0, free - self.device.memory_bytes()[0])  # others on the card blur it
        return graph

    def _plan(self, launches: Sequence[tuple[OpSpec, Args]], bucket: Bucket | None, shape: StepShape) -> list[Call]:
        """The calls of a recording, with grids for the largest step of the bucket."""
        calls: list[Call] = []
        capacity = shape if bucket is None else bucket_capacity(bucket, largest_step(launches))
        one_row_each = shape.num_rows == shape.num_seqs
        self._planner.sink = calls.append
        self._planner.set_shape(capacity, one_row_each=one_row_each, exact=bucket is None)
        try:
            self._planner.plan_all(launches)
        finally:
            self._planner.sink = self.device.run
            self._planner.drop()
        return calls

    def replay(self, graph: Graph, shape: StepShape) -> None:
        """Launch the graph. Raises GraphError if it is not ours, destroyed, or of another bucket."""
        self._require_no_capture("replay")
        if not isinstance(graph, CudaGraph) or graph.owner is not self:
            raise GraphError(f"{self.name} can replay its own recordings only")
        if graph.destroyed:
            raise GraphError(f"{self.name}: the recording was destroyed; capture again")
        if graph.bucket is not None and bucket_of(shape, self._planner.max_byte_rows) != graph.bucket:
            raise GraphError(f"{self.name}: a step of {shape} in a recording of bucket {graph.bucket}")
        if graph.largest is not None and not graph.largest.admits(shape):
            raise LaunchError(f"replay: {shape} is more than the recorded buffers hold ({graph.largest})")
        self._settle()
        self._tell(shape)
        graph.launch()

    # -- events

    def create_event(self, *, timed: bool = False) -> Event:
        return CudaEvent(self.device.create_event(timed=timed))

    def elapsed_s(self, start: Event, end: Event) -> float:
        return self.device.elapsed_s(_handle(start), _handle(end))

    def record_event(self, event: Event) -> None:
        self._planner.flush()
        self.device.record_event(_handle(event))

    def wait_event(self, event: Event) -> None:
        self.device.wait_event(_handle(event))

    def event_done(self, event: Event) -> bool:
        return self.device.event_done(_handle(event))

    def event_probe(self, event: Event) -> EventProbe | None:
        return self.device.event_probe(_handle(event))

    def follow(self, event: Event) -> None:
        self._planner.flush()
        self.device.follow(_handle(event))

    def close(self) -> None:
        self._planner.drop()
        self._planner.workspace.close()
        self.device.close()


def _handle(event: Event) -> object:
    if not isinstance(event, CudaEvent):
        raise TypeError("Event belongs to another backend")
    return event.handle


def _rows(buffer: Buffer, num_rows: int) -> Span:
    size = buffer.dtype.itemsize
    row_bytes = buffer.num_columns * size
    return Span(memory_of(buffer), buffer.offset * size, num_rows, row_bytes, buffer.row_stride * size)


def _rounded(values: NDArray[np.generic], dtype: DType) -> NDArray[np.generic]:
    """float32 to the 16-bit type, to nearest even; NaN stays NaN."""
    if dtype is DType.F16:
        return values.astype(np.float16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, nearest).astype(np.uint16)
