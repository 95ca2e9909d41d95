"""Attention as calls: which kernel serves which sequences, and over how many blocks the keys are split.

Caches of 16 or 8 bits and heads of up to 256 values on cards with 16-bit tensor cores: one kernel for sequences with
few queries per KV head (decode), one for the others (prefill), on Hopper another for its usual caches; a step may need
both. Everything else: the plain kernel.
"""

from dataclasses import dataclass

from lamina.kernels.buffer import Buffer, DType, KvCache
from lamina.kernels.cuda.kv_pages import KV_TYPES, key_page_bytes, key_width, pages_of, value_page_bytes, value_width
from lamina.kernels.cuda.planner import NO_TARGET, Planner, Rows, address_of, ceil_div
from lamina.kernels.cuda.policy import HALF_MMA, HOPPER
from lamina.kernels.cuda.programs import program
from lamina.kernels.cuda.workspace import MAX_SPLITS, max_attention_parts

TILE_QUERIES = 16
STAGES = 2  # as in attention_many.cu and attention_wgmma.cu
WGMMA_DIMS = (64, 128)
WGMMA_QUERIES, WGMMA_THREADS, WGMMA_PAGES = 128, 384, 8  # of a block, and what it brings in at a time
WGMMA_ALIGNMENT, WGMMA_BARRIER_BYTES = 1024, 32
PLAIN_WARPS = 4
LARGEST_TILE_DIM = 256  # beyond, a warp's registers do not hold its queries and outputs
_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """The op's arguments."""

    q: Buffer
    cache: KvCache
    positions: Buffer
    row_starts: Buffer
    block_table: Buffer
    out: Buffer
    scale: float
    window: int
    softcap: float
    sinks: Buffer | None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.num_columns // self.cache.key_dim // self.cache.num_kv_heads


def plan_attention(planner: Planner, args: AttentionArgs) -> None:
    """See the module docstring."""
    rows = planner.rows_of(args.out)
    planner.wrote(args.out)
    largest = max(args.cache.key_dim, args.cache.value_dim)
    has_tiles = planner.device.compute_capability >= HALF_MMA and largest <= LARGEST_TILE_DIM
    if args.cache.dtype is DType.F32 or not has_tiles:
        _plan_plain(planner, args, rows)
        return
    shape, group = planner.shape, args.group
    few_queries = ceil_div(group, TILE_QUERIES) * TILE_QUERIES
    has_many = not planner.one_row_each and rows.capacity * group > few_queries
    has_few = not has_many or shape.num_seqs > 1
    whole_blocks = args.cache.value_dim % 32 == 0
    target = planner.offer(args.out, rows, halves_only=has_many) if whole_blocks else NO_TARGET
    if has_few:
        _plan_few(planner, args, few_queries, few_queries if has_many else _ALL, target)
    if has_many:
        _plan_many(planner, args, rows, few_queries if has_few else 0, target)


def few_warps(value_dim: int) -> int:
    """Warps of an `attend_few` block: as many as have room for their partial results in shared memory."""
    return 8 if value_width(value_dim) <= 128 else 4


def many_shape(cache: KvCache) -> tuple[int, int, int]:
    """Of an `attend_many` block: its queries, its warps, the pages that it brings in at a time.

    The larger the heads, the fewer queries a warp's registers hold, and the fewer pages a block's shared memory.
    """
    width = max(key_width(cache.key_dim), value_width(cache.value_dim))
    if width <= 64:
        return 128, 4, 4
    return (64, 4, 2) if width <= 128 else (128, 8, 2)


def serves_wgmma(cache: KvCache) -> bool:
    """Whether `attend_wgmma` has code for a cache."""
    return cache.dtype in (DType.F16, DType.BF16) and cache.key_dim == cache.value_dim and cache.key_dim in WGMMA_DIMS


