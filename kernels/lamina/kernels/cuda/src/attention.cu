// Paged attention on tensor cores, for 16-bit caches: KV_TYPE (1 f16, 2 bf16), KEY_DIM, VALUE_DIM (multiples of 32).
//
// A warp holds 16 queries (see attention.cuh): Q as A fragments, the scores of a page as D fragments, which are the A
// fragments of P V as they stand, and the output. `attend_few` serves sequences of at most few_queries queries per KV
// head (decode): the keys are split over blocks and over the warps of a block, and merged. `attend_many` serves the
// others: the warps of a block hold different queries and share the pages in shared memory.
#include "attention.cuh"

constexpr int KEY_CHUNKS = KEY_DIM / 32, VALUE_TILES = VALUE_DIM / 8;
constexpr int KEY_PAGE_BYTES = KEY_DIM * PAGE_TOKENS * 2, VALUE_PAGE_BYTES = VALUE_DIM * PAGE_TOKENS * 2;

DEVICE u32 pack(float low, float high) { return KV_TYPE == KV_F16 ? pack_halves(low, high) : pack_bf16s(low, high); }

DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (KV_TYPE == KV_F16) {
        mma_halves(d, a, b0, b1);
    } else {
        mma_bf16s(d, a, b0, b1);
    }
}

DEVICE float4 load_four(const float* at) {
    if ((reinterpret_cast<u64>(at) & 15) == 0) return *reinterpret_cast<const float4*>(at);
    return make_float4(at[0], at[1], at[2], at[3]);
}

struct Tile {
    u32 q[KEY_CHUNKS][2][4];
    float o[VALUE_TILES][4];
    float highest[2], total[2];  // rows g and g + 8; total: this lane's share
    int position[2];             // -1: no such query

    // Queries first_query .. + 15 of `queries` rows of KV head `head`; first_row is the sequence's.
    DEVICE void load(const Attention& p, int first_row, int first_query, int queries, int head, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int m = first_query + g + 8 * h;
            const bool real = m < queries;
            const int row = first_row + (real ? m / p.group : 0), query_head = head * p.group + (real ? m % p.group : 0);
            position[h] = real ? p.positions[row] : -1;
            highest[h] = NEGATIVE_INFINITY;
            total[h] = 0.f;
            const float* at = p.q + static_cast<size_t>(row) * p.q_stride + query_head * KEY_DIM + 8 * t;
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; c++) {
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    const float4 x = real ? load_four(at + 32 * c + 4 * step) : make_float4(0.f, 0.f, 0.f, 0.f);
                    q[c][step][h] = pack(x.x, x.y);
                    q[c][step][h + 2] = pack(x.z, x.w);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < VALUE_TILES; i++)
            for (int j = 0; j < 4; j++) o[i][j] = 0.f;
    }

    // Scores of one page whose fragments lie at `keys`.
    DEVICE void score(const u8* keys, int lane, float (&s)[2][4]) const {
#pragma unroll
        for (int j = 0; j < 2; j++)
            for (int i = 0; i < 4; i++) s[j][i] = 0.f;
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; c++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 b = *reinterpret_cast<const uint4*>(keys + ((c * 2 + j) * 32 + lane) * 16);
                mma(s[j], q[c][0], b.x, b.y);
                mma(s[j], q[c][1], b.z, b.w);
            }
        }
    }

    // Rules and mask; the page's first key is at position first_key.
    DEVICE void apply_rules(const Attention& p, int first_key, int lane, float (&s)[2][4]) const {
        const int t = lane % 4;
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first_key + 4 * t + 2 * j + i % 2;
                s[j][i] = visible(p, key, position[i / 2]) ? score_of(p, s[j][i]) : NEGATIVE_INFINITY;
            }
        }
    }

    // Makes `highest` cover `candidate` (this lane's largest new scores) and rescales what is there.
    DEVICE void raise(float (&candidate)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            candidate[h] = fmaxf(candidate[h], __shfl_xor_sync(FULL_WARP, candidate[h], 1));
            candidate[h] = fmaxf(candidate[h], __shfl_xor_sync(FULL_WARP, candidate[h], 2));
            const float raised = fmaxf(highest[h], candidate[h]);
            const float kept = raised == NEGATIVE_INFINITY ? 1.f : fast_exp2(highest[h] - raised);
            highest[h] = raised;
            total[h] *= kept;
#pragma unroll
            for (int i = 0; i < VALUE_TILES; i++) {
                o[i][2 * h] *= kept;
                o[i][2 * h + 1] *= kept;
            }
        }
    }

    // Adds the page's values, weighted; `highest` already covers the scores.
    DEVICE void accumulate(const u8* values, int lane, const float (&s)[2][4]) {
        float weight[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float top = highest[i / 2];
                weight[j][i] = top == NEGATIVE_INFINITY ? 0.f : fast_exp2(s[j][i] - top);
                total[i / 2] += weight[j][i];
            }
        }
        const u32 a[4] = {pack(weight[0][0], weight[0][1]), pack(weight[0][2], weight[0][3]),
                          pack(weight[1][0], weight[1][1]), pack(weight[1][2], weight[1][3])};
