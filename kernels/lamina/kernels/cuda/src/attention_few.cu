// Paged attention for sequences of at most few_queries queries per KV head (decode), see tile.cuh.
//
// The keys are split over blocks and over the warps of a block; the last block of a sequence and head merges them.
#include "tile.cuh"

#ifndef FEW_WARPS
#define FEW_WARPS (VALUE_DIM <= 128 ? 8 : 4)
#endif

constexpr int MAX_PARTS = 32;
// Below this many pages a warp the keys stay with one block: merging through memory costs several pages' time.
constexpr int UNSPLIT_PAGES = 3;

// Unnormalised outputs of 16 queries over some of the keys, with the largest score and the sum of weights.
struct Partial {
    float o[16][VALUE_WIDTH];
    float highest[16], total[16];
};

// Fragments of a page: in registers ahead of their use, or, of large heads, in memory until then.
constexpr bool HELD = KEY_WIDTH + VALUE_WIDTH <= 256;

struct Keys {
    const u8* page;
    Fragment<KV_TYPE> held[HELD ? 2 * KEY_CHUNKS : 1];

    DEVICE void load(const Attention& p, int block, int head, int lane) {
        page = page_at(p.k, block, p.num_kv_heads, head, KEY_PAGE_BYTES);
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < 2 * KEY_CHUNKS; i++) held[i].load_key(page, i / 2, i % 2, lane);
        }
    }
    DEVICE uint4 fragment(int c, int j, int lane) const {
        if constexpr (HELD) return held[2 * c + j].get();
        Fragment<KV_TYPE> fragment;
        fragment.load_key(page, c, j, lane);
        return fragment.get();
    }
};

struct Values {
    const u8* page;
    Fragment<KV_TYPE> held[HELD ? VALUE_TILES / 2 : 1];

    DEVICE void load(const Attention& p, int block, int head, int lane) {
        page = page_at(p.v, block, p.num_kv_heads, head, VALUE_PAGE_BYTES);
        if constexpr (HELD) {
#pragma unroll
            for (int c = 0; c < VALUE_TILES / 2; c++) held[c].load_value(page, c, lane);
        }
    }
    DEVICE uint4 fragment(int c, int lane) const {
        if constexpr (HELD) return held[c].get();
        Fragment<KV_TYPE> fragment;
        fragment.load_value(page, c, lane);
        return fragment.get();
    }
};

DEVICE void store_tile(const Tile& tile, Partial& to, int lane, int queries) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int m = g + 8 * h;
        if (m >= queries) continue;
        if (t == 0) {
            to.highest[m] = tile.highest[h];
            to.total[m] = tile.total[2 * h];
        }
#pragma unroll
        for (int i = 0; i < VALUE_TILES; i++)
            *reinterpret_cast<float2*>(&to.o[m][8 * i + 2 * t]) = make_float2(tile.o[i][2 * h], tile.o[i][2 * h + 1]);
    }
}

DEVICE void add_scaled(float4& to, const float4& x, float factor) {
    to.x += x.x * factor;
    to.y += x.y * factor;
    to.z += x.z * factor;
    to.w += x.w * factor;
}

DEVICE const float4& quad_of(const Partial& part, int at) { return reinterpret_cast<const float4*>(part.o)[at]; }

// How much each of up to 32 partials counts in their sum, [part][query]; the sum's highest and total. A warp a query.
DEVICE void weigh_partials(const Partial* parts, int count, int queries, float (*factors)[16], Partial& sum) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int m = threadIdx.x / 32; m < queries; m += FEW_WARPS) {
        const bool real = lane < count;
        const float highest = real ? parts[lane].highest[m] : NEGATIVE_INFINITY;
        const float total = real ? parts[lane].total[m] : 0.f, overall = warp_max(highest);
        const float factor = merge_factor(highest, overall), all = warp_sum(total * factor);
        factors[lane][m] = factor;
        if (lane == 0) {
            sum.highest[m] = overall;
            sum.total[m] = all;
        }
    }
}

