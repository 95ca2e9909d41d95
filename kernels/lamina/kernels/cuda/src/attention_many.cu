// Paged attention for sequences of more than few_queries queries per KV head (prefill), see tile.cuh.
//
// The warps of a block hold different queries of one sequence and KV head and share the pages in shared memory.
#include "query_block.cuh"
#include "tile.cuh"

// By size of the heads (see `many_shape` in attention_plan.py): tiles of 16 queries of a warp, which all use a fragment of
// keys or values that it has read, warps of a block, pages that are brought in at a time, blocks of a multiprocessor.
constexpr int WIDTH = KEY_WIDTH > VALUE_WIDTH ? KEY_WIDTH : VALUE_WIDTH;
constexpr int WARP_TILES = WIDTH <= 64 ? 2 : 1, MANY_WARPS = WIDTH <= 128 ? 4 : 8;
constexpr int STAGE_PAGES = WIDTH <= 64 ? 4 : 2, MIN_BLOCKS = WIDTH <= 64 ? 2 : WIDTH <= 128 ? 3 : 1;
constexpr int WARP_QUERIES = 16 * WARP_TILES, BLOCK_QUERIES = MANY_WARPS * WARP_QUERIES;
constexpr int STAGE_BYTES = STAGE_PAGES * (KEY_PAGE_BYTES + VALUE_PAGE_BYTES);

// This thread's share of a page into shared memory.
template <int NUM_BYTES>
DEVICE void fetch(u8* to, const u8* from) {
    constexpr int STEP = 16 * 32 * MANY_WARPS;
    const int first = threadIdx.x * 16;
#pragma unroll
    for (int at = 0; at < NUM_BYTES; at += STEP)
        if (at + STEP <= NUM_BYTES || first < NUM_BYTES - at) copy_async(to + first + at, from + first + at);
}

// Pages first .. first + STAGE_PAGES - 1 (those before `end`) into shared memory.
DEVICE void fetch_stage(const Attention& p, u8* stage, const int* table, int first, int end, int head) {
#pragma unroll
    for (int i = 0; i < STAGE_PAGES; i++) {
        if (first + i >= end) break;
        const int block = table[first + i];
        u8* to = stage + i * (KEY_PAGE_BYTES + VALUE_PAGE_BYTES);
        fetch<KEY_PAGE_BYTES>(to, page_at(p.k, block, p.num_kv_heads, head, KEY_PAGE_BYTES));
        fetch<VALUE_PAGE_BYTES>(to + KEY_PAGE_BYTES, page_at(p.v, block, p.num_kv_heads, head, VALUE_PAGE_BYTES));
    }
}

// Adds the pages of a stage, of which the first is page first_page of the sequence.
// IS_WHOLE: all of them are there, and every query sees all of their keys.
template <bool IS_WHOLE>
DEVICE void add_stage(const Attention& p, const QueryChunk (&chunks)[WARP_TILES][KEY_CHUNKS],
                      Tile (&tiles)[WARP_TILES], const u8* stage, int first_page, int last_key, int lane) {
    float s[WARP_TILES][STAGE_PAGES][2][4] = {};
#pragma unroll
    for (int c = 0; c < KEY_CHUNKS; c++) {
#pragma unroll
        for (int i = 0; i < STAGE_PAGES; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                Fragment<KV_TYPE> fragment;
                fragment.load_key(stage + i * (KEY_PAGE_BYTES + VALUE_PAGE_BYTES), c, j, lane);
                const uint4 numbers = fragment.get();
#pragma unroll
                for (int m = 0; m < WARP_TILES; m++) chunks[m][c].multiply(numbers, s[m][i][j]);
            }
        }
    }
    u32 weights[WARP_TILES][STAGE_PAGES][4];
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++) {
        float candidate[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
        for (int i = 0; i < STAGE_PAGES; i++) {
            Tile::cap(p, s[m][i]);
            if (!IS_WHOLE) tiles[m].mask(p, (first_page + i) * PAGE_TOKENS, lane, s[m][i]);
            Tile::largest(s[m][i], candidate);
        }
        tiles[m].raise(candidate);
#pragma unroll
        for (int i = 0; i < STAGE_PAGES; i++) tiles[m].template weigh<IS_WHOLE>(s[m][i], weights[m][i]);
    }
#pragma unroll
    for (int i = 0; i < STAGE_PAGES; i++) {
        const u8* values = stage + i * (KEY_PAGE_BYTES + VALUE_PAGE_BYTES) + KEY_PAGE_BYTES;
        const Written written(last_key - (first_page + i) * PAGE_TOKENS, lane);
#pragma unroll
        for (int c = 0; c < VALUE_TILES / 2; c++) {
            Fragment<KV_TYPE> fragment;
            fragment.load_value(values, c, lane);
            const uint4 numbers = IS_WHOLE ? fragment.get() : written.of(fragment.get());
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++) tiles[m].add_values(c, weights[m][i], numbers);
        }
    }
}