#pragma unroll
        for (int c = 0; c < VALUE_TILES / 2; c++) {
            const uint4 b = *reinterpret_cast<const uint4*>(values + (c * 32 + lane) * 16);
            mma(o[2 * c], a, b.x, b.y);
            mma(o[2 * c + 1], a, b.z, b.w);
        }
    }

    DEVICE void add_page(const Attention& p, const u8* keys, const u8* values, int first_key, int lane) {
        float s[2][4];
        score(keys, lane, s);
        apply_rules(p, first_key, lane, s);
        float candidate[2];
#pragma unroll
        for (int h = 0; h < 2; h++)
            candidate[h] = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
        raise(candidate);
        accumulate(values, lane, s);
    }

    DEVICE void sum_totals() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            total[h] += __shfl_xor_sync(FULL_WARP, total[h], 1);
            total[h] += __shfl_xor_sync(FULL_WARP, total[h], 2);
        }
    }
};

// -- few queries

constexpr int FEW_WARPS = VALUE_DIM <= 128 ? 8 : 4, MAX_PARTS = 32;
// Below this many pages a warp the keys stay with one block: merging through memory costs several pages' time.
constexpr int UNSPLIT_PAGES = 4;

// Unnormalised outputs of 16 queries over some of the keys, with the largest score and the sum of weights.
struct Partial {
    float o[16][VALUE_DIM];
    float highest[16], total[16];
};

DEVICE float merge_factor(float highest, float overall) {
    return highest == NEGATIVE_INFINITY ? 0.f : fast_exp2(highest - overall);
}

DEVICE void store_tile(const Tile& tile, Partial& to, int lane, int queries) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int m = g + 8 * h;
        if (m >= queries) continue;
        if (t == 0) {
            to.highest[m] = tile.highest[h];
            to.total[m] = tile.total[h];
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
    constexpr int QUADS = VALUE_DIM / 4, BATCH = 16;
    weigh_partials(parts, count, queries, factors, sum);
    __syncthreads();
    for (int at = threadIdx.x; at < queries * QUADS; at += blockDim.x) {
        float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
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

// Adds up the tiles of the block's warps, scratch[0 .. FEW_WARPS - 1] in shared memory, into `to` (shared or global).
DEVICE void merge_warps(const Partial* scratch, int queries, Partial& to, float (*factors)[16]) {
    constexpr int QUADS = VALUE_DIM / 4;
    weigh_partials(scratch, FEW_WARPS, queries, factors, to);
    __syncthreads();
    for (int at = threadIdx.x; at < queries * QUADS; at += blockDim.x) {
        const int m = at / QUADS;
        float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < FEW_WARPS; w++) add_scaled(value, quad_of(scratch[w], at), factors[w][m]);
        reinterpret_cast<float4*>(to.o)[at] = value;
    }
}

// Divides by the softmax's denominator and stores; hands over to the output projection as well.
DEVICE void write_output(const Attention& p, const Partial& sum, int first_row, int first_query, int queries, int head,
                         const Activations& to) {
    constexpr int QUADS = VALUE_DIM / 4;
    const int count = min(16, queries - first_query);
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
            out[0] = x.x;
            out[1] = x.y;
            out[2] = x.z;
            out[3] = x.w;
        }
        Activations target = to;
        if (!real) target.columns = 0;
        hand_over(target, row, query_head * QUADS + quad, x.x, x.y, x.z, x.w);
    }
}