// Adds up `count` partials in memory into `sum`, which is shared; loads go out in batches, as memory is far away.
DEVICE void merge_partials(const Partial* parts, int count, int queries, Partial& sum, float (*factors)[16]) {
    constexpr int QUADS = VALUE_WIDTH / 4, BATCH = 16;
    weigh_partials(parts, count, queries, factors, sum);
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < queries * QUADS; at += blockDim.x) {
        float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int first = 0; first < count; first += BATCH) {
            float4 batch[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                batch[i] = first + i < count ? quad_of(parts[first + i], at) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int i = 0; i < BATCH; i++) add_scaled(value, batch[i], factors[first + i][at / QUADS]);
        }
        reinterpret_cast<float4*>(sum.o)[at] = value;
    }
    __syncthreads();
}

// Adds up the tiles of the block's first warps, in shared memory, into `to` (shared or global).
DEVICE void merge_warps(const Partial* scratch, int busy_warps, int queries, Partial& to, float (*factors)[16]) {
    constexpr int QUADS = VALUE_WIDTH / 4;
    weigh_partials(scratch, busy_warps, queries, factors, to);
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < queries * QUADS; at += blockDim.x) {
        const int m = at / QUADS;
        float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int w = 0; w < busy_warps; w++) add_scaled(value, quad_of(scratch[w], at), factors[w][m]);
        reinterpret_cast<float4*>(to.o)[at] = value;
    }
}

// Divides by the softmax's denominator and stores; hands over to the output projection as well.
DEVICE void write_output(const Attention& p, const Partial& sum, int first_row, int first_query, int queries, int head,
                         const Activations& to) {
    constexpr int QUADS = VALUE_WIDTH / 4;
    const int count = min(16, queries - first_query);
#pragma unroll 1
    for (int at = threadIdx.x; at < ceil_div(count * QUADS, 32) * 32; at += blockDim.x) {
        const int local = at / QUADS, quad = at % QUADS, m = first_query + local;
        // whole warps take part in hand_over: eight lanes at least share a query
        const bool real = local < count;
        const int row = first_row + (real ? m / p.group : 0), query_head = head * p.group + (real ? m % p.group : 0);
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
        if (real) {
            float highest = sum.highest[local], total = sum.total[local], factor;
            if (p.sinks) {
                const float sink = p.sinks[query_head] * LOG2_E, overall = fmaxf(highest, sink);
                factor = merge_factor(highest, overall);
                factor /= total * factor + fast_exp2(sink - overall);
            } else {
                factor = total > 0.f ? 1.f / total : 0.f;
            }
            add_scaled(x, quad_of(sum, at), factor);
            float* out = p.out + static_cast<size_t>(row) * p.out_stride + query_head * VALUE_DIM + 4 * quad;
            const int left = VALUE_DIM == VALUE_WIDTH ? 4 : VALUE_DIM - 4 * quad;
            if (left > 0) out[0] = x.x;
            if (left > 1) out[1] = x.y;
            if (left > 2) out[2] = x.z;
            if (left > 3) out[3] = x.w;
        }
        Activations target = to;
        if (!real) target.columns = 0;
        hand_over(target, row, query_head * QUADS + quad, x.x, x.y, x.z, x.w);
    }
}

// What a block has to do, from the step's inputs alone, so that it is known when the keys are there.
struct Share {
    int seq, first_row, first_query, queries, count;  // queries of the sequence, `count` of them here
    int split, num_splits;
    int begin, end, last_key;  // pages; the last key that somebody sees
    const int* table;

    // Sixteen queries from first_query on, and share `split` of at most max_splits of their keys.
    DEVICE void set(const Attention& p, int query, int max_splits) {
        first_query = query;
        count = min(16, queries - first_query);
        const int first_page = first_visible(p, p.positions[first_row + first_query / p.group]) / PAGE_TOKENS;
        last_key = p.positions[first_row + (first_query + count - 1) / p.group];
        const int num_pages = last_key / PAGE_TOKENS + 1 - first_page;
        const bool is_short = num_pages <= UNSPLIT_PAGES * FEW_WARPS;
        num_splits = is_short ? 1 : max(1, min(max_splits, num_pages / FEW_WARPS));
        const int per_split = ceil_div(num_pages, num_splits);
        begin = first_page + split * per_split;
        end = min(begin + per_split, first_page + num_pages);
    }
};

