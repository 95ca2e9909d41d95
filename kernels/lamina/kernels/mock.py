"""A device that records every launch, computes nothing and holds no memory, with simulated timings (B-06).

Owns the ledger of bytes against a configurable capacity, a bounded history of launches, and the few integers that a
step uploads (positions, row starts), from which attention's cost follows. Everything downloaded is zero. Time passes
only through the injected `advance`. Used by one compute thread.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Capabilities, DeviceFacts, Event, Unsupported
from lamina.kernels.buffer import BLOCK_TOKENS, Buffer, DType, Extent, HostTensor, KvCache, StepShape, Weight
from lamina.kernels.ledger import LedgerBackend, stacked_rows
from lamina.kernels.ops import Args, OpSpec
from lamina.kernels.quant.kv_bytes import KV_DTYPES, kv_row_bytes
from lamina.spec.quant import row_bytes


@dataclass(frozen=True, slots=True)
class MockRates:
    """What the simulated device can do; an op takes launch_s + max(bytes / bytes_per_s, flops / flops_per_s)."""

    bytes_per_s: float
    flops_per_s: float
    launch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch that ran: op, step shape, rows it acted on, shape of every operand that has one, simulated cost."""

    op: str
    shape: StepShape
    num_rows: int
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    num_bytes: int
    num_flops: int


class _Storage:
    """Identity of an allocation; `uploaded` are the integers last uploaded, kept for i32 buffers only.

    They stand from `first` on, an element of the allocation.
    """

    __slots__ = ("first", "uploaded")

    def __init__(self) -> None:
        self.first = 0
        self.uploaded: NDArray[np.int32] | None = None


class MockEvent(Event):
    """A point of simulated time."""

    at_s = 0.0


def _mock_event(event: Event) -> MockEvent:
    if not isinstance(event, MockEvent):
        raise TypeError("Event belongs to another backend")
    return event