// Sixteen queries from first_query on; the block's share of their keys is `split` of at most max_splits.
DEVICE void attend_few_tile(const Attention& p, const Activations& to, Partial* scratch, int seq, int first_row,
                            int first_query, int queries, int split, int max_splits) {
    __shared__ int is_last;
    __shared__ float factors[MAX_PARTS][16];
    const int head = blockIdx.y % p.num_kv_heads, count = min(16, queries - first_query);
    const int first_page = first_visible(p, p.positions[first_row + first_query / p.group]) / PAGE_TOKENS;
    const int last_row = first_row + (first_query + count - 1) / p.group;
    const int num_pages = p.positions[last_row] / PAGE_TOKENS + 1 - first_page;
    const bool is_short = num_pages <= UNSPLIT_PAGES * FEW_WARPS;
    const int num_splits = is_short ? 1 : max(1, min(max_splits, num_pages / FEW_WARPS));
    if (split >= num_splits) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int per_split = ceil_div(num_pages, num_splits), begin = first_page + split * per_split;
    const int end = min(begin + per_split, first_page + num_pages);
    const int* table = p.block_table + static_cast<size_t>(seq) * p.table_stride;
    auto keys_of = [&](int block) { return page_at(p.k, block, p.num_kv_heads, head, KEY_PAGE_BYTES); };
    auto values_of = [&](int block) { return page_at(p.v, block, p.num_kv_heads, head, VALUE_PAGE_BYTES); };
    int block = begin + warp < end ? table[begin + warp] : 0;
    prefetch(keys_of(block), KEY_PAGE_BYTES, lane);
    prefetch(values_of(block), VALUE_PAGE_BYTES, lane);
    Tile tile;
    tile.load(p, first_row, first_query, queries, head, lane);
    for (int page = begin + warp; page < end; page += FEW_WARPS) {
        const int next = page + FEW_WARPS < end ? table[page + FEW_WARPS] : block;
        if (next != block) {
            prefetch(keys_of(next), KEY_PAGE_BYTES, lane);
            prefetch(values_of(next), VALUE_PAGE_BYTES, lane);
        }
        tile.add_page(p, keys_of(block), values_of(block), page * PAGE_TOKENS, lane);
        block = next;
    }
    tile.sum_totals();
    store_tile(tile, scratch[warp], lane, count);
    __syncthreads();
    Partial& sum = scratch[FEW_WARPS];
    if (num_splits == 1) {
        merge_warps(scratch, count, sum, factors);
        __syncthreads();
    } else {
        const int where = seq * gridDim.y + blockIdx.y;
        Partial* parts = reinterpret_cast<Partial*>(p.partial) + static_cast<size_t>(where) * p.num_splits;
        merge_warps(scratch, count, parts[split], factors);
        __syncthreads();
        if (threadIdx.x == 0) {  // its fences order the whole block's accesses, which the barriers order with it
            __threadfence();
            is_last = atomicAdd(p.tickets + where, 1) == num_splits - 1;
            if (is_last) p.tickets[where] = 0;
            __threadfence();
        }
        __syncthreads();
        if (!is_last) return;
        merge_partials(parts, num_splits, count, sum, factors);
    }
    write_output(p, sum, first_row, first_query, queries, head, to);
}