DEVICE void write_tile(const Attention& p, const Tile& tile, const QueryBlock& block, int first_query, int lane,
                       const Activations& to) {
    const int m = first_query + lane / 4;
    if (m < block.queries) write_query<0>(p, block, m, tile.highest[0], tile.total[0], tile.o, lane, to);
    if (m + 8 < block.queries) write_query<1>(p, block, m + 8, tile.highest[1], tile.total[2], tile.o, lane, to);
}

// Grid (tiles of BLOCK_QUERIES queries of all sequences, KV heads); blocks beyond the last tile do nothing.
KERNEL __launch_bounds__(32 * MANY_WARPS, MIN_BLOCKS)
attend_many(const Attention p, const Activations to) {
#if HAS_HALF_MMA
    DYNAMIC_SHARED(memory);
    grid_release_dependents();
    QueryBlock block;
    if (!block.find(p, blockIdx.y, blockIdx.x, BLOCK_QUERIES)) {
        grid_wait();
        return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_query = block.first_query + WARP_QUERIES * warp;
    const int first_row = block.first_row, queries = block.queries, head = block.head, last_key = block.last_key;
    const int begin = block.first_page, end = block.end_page;
    const int* table = block.table(p);
    Tile tiles[WARP_TILES];
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++) tiles[m].start(p, first_row, first_query + 16 * m, queries, lane);
    // pages that some query of this warp sees
    const bool has_queries = first_query < queries;
    const int warp_begin = has_queries ? first_visible(p, tiles[0].first_position) / PAGE_TOKENS : end;
    const int warp_end = has_queries ? tiles[WARP_TILES - 1].last_position / PAGE_TOKENS + 1 : begin;
    grid_wait();
    fetch_stage(p, memory, table, begin, end, head);
    copy_async_commit();
    // each warp's own queries, where the second stage will be and beyond
    Queries<WARP_QUERIES>& mine = reinterpret_cast<Queries<WARP_QUERIES>*>(memory + STAGE_BYTES)[warp];
    mine.template load<4>(p, first_row, first_query, max(0, min(WARP_QUERIES, queries - first_query)), head, lane, 32);
    __syncwarp();
    QueryChunk chunks[WARP_TILES][KEY_CHUNKS];
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++) {
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; c++) chunks[m][c].load(mine, 16 * m, c, lane);
    }
    __syncthreads();
    int parity = 0;
    for (int page = begin; page < end; page += STAGE_PAGES, parity ^= 1) {
        fetch_stage(p, memory + (parity ^ 1) * STAGE_BYTES, table, page + STAGE_PAGES, end, head);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const u8* stage = memory + parity * STAGE_BYTES;
        // whole: every query of the warp sees all keys of all pages, the tiles being in the order of their positions
        const bool is_near = tiles[WARP_TILES - 1].is_near(p, page * PAGE_TOKENS);
        if (page + STAGE_PAGES <= warp_begin || page >= warp_end) {
            // no query of this warp sees it
        } else if (is_near && tiles[0].is_after(page * PAGE_TOKENS, STAGE_PAGES)) {
            add_stage<true>(p, chunks, tiles, stage, page, last_key, lane);
        } else {
            add_stage<false>(p, chunks, tiles, stage, page, last_key, lane);
        }
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++) {
        const int first = first_query + 16 * m;
        write_tile(p, tiles[m], block, first, lane, to);
    }
#endif
}