DEVICE void attend_few_tile(const Attention& p, const Activations& to, Partial* scratch, const Share& share,
                            int first_block) {
    __shared__ int is_last;
    __shared__ Queries<16> queries;
    __shared__ float factors[MAX_PARTS][16];
    const int head = blockIdx.y % p.num_kv_heads, count = share.count;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int busy_warps = min(FEW_WARPS, share.end - share.begin);
    Keys keys;
    if (warp < busy_warps) keys.load(p, first_block, head, lane);
    queries.load<1>(p, share.first_row, share.first_query, count, head, threadIdx.x, blockDim.x);
    __syncthreads();
    if (warp < busy_warps) {
        Tile tile;
        tile.start(p, share.first_row, share.first_query, share.queries, lane);
        QueryChunk chunks[KEY_CHUNKS];
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; c++) chunks[c].load(queries, 0, c, lane);
        int page = share.begin + warp, block = first_block;
#pragma unroll 1
        for (; page < share.end; page += FEW_WARPS) {
            Values values;
            values.load(p, block, head, lane);
            float s[2][4] = {}, candidate[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; c++) {
#pragma unroll
                for (int j = 0; j < 2; j++) chunks[c].multiply(keys.fragment(c, j, lane), s[j]);
            }
            if (page + FEW_WARPS < share.end) {  // under way while this page is worked on
                block = share.table[page + FEW_WARPS];
                keys.load(p, block, head, lane);
            }
            Tile::cap(p, s);
            tile.mask(p, page * PAGE_TOKENS, lane, s);
            Tile::largest(s, candidate);
            tile.raise(candidate);
            u32 weights[4];
            tile.weigh<false>(s, weights);
            const Written written(share.last_key - page * PAGE_TOKENS, lane);
#pragma unroll
            for (int c = 0; c < VALUE_TILES / 2; c++)
                tile.add_values(c, weights, written.of(values.fragment(c, lane)));
        }
        store_tile(tile, scratch[warp], lane, count);
    }
    __syncthreads();
    Partial& sum = scratch[FEW_WARPS];
    if (share.num_splits == 1) {
        merge_warps(scratch, busy_warps, count, sum, factors);
        __syncthreads();
    } else {
        const int where = share.seq * gridDim.y + blockIdx.y;
        Partial* parts = reinterpret_cast<Partial*>(p.partial) + static_cast<size_t>(where) * p.num_splits;
        merge_warps(scratch, busy_warps, count, parts[share.split], factors);
        __syncthreads();
        if (threadIdx.x == 0) {  // its fences order the whole block's accesses, which the barriers order with it
            __threadfence();
            is_last = atomicAdd(p.tickets + where, 1) == share.num_splits - 1;
            if (is_last) p.tickets[where] = 0;
            __threadfence();
        }
        __syncthreads();
        if (!is_last) return;
        merge_partials(parts, share.num_splits, count, sum, factors);
    }
    write_output(p, sum, share.first_row, share.first_query, share.queries, head, to);
}

// Grid (splits, KV heads * tiles of 16 queries, sequences). The tiles of the grid hold one row of each sequence; those
// of further rows are done in turn, unsplit, since a tile of the grid has one ticket.
KERNEL __launch_bounds__(32 * FEW_WARPS, 1)
attend_few(const Attention p, const Activations to) {
#if HAS_HALF_MMA
    DYNAMIC_SHARED(memory);
    Partial* scratch = reinterpret_cast<Partial*>(memory);  // one a warp, and their sum
    grid_release_dependents();
    const int num_tiles = gridDim.y / p.num_kv_heads, tile = blockIdx.y / p.num_kv_heads, warp = threadIdx.x / 32;
    Share share = {};
    share.seq = blockIdx.z, share.split = blockIdx.x;
    const bool is_there = share.seq < *p.num_seqs;
    if (is_there) {
        share.first_row = p.row_starts[share.seq];
        share.queries = (p.row_starts[share.seq + 1] - share.first_row) * p.group;
    }
    if (!is_there || share.queries > p.few_queries || tile * 16 >= share.queries) {
        grid_wait();
        return;
    }
    share.table = p.block_table + static_cast<size_t>(share.seq) * p.table_stride;
    int max_splits = p.num_splits;
#pragma unroll 1
    for (int query = tile * 16; query < share.queries; query += num_tiles * 16) {
        share.set(p, query, max_splits);
        const int first_block = share.begin + warp < share.end ? share.table[share.begin + warp] : 0;
        grid_wait();  // the first time; then it returns at once
        if (share.split < share.num_splits) attend_few_tile(p, to, scratch, share, first_block);
        max_splits = 1;
        __syncthreads();
    }
#endif
}