class MockBackend(LedgerBackend):
    """See the module docstring. `rates` None: no time passes; `advance` is told the seconds of each op and copy.

    `advance=time.sleep` makes the simulation take real time. `history` keeps the last `max_history` launches,
    `num_launches` counts all of them by op, `busy_s` sums the simulated seconds.
    """

    name = "mock"

    def __init__(
        self,
        *,
        total_bytes: int = 16 << 30,
        rates: MockRates | None = None,
        advance: Callable[[float], None] | None = None,
        max_history: int = 10_000,
    ) -> None:
        super().__init__()
        self.capabilities = Capabilities(
            events=True,
            batch_invariant=True,
            kv_dtypes=KV_DTYPES,
            compute_dtype="none",
            kernel="recorded only",
        )
        self.history: deque[LaunchRecord] = deque(maxlen=max_history)
        self.num_launches: Counter[str] = Counter()
        self.busy_s = 0.0
        self._total_bytes = total_bytes
        self._rates = rates
        self._advance = advance

    # -- memory

    def device_facts(self) -> DeviceFacts:
        return DeviceFacts("mock", "mock", self._total_bytes, self._total_bytes - self.ledger.used_bytes)

    def alloc(self, shape: tuple[int, ...], dtype: DType, extent: Extent = Extent.FIXED) -> Buffer:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        storage = self._take(f"a {dtype.value} buffer of {shape}", num_bytes)
        return Buffer(shape, dtype, extent, storage, shape[1] if len(shape) == 2 else 1)

    def _upload(self, buffer: Buffer, values: NDArray[np.generic]) -> None:
        if buffer.dtype is DType.I32 and isinstance(buffer.storage, _Storage):
            buffer.storage.first, buffer.storage.uploaded = buffer.offset, values.astype(np.int32).reshape(-1)
        self._spend(values.nbytes, 0)

    def _download(self, buffer: Buffer, num_rows: int) -> NDArray[np.generic]:
        return np.zeros((num_rows, *buffer.shape[1:]), buffer.dtype.host_dtype)

    def _copy(self, source: Buffer, target: Buffer, num_rows: int) -> None:
        self._spend(2 * num_rows * source.num_columns * source.dtype.itemsize, 0)

    def load_weight(self, parts: Sequence[HostTensor], bias: NDArray[np.float32] | None = None) -> Weight:
        """Counts the bytes of the blocks as stored; never reads `data`, which may be an empty view."""
        in_features, part_rows = stacked_rows(parts, bias)
        num_bytes = sum(part.rows * row_bytes(part.type, part.cols) for part in parts)
        num_bytes += 0 if bias is None else 4 * sum(part_rows)
        return Weight(in_features, part_rows, num_bytes, self._take(f"a weight of {part_rows} rows", num_bytes))

    def alloc_kv(self, num_blocks: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType) -> KvCache:
        num_bytes = num_blocks * self.kv_bytes_per_block(num_kv_heads, key_dim, value_dim, dtype)
        storage = self._take(f"a KV cache of {num_blocks} blocks", num_bytes)
        return KvCache(num_blocks, num_kv_heads, key_dim, value_dim, dtype, num_bytes, storage)

    def kv_bytes_per_block(self, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType) -> int:
        try:
            return BLOCK_TOKENS * num_kv_heads * (kv_row_bytes(dtype, key_dim) + kv_row_bytes(dtype, value_dim))
        except ValueError as error:
            raise Unsupported(f"mock KV cache: {error}") from None

    def copy_kv_block(self, cache: KvCache, source: int, target: int) -> None:
        self._require_usable("copy_kv_block", cache)
        self._spend(2 * cache.num_bytes // cache.num_blocks, 0)

    def read_kv(
        self, cache: KvCache, blocks: Sequence[int], num_tokens: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self._require_usable("read_kv", cache)
        shape = (num_tokens, cache.num_kv_heads)
        return np.zeros((*shape, cache.key_dim), np.float32), np.zeros((*shape, cache.value_dim), np.float32)

    def _take(self, what: str, num_bytes: int) -> _Storage:
        self._reserve(what, num_bytes)
        storage = _Storage()
        self.ledger.add(storage, num_bytes)
        return storage

    # -- events: points of simulated time

    def create_event(self, *, timed: bool = False) -> Event:
        return MockEvent()

    def record_event(self, event: Event) -> None:
        _mock_event(event).at_s = self.busy_s

    def elapsed_s(self, start: Event, end: Event) -> float:
        return _mock_event(end).at_s - _mock_event(start).at_s

    def wait_event(self, event: Event) -> None:
        _mock_event(event)

    def event_done(self, event: Event) -> bool:
        _mock_event(event)
        return True

    # -- op launches

    def _compute(self, op: OpSpec, args: Args, shape: StepShape, num_rows: int) -> None:
        num_bytes, num_flops = _cost(op, args, shape, num_rows)
        self.num_launches[op.name] += 1
        self.history.append(LaunchRecord(op.name, shape, num_rows, _operand_shapes(args), num_bytes, num_flops))
        self._spend(num_bytes, num_flops)

    def _spend(self, num_bytes: int, num_flops: int) -> None:
        if self._rates is None:
            return
        rates = self._rates
        seconds = rates.launch_s + max(num_bytes / rates.bytes_per_s, num_flops / rates.flops_per_s)
        self.busy_s += seconds
        if self._advance is not None:
            self._advance(seconds)


def _operand_shapes(args: Args) -> tuple[tuple[str, tuple[int, ...]], ...]:
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for name, value in args.items():
        if isinstance(value, Buffer):
            shapes.append((name, value.shape))
        elif isinstance(value, Weight):
            shapes.append((name, (value.out_features, value.in_features)))
        elif isinstance(value, KvCache):
            shapes.append((name, (value.num_blocks, value.num_kv_heads, value.key_dim, value.value_dim)))
    return tuple(shapes)


def _cost(op: OpSpec, args: Args, shape: StepShape, num_rows: int) -> tuple[int, int]:
    """Bytes moved and flops of one launch; elementwise ops are counted as bytes only."""
    columns = sum(v.num_columns for name, v in args.items() if isinstance(v, Buffer) and name in _ACTIVATIONS)
    num_bytes = 4 * num_rows * columns
    weight, cache = args.get("weight"), args.get("cache")
    if isinstance(weight, Weight) and "experts" in args:
        return _expert_cost(
            weight, _columns(args["experts"]), num_bytes, num_rows, gated=op.name == "expert_gated_linear"
        )
    if isinstance(weight, Weight):
        return num_bytes + weight.num_bytes, 2 * num_rows * weight.in_features * weight.out_features
    if op.name == "attention" and isinstance(cache, KvCache):
        keys_read, keys_seen = _context(args, shape, num_rows)
        heads = _columns(args["q"]) // cache.key_dim
        flops = 2 * keys_seen * heads * (cache.key_dim + cache.value_dim)
        return num_bytes + keys_read * cache.num_bytes // (cache.num_blocks * BLOCK_TOKENS), flops
    return num_bytes, 0


def _expert_cost(weight: Weight, selected: int, num_bytes: int, num_rows: int, *, gated: bool) -> tuple[int, int]:
    """Experts are taken to be chosen as evenly as can be: what is read are those that any row can have chosen."""
    num_experts = len(weight.part_rows) // (2 if gated else 1)
    pairs = num_rows * selected
    num_read = min(num_experts, pairs)
    flops = 2 * pairs * weight.in_features * weight.out_features // num_experts
    return num_bytes + weight.num_bytes * num_read // num_experts, flops


_ACTIVATIONS = frozenset({"x", "y", "q", "k", "v", "out"})


def _columns(value: object) -> int:
    return value.num_columns if isinstance(value, Buffer) else 0


def _context(args: Args, shape: StepShape, num_rows: int) -> tuple[int, int]:
    """Keys read from memory (once per sequence) and keys seen by all rows, from the positions last uploaded."""
    positions, starts, window = _uploaded(args["positions"]), _uploaded(args["row_starts"]), args["window"]
    if positions is None or starts is None or len(positions) < num_rows or len(starts) <= shape.num_seqs:
        return 0, 0
    seen = positions[:num_rows].astype(np.int64) + 1
    if isinstance(window, int) and window > 0:
        seen = np.minimum(seen, window)
    stops = starts[1 : shape.num_seqs + 1]
    last_rows = stops[stops > starts[: shape.num_seqs]] - 1
    return int(seen[last_rows].sum()), int(seen.sum())


def _uploaded(value: object) -> NDArray[np.int32] | None:
    if isinstance(value, Buffer) and isinstance(value.storage, _Storage):
        storage, begin = value.storage, value.offset - value.storage.first
        return None if storage.uploaded is None or begin < 0 else storage.uploaded[begin:]
    return None
