// Paged attention for sequences of more than few_queries queries per KV head (prefill), see tile.cuh.
//
// The warps of a block hold different queries of one sequence and KV head and share the pages in shared memory.
#include "tile.cuh"

constexpr int MANY_WARPS = 8, STAGE_PAGES = KEY_WIDTH + VALUE_WIDTH <= 256 ? 4 : 2;
constexpr int STAGE_BYTES = STAGE_PAGES * (KEY_PAGE_BYTES + VALUE_PAGE_BYTES);

// Pages first .. first + STAGE_PAGES - 1 (those before `end`) into shared memory.
DEVICE void fetch_stage(const Attention& p, u8* stage, const int* table, int first, int end, int head) {
#pragma unroll
    for (int i = 0; i < STAGE_PAGES; i++) {
        if (first + i >= end) break;
        const int block = table[first + i];
        const u8* keys = page_at(p.k, block, p.num_kv_heads, head, KEY_PAGE_BYTES);
        const u8* values = page_at(p.v, block, p.num_kv_heads, head, VALUE_PAGE_BYTES);
        u8* to = stage + i * (KEY_PAGE_BYTES + VALUE_PAGE_BYTES);
        for (int at = threadIdx.x * 16; at < KEY_PAGE_BYTES; at += blockDim.x * 16) copy_async(to + at, keys + at);
        for (int at = threadIdx.x * 16; at < VALUE_PAGE_BYTES; at += blockDim.x * 16)
            copy_async(to + KEY_PAGE_BYTES + at, values + at);
    }
}

// IS_WHOLE: all pages of the stage are there, and every query sees all of their keys.
template <bool IS_WHOLE>
DEVICE void add_stage(const Attention& p, Tile& tile, const u8* stage, int first_page, int num_pages, int last_key,
                      int lane) {
    float s[STAGE_PAGES][2][4], candidate[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
    for (int i = 0; i < STAGE_PAGES; i++) {
        if (!IS_WHOLE && i >= num_pages) break;
        const u8* keys = stage + i * (KEY_PAGE_BYTES + VALUE_PAGE_BYTES);
        tile.score([&](int c, int j) {
            Fragment<KV_TYPE> fragment;
            fragment.load_key(keys, c, j, lane);
            return fragment.get();
        }, s[i]);
        Tile::cap(p, s[i]);
        if (!IS_WHOLE) tile.mask(p, (first_page + i) * PAGE_TOKENS, lane, s[i]);
        Tile::largest(s[i], candidate);
    }
    tile.raise(candidate);
#pragma unroll
    for (int i = 0; i < STAGE_PAGES; i++) {
        if (!IS_WHOLE && i >= num_pages) break;
        const u8* values = stage + i * (KEY_PAGE_BYTES + VALUE_PAGE_BYTES) + KEY_PAGE_BYTES;
        tile.accumulate<IS_WHOLE>([&](int c) {
            Fragment<KV_TYPE> fragment;
            fragment.load_value(values, c, lane);
            return fragment.get();
        }, s[i], last_key - (first_page + i) * PAGE_TOKENS, lane);
    }
}

DEVICE void write_tile(const Attention& p, Tile& tile, int first_row, int first_query, int queries, int head, int lane,
                       const Activations& to) {
    const int g = lane / 4, t = lane % 4;
    tile.sum_totals();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int m = first_query + g + 8 * h;
        if (m >= queries) continue;
        const int row = first_row + m / p.group, query_head = head * p.group + m % p.group;
        float total = tile.total[h], kept = 1.f;
        if (p.sinks) {
            const float sink = p.sinks[query_head] * LOG2_E, overall = fmaxf(tile.highest[h], sink);
            kept = merge_factor(tile.highest[h], overall);
            total = total * kept + fast_exp2(sink - overall);
        }
        const float factor = total > 0.f ? kept / total : 0.f;
#pragma unroll
        for (int i = 0; i < VALUE_TILES; i++) {
            const float low = tile.o[i][2 * h] * factor, high = tile.o[i][2 * h + 1] * factor;
            const int column = query_head * VALUE_DIM + 8 * i + 2 * t;
            float* at = p.out + static_cast<size_t>(row) * p.out_stride + column;
            const int left = VALUE_DIM - 8 * i - 2 * t;
            if (VALUE_DIM == VALUE_WIDTH || left > 0) at[0] = low;
            if (VALUE_DIM == VALUE_WIDTH || left > 1) at[1] = high;
            if (to.kind >= BF16S)
                *reinterpret_cast<u32*>(to.halves + static_cast<size_t>(row) * to.columns + column) =
                    to.kind == BF16S ? pack_bf16s(low, high) : pack_halves(low, high);
        }
    }
}