def choose_splits(num_units: int, num_multiprocessors: int) -> int:
    """Blocks that share the keys of one (sequence, KV head, tile), so that long contexts fill the card at any batch."""
    room = max_attention_parts(num_multiprocessors) // num_units
    return max(1, min(MAX_SPLITS, room, num_multiprocessors // num_units))


def _problem(
    planner: Planner, args: AttentionArgs, num_splits: int, few_queries: int, partial: int, tickets: int
) -> tuple[int | float, ...]:
    """The Attention struct of attention.cuh."""
    pages, sinks = pages_of(args.cache), args.sinks
    return (
        address_of(args.q),
        pages.k_address,
        pages.v_address,
        address_of(args.positions),
        address_of(args.row_starts),
        address_of(args.block_table),
        planner.counts_address() + 4,
        0 if sinks is None else address_of(sinks),
        address_of(args.out),
        partial,
        tickets,
        args.q.row_stride,
        args.out.row_stride,
        args.block_table.row_stride,
        args.cache.num_kv_heads,
        args.group,
        args.window,
        num_splits,
        few_queries,
        args.scale,
        args.softcap,
    )


def _defines(cache: KvCache) -> dict[str, str | int]:
    return {"KV_TYPE": KV_TYPES[cache.dtype], "KEY_DIM": cache.key_dim, "VALUE_DIM": cache.value_dim}


def _plan_few(
    planner: Planner, args: AttentionArgs, queries_of_row: int, most_queries: int, target: tuple[int, ...]
) -> None:
    tiles = args.cache.num_kv_heads * queries_of_row // TILE_QUERIES
    units = tiles * planner.shape.num_seqs
    splits = choose_splits(units, planner.device.num_multiprocessors)
    part_bytes = 4 * (TILE_QUERIES * value_width(args.cache.value_dim) + 2 * TILE_QUERIES)
    partial = tickets = 0
    if splits > 1:
        partial = planner.workspace.region("partial", units * splits * part_bytes).address
        tickets = planner.workspace.region(
            "tickets", 4 * max_attention_parts(planner.device.num_multiprocessors)
        ).address
    entry = program("attention_few.cu", "attend_few", **_defines(args.cache))
    problem = _problem(planner, args, splits, most_queries, partial, tickets)
    # the kernel reads the limits of every sequence of the grid before it knows how many there are
    grid = (splits, tiles, min(planner.shape.num_seqs, args.row_starts.shape[0] - 1))
    warps = few_warps(args.cache.value_dim)
    planner.call(entry, grid, 32 * warps, *problem, *target, shared_bytes=(warps + 1) * part_bytes)


def _plan_many(planner: Planner, args: AttentionArgs, rows: Rows, few_queries: int, target: tuple[int, ...]) -> None:
    cache = args.cache
    if planner.device.compute_capability == HOPPER and serves_wgmma(cache):
        _plan_wgmma(planner, args, rows, few_queries, target)
        return
    queries, warps, pages = many_shape(cache)
    blocks = ceil_div(rows.capacity * args.group, queries) + planner.shape.num_seqs - 1
    stage_bytes = pages * (key_page_bytes(cache.dtype, cache.key_dim) + value_page_bytes(cache.dtype, cache.value_dim))
    # the queries pass through where the second stage will be, and beyond
    shared_bytes = stage_bytes + max((STAGES - 1) * stage_bytes, queries * 2 * key_width(cache.key_dim))
    entry = program("attention_many.cu", "attend_many", **_defines(cache))
    problem = _problem(planner, args, 1, few_queries, 0, 0)
    grid = (blocks, cache.num_kv_heads, 1)
    planner.call(entry, grid, 32 * warps, *problem, *target, shared_bytes=shared_bytes)


def _plan_wgmma(planner: Planner, args: AttentionArgs, rows: Rows, few_queries: int, target: tuple[int, ...]) -> None:
    cache = args.cache
    blocks = ceil_div(rows.capacity * args.group, WGMMA_QUERIES) + planner.shape.num_seqs - 1
    grid = (min(blocks * cache.num_kv_heads, planner.device.num_multiprocessors), 1, 1)
    page_bytes = key_page_bytes(cache.dtype, cache.key_dim) + value_page_bytes(cache.dtype, cache.value_dim)
    shared_bytes = WGMMA_ALIGNMENT + STAGES * (WGMMA_PAGES * page_bytes + WGMMA_BARRIER_BYTES)
    entry = program("attention_wgmma.cu", "attend_wgmma", **_defines(cache))
    problem = _problem(planner, args, 1, few_queries, 0, 0)
    planner.call(entry, grid, WGMMA_THREADS, *problem, *target, shared_bytes=shared_bytes)


def _plan_plain(planner: Planner, args: AttentionArgs, rows: Rows) -> None:
    cache = args.cache
    grid = (rows.capacity, args.q.num_columns // cache.key_dim, 1)
    problem = _problem(planner, args, 1, 0, 0, 0)
    sizes = (KV_TYPES[cache.dtype], cache.key_dim, cache.value_dim, rows.count_address)
    most = ceil_div(max(cache.key_dim, cache.value_dim), LARGEST_TILE_DIM) * LARGEST_TILE_DIM
    planner.call(program("attention_plain.cu", "attend_plain", MAX_DIM=most), grid, 32 * PLAIN_WARPS, *problem, *sizes)
