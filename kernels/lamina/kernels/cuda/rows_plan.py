"""Norms, rotations, cache writes and the small row ops as calls.

Rotations wait: one or two of them and the cache write that follows become one launch (`RotationQueue`).
"""

from dataclasses import dataclass

from lamina.kernels.buffer import Buffer, DType, KvCache
from lamina.kernels.cuda.kv_pages import KV_TYPES, pages_of
from lamina.kernels.cuda.planner import BLOCK, Planner, address_of, ceil_div, memory_of
from lamina.kernels.cuda.programs import program
from lamina.kernels.ops import LaunchError
from lamina.kernels.quant.kv_bytes import Q8_BLOCK_VALUES

MAX_VOCABULARY = 1 << 20  # COLUMN_BITS of sample.cu
_NO_HEADS = (0, 0, 0)
_NO_ROTATION = (0, 0, 0, 0, 0.0)
_NO_CACHE = (0, 0, 0, 0, 0, 0)


def plan_rms_norm(planner: Planner, x: Buffer, weight: Buffer, out: Buffer, eps: float) -> None:
    """Whole rows hand their result to the linear that comes next; groups (per-head norms) do not."""
    rows, columns, group = planner.rows_of(out), x.num_columns, weight.shape[0]
    planner.wrote(out)
    common = (address_of(x), x.row_stride, address_of(weight), address_of(out), out.row_stride, columns)
    if group == columns:
        threads = min(1024, ceil_div(columns, 128) * 32)
        target = planner.offer(out, rows)
        entry = program("rows.cu", "rms_norm")
        planner.call(entry, (rows.capacity, 1, 1), threads, *common, eps, rows.count_address, *target)
    else:
        entry = program("rows.cu", "rms_norm_groups")
        grid = (ceil_div(columns // group, BLOCK // 32), rows.capacity, 1)
        planner.call(entry, grid, BLOCK, *common, group, eps, rows.count_address)


@dataclass(frozen=True, slots=True)
class _Rotation:
    x: Buffer
    positions: Buffer
    inv_freq: Buffer
    head_dim: int
    layout: str
    magnitude: float

    def goes_with(self, other: "_Rotation") -> bool:
        """Whether one launch can do both."""
        mine = (self.head_dim, self.layout, self.magnitude, self.x.extent)
        theirs = (other.head_dim, other.layout, other.magnitude, other.x.extent)
        apart = not _same_view(self.x, other.x)
        tables = _same_view(self.positions, other.positions) and _same_view(self.inv_freq, other.inv_freq)
        return mine == theirs and tables and apart

    def heads(self) -> tuple[int, int, int]:
        return (address_of(self.x), self.x.row_stride, self.x.num_columns // self.head_dim)

    def ends_with(self, k: Buffer) -> bool:
        """Whether the last of these columns are k."""
        x = self.x
        same_rows = memory_of(x) is memory_of(k) and x.row_stride == k.row_stride
        return same_rows and x.offset <= k.offset and x.offset + x.num_columns == k.offset + k.num_columns

    def heads_before(self, k: Buffer) -> tuple[int, int, int]:
        """Those in front of a k that the columns end with."""
        return (address_of(self.x), self.x.row_stride, (self.x.num_columns - k.num_columns) // self.head_dim)

    def args(self) -> tuple[int | float, ...]:
        pairs = self.inv_freq.shape[0]
        neox = int(self.layout == "neox")
        return (address_of(self.positions), address_of(self.inv_freq), pairs, neox, self.magnitude)


class RotationQueue:
    """At most two rotations that have not been launched yet."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._waiting: list[_Rotation] = []

    def rotate(
        self, x: Buffer, positions: Buffer, inv_freq: Buffer, head_dim: int, layout: str, magnitude: float
    ) -> None:
        """Rotate x, now or together with what follows."""
        rotation = _Rotation(x, positions, inv_freq, head_dim, layout, magnitude)
        if len(self._waiting) == 2 or (self._waiting and not self._waiting[0].goes_with(rotation)):
            self.flush()
        self._waiting.append(rotation)

    def store(self, k: Buffer, v: Buffer, slots: Buffer, cache: KvCache) -> None:
        """Write k and v, together with the rotations that wait if k is one of them or the end of the only one."""
        pages = pages_of(cache)
        store = (address_of(slots), pages.k_address, pages.v_address, cache.num_kv_heads, cache.value_dim)
        args = (*store, KV_TYPES[cache.dtype])
        if cache.dtype is DType.Q8_0:
            self.flush()
            self._store_blocks(k, v, cache, args)
            return
        heads = (address_of(k), k.row_stride, cache.num_kv_heads)
        turned = next((r for r in self._waiting if r.ends_with(k) and r.head_dim == cache.key_dim), None)
        others = [r for r in self._waiting if r is not turned]
        if turned is None or (others and turned.x.num_columns > k.num_columns):
            self.flush()
            self._launch(k, _NO_HEADS, heads, _v_heads(v, cache), _NO_ROTATION, args, cache.key_dim)
            return
        self._waiting.clear()
        q = others[0].heads() if others else turned.heads_before(k)
        self._launch(k, q, heads, _v_heads(v, cache), turned.args(), args, cache.key_dim)

    def _store_blocks(self, k: Buffer, v: Buffer, cache: KvCache, args: tuple[int, ...]) -> None:
        """A scale concerns 32 values, so rotating and storing are two launches."""
        rows = self._planner.rows_of(k)
        k_heads = (address_of(k), k.row_stride, cache.num_kv_heads)
        blocks = cache.num_kv_heads * (cache.key_dim + cache.value_dim) // Q8_BLOCK_VALUES
        grid = (rows.capacity, ceil_div(blocks, BLOCK // 32), 1)
        entry = program("rows.cu", "store_q8")
        self._planner.call(entry, grid, BLOCK, *k_heads, *_v_heads(v, cache), *args, cache.key_dim, rows.count_address)

    def flush(self) -> None:
        """Launch what waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            heads = [rotation.heads() for rotation in waiting] + [_NO_HEADS]
            self._launch(waiting[0].x, heads[0], heads[1], _NO_HEADS, waiting[0].args(), _NO_CACHE, waiting[0].head_dim)

    def drop(self) -> None:
        """Forget what waits (a capture failed)."""
        self._waiting.clear()

    def _launch(
        self,
        rows_like: Buffer,
        q: tuple[int, ...],
        k: tuple[int, ...],
        v: tuple[int, ...],
        rotation: tuple[int | float, ...],
        cache: tuple[int, ...],
        head_dim: int,
    ) -> None:
        rows = self._planner.rows_of(rows_like)
        value_dim = cache[4]
        num_threads = (q[2] + k[2]) * ceil_div(head_dim, 2) + v[2] * int(value_dim)
        self._planner.forget()  # q and k are rarely the input of a linear
        entry = program("rows.cu", "rope_and_store")
        args = (*q, *k, *v, *rotation, *cache, head_dim, rows.count_address)
        self._planner.call(entry, (rows.capacity, ceil_div(num_threads, BLOCK), 1), BLOCK, *args)


def _v_heads(v: Buffer, cache: KvCache) -> tuple[int, int, int]:
    return (address_of(v), v.row_stride, cache.num_kv_heads)


def _same_view(a: Buffer, b: Buffer) -> bool:
    return memory_of(a) is memory_of(b) and (a.offset, a.shape, a.row_stride) == (b.offset, b.shape, b.row_stride)


def _by_columns(planner: Planner, function: str, out: Buffer, *args: int | float) -> None:
    """A kernel with one thread per element of `out`."""
    rows = planner.rows_of(out)
    grid = (ceil_div(out.num_columns, BLOCK), rows.capacity, 1)
    planner.call(program("rows.cu", function), grid, BLOCK, *args, rows.count_address)
    planner.wrote(out)


def plan_add(planner: Planner, x: Buffer, y: Buffer, out: Buffer) -> None:
    operands = (address_of(x), x.row_stride, address_of(y), y.row_stride, address_of(out), out.row_stride)
    _by_columns(planner, "add", out, *operands, out.num_columns)


def plan_softcap(planner: Planner, x: Buffer, cap: float) -> None:
    _by_columns(planner, "softcap", x, address_of(x), x.row_stride, x.num_columns, cap)


def plan_gather_rows(planner: Planner, x: Buffer, indices: Buffer, out: Buffer) -> None:
    operands = (address_of(x), x.row_stride, address_of(indices), address_of(out), out.row_stride)
    _by_columns(planner, "gather_rows", out, *operands, out.num_columns)


def plan_argmax(planner: Planner, x: Buffer, out: Buffer) -> None:
    """Several blocks a row; the last one decides."""
    rows = planner.rows_of(out)
    if out.dtype is not DType.I32:
        raise LaunchError(f"argmax: out must be i32, not {out.dtype.value}")
    maxima = planner.workspace.region("maxima", 16 * rows.capacity).address
    wanted = ceil_div(2 * planner.device.num_multiprocessors, rows.capacity)
    blocks = max(1, min(wanted, x.num_columns // (8 * BLOCK)))
    args = (address_of(x), x.row_stride, x.num_columns, address_of(out), out.row_stride, maxima, rows.count_address)
    planner.call(program("rows.cu", "argmax"), (blocks, rows.capacity, 1), BLOCK, *args)
    planner.wrote(out)


def plan_sample(planner: Planner, x: Buffer, params: Buffer, out: Buffer) -> None:
    """One block a row; a row that is not drawn from leaves at once."""
    rows = planner.rows_of(out)
    if x.num_columns > MAX_VOCABULARY:
        raise LaunchError(f"sample: {x.num_columns} columns, at most {MAX_VOCABULARY} fit into a key")
    args = (address_of(x), x.row_stride, x.num_columns, address_of(params), params.row_stride)
    target = (address_of(out), out.row_stride, rows.count_address)
    planner.call(program("sample.cu", "sample"), (rows.capacity, 1, 1), 1024, *args, *target)
    planner.wrote(out)