// Grid (splits, KV heads * tiles of 16 queries, sequences). The tiles of the grid hold one row of each sequence; those of
// further rows are done in turn, unsplit, since a tile of the grid has one ticket.
KERNEL __launch_bounds__(32 * FEW_WARPS, 1)
attend_few(const Attention p, const Activations to) {
#if HAS_HALF_MMA
    DYNAMIC_SHARED(memory);
    Partial* scratch = reinterpret_cast<Partial*>(memory);  // one a warp, and their sum
    grid_release_dependents();
    grid_wait();
    const int seq = blockIdx.z, num_tiles = gridDim.y / p.num_kv_heads;
    const int num_seqs = *p.num_seqs, first_row = p.row_starts[seq], end_row = p.row_starts[seq + 1];
    const int queries = (end_row - first_row) * p.group;
    if (seq >= num_seqs || queries > p.few_queries) return;
    int max_splits = p.num_splits;
    for (int tile = blockIdx.y / p.num_kv_heads; tile * 16 < queries; tile += num_tiles) {
        attend_few_tile(p, to, scratch, seq, first_row, tile * 16, queries, blockIdx.x, max_splits);
        max_splits = 1;
        __syncthreads();
    }
#endif
}

// -- many queries

constexpr int MANY_WARPS = 8, STAGE_PAGES = 2;
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

DEVICE void add_stage(const Attention& p, Tile& tile, const u8* stage, int first_page, int num_pages, int lane) {
    float s[STAGE_PAGES][2][4], candidate[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
    for (int i = 0; i < STAGE_PAGES; i++) {
        if (i >= num_pages) break;
        tile.score(stage + i * (KEY_PAGE_BYTES + VALUE_PAGE_BYTES), lane, s[i]);
        tile.apply_rules(p, (first_page + i) * PAGE_TOKENS, lane, s[i]);
#pragma unroll
        for (int h = 0; h < 2; h++)
            candidate[h] = fmaxf(candidate[h], fmaxf(fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]),
                                                     fmaxf(s[i][1][2 * h], s[i][1][2 * h + 1])));
    }
    tile.raise(candidate);
#pragma unroll
    for (int i = 0; i < STAGE_PAGES; i++) {
        if (i >= num_pages) break;
        tile.accumulate(stage + i * (KEY_PAGE_BYTES + VALUE_PAGE_BYTES) + KEY_PAGE_BYTES, lane, s[i]);
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
            at[0] = low;
            at[1] = high;
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
    grid_wait();
    constexpr int TILE_QUERIES = 16 * MANY_WARPS;
    const int head = blockIdx.y, num_seqs = *p.num_seqs;
    int index = blockIdx.x, seq = 0, first_row = 0, queries = 0;
    for (;; seq++) {
        if (seq >= num_seqs) return;
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
    const int end = p.positions[first_row + last_query / p.group] / PAGE_TOKENS + 1;
    Tile tile;
    tile.load(p, first_row, first_query, queries, head, lane);
    // pages that some query of this warp sees
    const int warp_begin = first_query < queries
        ? first_visible(p, p.positions[first_row + first_query / p.group]) / PAGE_TOKENS : end;
    const int warp_end = first_query < queries
        ? p.positions[first_row + min(first_query + 15, queries - 1) / p.group] / PAGE_TOKENS + 1 : begin;
    fetch_stage(p, memory, table, begin, end, head);
    copy_async_commit();
    int parity = 0;
    for (int page = begin; page < end; page += STAGE_PAGES, parity ^= 1) {
        fetch_stage(p, memory + (parity ^ 1) * STAGE_BYTES, table, page + STAGE_PAGES, end, head);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        if (page + STAGE_PAGES > warp_begin && page < warp_end)
            add_stage(p, tile, memory + parity * STAGE_BYTES, page, min(STAGE_PAGES, end - page), lane);
        __syncthreads();
    }
    if (first_query < queries) write_tile(p, tile, first_row, first_query, queries, head, lane, to);
#endif
}