// Grid (tiles of 16 * MANY_WARPS queries of all sequences, KV heads); blocks beyond the last tile do nothing.
KERNEL __launch_bounds__(32 * MANY_WARPS, 1)
attend_many(const Attention p, const Activations to) {
#if HAS_HALF_MMA
    DYNAMIC_SHARED(memory);
    grid_release_dependents();
    constexpr int TILE_QUERIES = 16 * MANY_WARPS;
    const int head = blockIdx.y, num_seqs = *p.num_seqs;
    int index = blockIdx.x, seq = 0, first_row = 0, queries = 0;
    for (;; seq++) {
        if (seq >= num_seqs) {
            grid_wait();
            return;
        }
        first_row = p.row_starts[seq];
        queries = (p.row_starts[seq + 1] - first_row) * p.group;
        const int tiles = queries > p.few_queries ? ceil_div(queries, TILE_QUERIES) : 0;
        if (index < tiles) {
            index = tiles - 1 - index;  // the last rows see the most keys: start with them
            break;
        }
        index -= tiles;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int block_query = index * TILE_QUERIES, first_query = block_query + 16 * warp;
    const int last_query = min(block_query + TILE_QUERIES, queries) - 1;
    const int* table = p.block_table + static_cast<size_t>(seq) * p.table_stride;
    const int begin = first_visible(p, p.positions[first_row + block_query / p.group]) / PAGE_TOKENS;
    const int last_key = p.positions[first_row + last_query / p.group], end = last_key / PAGE_TOKENS + 1;
    // pages that some query of this warp sees
    const int warp_begin = first_query < queries
        ? first_visible(p, p.positions[first_row + first_query / p.group]) / PAGE_TOKENS : end;
    const int warp_end = first_query < queries
        ? p.positions[first_row + min(first_query + 15, queries - 1) / p.group] / PAGE_TOKENS + 1 : begin;
    Tile tile;
    tile.start(p, first_row, first_query, queries, lane);
    grid_wait();
    fetch_stage(p, memory, table, begin, end, head);
    copy_async_commit();
    // each warp's own queries, where the second stage will be and beyond
    Queries& mine = reinterpret_cast<Queries*>(memory + STAGE_BYTES)[warp];
    mine.load<4>(p, first_row, first_query, max(0, min(16, queries - first_query)), head, lane, 32);
    __syncthreads();
    tile.load(mine, lane);
    __syncthreads();
    int parity = 0;
    for (int page = begin; page < end; page += STAGE_PAGES, parity ^= 1) {
        fetch_stage(p, memory + (parity ^ 1) * STAGE_BYTES, table, page + STAGE_PAGES, end, head);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const u8* stage = memory + parity * STAGE_BYTES;
        if (page + STAGE_PAGES <= warp_begin || page >= warp_end) {
            // no query of this warp sees it
        } else if (tile.sees_all(p, page * PAGE_TOKENS, STAGE_PAGES)) {
            add_stage<true>(p, tile, stage, page, STAGE_PAGES, last_key, lane);
        } else {
            add_stage<false>(p, tile, stage, page, min(STAGE_PAGES, end - page), last_key, lane);
        }
        __syncthreads();
    }
    if (first_query < queries) write_tile(p, tile, first_row, first_query, queries, head, lane, to);
#endif
}
