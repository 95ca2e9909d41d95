// Paged attention for sequences of many queries (prefill) on Hopper, by products of whole warpgroups. KV_TYPE 1 (f16)
// or 2 (bf16), KEY_DIM = VALUE_DIM = 64 or 128; for everything else see attention_many.cu.
//
// A block is a warpgroup that brings pages into shared memory, the producer, and two that compute, the consumers, which
// take turns: one multiplies while the other weighs its scores. Blocks go through blocks of queries in rounds.
#include "query_block.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2, GROUP_THREADS = 128, BLOCK_THREADS = (CONSUMERS + 1) * GROUP_THREADS;
constexpr int GROUP_QUERIES = 64, BLOCK_QUERIES = CONSUMERS * GROUP_QUERIES;
constexpr int KEYS = 128, TILE_PAGES = KEYS / PAGE_TOKENS, STAGES = 2;  // as `_plan_wgmma` in attention_plan.py
constexpr int KEY_PAGE = PAGE_TOKENS * KEY_DIM * 2, VALUE_PAGE = PAGE_TOKENS * VALUE_DIM * 2;
constexpr int KEY_SWIZZLE = 64, VALUE_SWIZZLE = 32;  // 32 dimensions of a key, a page's tokens of a dimension
constexpr int ALIGNMENT = 1024;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr float SLACK = 8.f;  // scores may exceed what they are compared with by so many powers of two

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
DEVICE u32 pack(float low, float high) { return KV_TYPE == KV_BF16 ? pack_bf16s(low, high) : pack_halves(low, high); }

// Shared memory: stages of keys, stages of values, and each stage's barriers. Tiles are counted over all rounds.
struct Stages {
    u32 first;

    DEVICE explicit Stages(const u8* memory) : first(ceil_div(shared_address(memory), ALIGNMENT) * ALIGNMENT) {}
    DEVICE u32 keys(u32 tile) const { return first + tile % STAGES * (TILE_PAGES * KEY_PAGE); }
    DEVICE u32 values(u32 tile) const {
        return first + STAGES * TILE_PAGES * KEY_PAGE + tile % STAGES * (TILE_PAGES * VALUE_PAGE);
    }
    DEVICE u32 keys_full(u32 tile) const { return barrier(tile, 0); }
    DEVICE u32 keys_free(u32 tile) const { return barrier(tile, 1); }
    DEVICE u32 values_full(u32 tile) const { return barrier(tile, 2); }
    DEVICE u32 values_free(u32 tile) const { return barrier(tile, 3); }
    DEVICE u32 barrier(u32 tile, int i) const {
        return first + STAGES * TILE_PAGES * (KEY_PAGE + VALUE_PAGE) + tile % STAGES * 32 + i * 8;
    }
    DEVICE void start() const {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(keys_full(stage), GROUP_THREADS);
            barrier_init(values_full(stage), GROUP_THREADS);
            barrier_init(keys_free(stage), CONSUMERS * GROUP_THREADS / 32);
            barrier_init(values_free(stage), CONSUMERS * GROUP_THREADS / 32);
        }
    }
    DEVICE static void wait_full(u32 barrier, u32 tile) { barrier_wait(barrier, tile / STAGES & 1); }
    DEVICE static void wait_free(u32 barrier, u32 tile) {  // the first use of a stage needs no wait
        if (tile >= STAGES) barrier_wait(barrier, (tile / STAGES & 1) ^ 1);
    }
};

// This thread block's queries in a round; false after its last. Blocks of queries are dealt out from the largest to the
// smallest, in every other round backwards.
DEVICE bool find_block(const Attention& p, int round, QueryBlock& block) {
    const int turn = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x, unit = round * gridDim.x + turn;
    return block.find(p, unit % p.num_kv_heads, unit / p.num_kv_heads, BLOCK_QUERIES);
}
DEVICE int num_tiles_of(const QueryBlock& block) { return ceil_div(block.end_page - block.first_page, TILE_PAGES); }

struct Producer {
    const Attention& p;
    const Stages& stages;
    int thread;
    QueryBlock block;
    u32 pending;  // the barrier of copies under way, 0 if there are none

    // Block numbers of a tile's pages, the i-th in lane i; those from the end on are the last page's.
    DEVICE int pages_of(int tile) const {
        const int page = block.first_page + tile * TILE_PAGES + thread % TILE_PAGES;
        return block.table(p)[min(page, block.end_page - 1)];
    }
    DEVICE const u8* page_of(const void* pages, int numbers, int i, int page_bytes) const {
        return page_at(pages, __shfl_sync(FULL_WARP, numbers, i), p.num_kv_heads, block.head, page_bytes);
    }
    // Keys as rows: [KEY_DIM / 32][KEYS][32], swizzled. Eights of dimensions lie in a page as kv.cuh says.
    DEVICE void fetch_keys(u32 to, int numbers) const {
        const int token = thread / 8 % 4 * 4 + thread / 32 % 2 * 2 + thread / 4 % 2;
        to += swizzled<KEY_SWIZZLE>((thread / 64 * KEYS + token) * KEY_SWIZZLE + thread % 4 * 16);
#pragma unroll
        for (int i = 0; i < TILE_PAGES; i++) {
            const u8* page = page_of(p.k, numbers, i, KEY_PAGE) + thread * 16;
#pragma unroll
            for (int at = 0; at < KEY_PAGE; at += 16 * GROUP_THREADS)
                copy_async_16(to + i * PAGE_TOKENS * KEY_SWIZZLE + at * TILE_PAGES, page + at);
        }
    }
    // Values as rows of a dimension's tokens: [TILE_PAGES][VALUE_DIM][16], swizzled. Slots that are not written may
    // hold NaN, and 0 * NaN is NaN: unless the tile IS_WHOLE, their values are 0.
    template <bool IS_WHOLE>
    DEVICE void fetch_values(u32 to, int numbers, int first_token) const {
        const int quad = thread % 4, half = thread / 16 % 2, g = thread / 4 % 4 + thread / 32 % 2 * 4;
        const int source = (thread / 64 * 32 + g * 4 + quad) * 16 + half * 8;
        to += swizzled<VALUE_SWIZZLE>((thread / 64 * 16 + half * 8 + g) * VALUE_SWIZZLE + quad * 8);
#pragma unroll
        for (int i = 0; i < TILE_PAGES; i++) {
            const u8* page = page_of(p.v, numbers, i, VALUE_PAGE) + source;
            const int written = block.last_key + 1 - first_token - i * PAGE_TOKENS - quad * 4;
#pragma unroll
            for (int at = 0; at < VALUE_PAGE; at += 8 * GROUP_THREADS) {
                if (IS_WHOLE) {
                    copy_async_8(to + i * VALUE_PAGE + at, page + at);
                } else {
                    copy_async_8(to + i * VALUE_PAGE + at, page + at, 2 * max(0, min(4, written)));
                }
            }
        }
    }

    // Copies are waited for, and their barrier told, when those after them have been started.
    DEVICE void commit(u32 full) {
        copy_async_commit();
        arrive<1>();
        pending = full;
    }
    template <int UNDER_WAY>
    DEVICE void arrive() const {
        if (!pending) return;
        copy_async_wait<UNDER_WAY>();
        fence_for_wgmma();
        barrier_arrive(pending);
    }

    // The block's tiles, of which the first is tile `first` of all. Keys are needed a tile ahead of the values.
    DEVICE void run(u32 first) {
        const int num_tiles = num_tiles_of(block), first_token = block.first_page * PAGE_TOKENS;
        int before = 0, numbers = pages_of(0);
        for (int i = 0; i <= num_tiles; i++) {
            const int next = pages_of(i + 1);
            if (i < num_tiles) {
                stages.wait_free(stages.keys_free(first + i), first + i);
                fetch_keys(stages.keys(first + i), numbers);
                commit(stages.keys_full(first + i));
            }
            if (i > 0) {
                const u32 tile = first + i - 1;
                const int token = first_token + (i - 1) * KEYS;
                stages.wait_free(stages.values_free(tile), tile);
                if (token + KEYS <= block.last_key + 1) {
                    fetch_values<true>(stages.values(tile), before, token);
                } else {
                    fetch_values<false>(stages.values(tile), before, token);
                }
                commit(stages.values_full(tile));
            }
            before = numbers;
            numbers = next;
        }
    }
};

// A warp's share of 64 queries, sixteen of them: of rows g and g + 8 columns 8 i + 2 t and + 1.
struct Consumer {
    u32 q[KEY_DIM / 16][4];
    float s[KEYS / 8][4];
    u32 weights[KEYS / 16][4];
    float o[VALUE_DIM / 8][4];
    float compared[2], total[2], kept[2];  // what weights are relative to; this lane's sum; what it and `o` still count
    int position[2], first_position, last_position;  // -1: no such query; of all sixteen

    DEVICE void start(const Attention& p, const QueryBlock& block, int first_query, int lane) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int m = first_query + lane / 4 + 8 * h;
            position[h] = m < block.queries ? block.position(p, m) : -1;
            compared[h] = NEGATIVE_INFINITY;
            total[h] = 0.f;
        }
        first_position = block.position(p, first_query);
        last_position = block.position(p, first_query + 15);
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 8; i++)
            for (int j = 0; j < 4; j++) o[i][j] = 0.f;
    }
    // Queries beyond the last are copies of it.
    DEVICE void load_queries(const Attention& p, const QueryBlock& block, int first_query, int lane) {
        const float scale = query_scale(p);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int m = min(first_query + lane / 4 + 8 * h, block.queries - 1);
            const float* row = p.q + static_cast<size_t>(block.first_row + m / p.group) * p.q_stride +
                               (block.head * p.group + m % p.group) * KEY_DIM + lane % 4 * 2;
            const bool has_pairs = (reinterpret_cast<u64>(row) & 7) == 0;
#pragma unroll
            for (int c = 0; c < KEY_DIM / 16; c++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float* at = row + 16 * c + 8 * j;
                    const float2 x = has_pairs ? *reinterpret_cast<const float2*>(at) : make_float2(at[0], at[1]);
                    q[c][2 * j + h] = pack(scale * x.x, scale * x.y);
                }
            }
        }
    }

    DEVICE void start_scores(u32 keys) {
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < KEY_DIM / 16; c++) {
            const int at = c / 2 * KEYS * KEY_SWIZZLE + c % 2 * 32;
            wgmma(s, q[c], matrix_at<KEY_SWIZZLE>(keys) + at, c > 0);
        }
        wgmma_commit();
        pin(s);
    }
    DEVICE void start_sums(u32 values) {
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < TILE_PAGES; c++)
            wgmma(o, weights[c], matrix_at<VALUE_SWIZZLE>(values) + c * VALUE_PAGE, true);
        wgmma_commit();
        pin(o);
    }
    // Scores to weights, in place, while the sums of the tile before are under way.
    DEVICE void finish_scores(const Attention& p, u32 keys_free, int first_key, int lane) {
        pin(s);
        if (lane == 0) barrier_arrive(keys_free);
        if (p.softcap > 0.f) {
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
                for (int j = 0; j < 4; j++) s[i][j] = capped(p, s[i][j]);
        }
        const bool is_near = p.window <= 0 || last_position - first_key < p.window;
        if (!is_near || first_key + KEYS > first_position + 1) mask(p, first_key + lane % 4 * 2);
#pragma unroll
        for (int h = 0; h < 2; h++) weigh(h);
        pin(s);
    }
    // Waits for the sums under way and prepares for the next, by tile.
    DEVICE void finish_sums() {
        wgmma_wait<0>();
        pin(o);
#pragma unroll
        for (int c = 0; c < KEYS / 16; c++)
            for (int j = 0; j < 4; j++)
                weights[c][j] = pack(s[2 * c + j / 2][j % 2 * 2], s[2 * c + j / 2][j % 2 * 2 + 1]);
        if (!__any_sync(FULL_WARP, kept[0] != 1.f || kept[1] != 1.f)) return;  // nearly always
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 8; i++)
            for (int j = 0; j < 4; j++) o[i][j] *= kept[j / 2];
    }
    DEVICE void mask(const Attention& p, int first_key) {
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
            for (int j = 0; j < 4; j++)
                if (!visible(p, first_key + 8 * i + j % 2, position[j / 2])) s[i][j] = NEGATIVE_INFINITY;
    }
    DEVICE void weigh(int h) {
        float top = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
        for (int i = 1; i < KEYS / 8; i++) top = fmaxf(top, fmaxf(s[i][2 * h], s[i][2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
        kept[h] = 1.f;
        if (top > compared[h] + SLACK) {
            kept[h] = fast_exp2(compared[h] - top);
            compared[h] = top;
        }
        // finite, so that masked scores weigh 0 where nothing is seen yet, and NaN, which no maximum shows, stays
        const float base = fmaxf(compared[h], -3.402823466e38f);
        float sum[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                s[i][2 * h + j] = fast_exp2(s[i][2 * h + j] - base);
                sum[j] += s[i][2 * h + j];
            }
        }
        total[h] = total[h] * kept[h] + (sum[0] + sum[1]);
    }

    // The block's tiles, from tile `first` of all on: scores of a tile together with sums of the one before.
    DEVICE void run(const Attention& p, const QueryBlock& block, const Stages& stages, u32 first, int group, int lane) {
        const u32 end = first + num_tiles_of(block);
        int key = block.first_page * PAGE_TOKENS;
        stages.wait_full(stages.keys_full(first), first);
        start_scores(stages.keys(first));
        wgmma_wait<0>();
        finish_scores(p, stages.keys_free(first), key, lane);
        for (u32 tile = first + 1; tile < end; tile++) {
            key += KEYS;
            stages.wait_full(stages.keys_full(tile), tile);
            finish_sums();
            if (tile > first + 1 && lane == 0) barrier_arrive(stages.values_free(tile - 2));
            turn_wait(1 + group, 2 * GROUP_THREADS);
            start_scores(stages.keys(tile));
            stages.wait_full(stages.values_full(tile - 1), tile - 1);
            start_sums(stages.values(tile - 1));
            turn_pass(1 + (group + 1) % CONSUMERS, 2 * GROUP_THREADS);
            wgmma_wait<1>();
            finish_scores(p, stages.keys_free(tile), key, lane);
        }
        stages.wait_full(stages.values_full(end - 1), end - 1);
        finish_sums();
        if (end > first + 1 && lane == 0) barrier_arrive(stages.values_free(end - 2));
        start_sums(stages.values(end - 1));
        wgmma_wait<0>();
        pin(o);
        if (lane == 0) barrier_arrive(stages.values_free(end - 1));
    }
    DEVICE void write(const Attention& p, const QueryBlock& block, int first_query, int lane, const Activations& to) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            total[h] += __shfl_xor_sync(FULL_WARP, total[h], 1);
            total[h] += __shfl_xor_sync(FULL_WARP, total[h], 2);
        }
        const int m = first_query + lane / 4;
        if (m < block.queries) write_query<0>(p, block, m, compared[0], total[0], o, lane, to);
        if (m + 8 < block.queries) write_query<1>(p, block, m + 8, compared[1], total[1], o, lane, to);
    }
};
#endif

// Grid: as many blocks as run at a time.
KERNEL __launch_bounds__(BLOCK_THREADS, 1)
attend_wgmma(const Attention p, const Activations to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    DYNAMIC_SHARED(memory);
    grid_release_dependents();
    const Stages stages(memory);
    if (threadIdx.x == 0) stages.start();
    __syncthreads();
    grid_wait();
    const int group = threadIdx.x / GROUP_THREADS;
    u32 first = 0;
    if (group == CONSUMERS) {
        leave_registers<PRODUCER_REGISTERS>();
        Producer producer{p, stages, static_cast<int>(threadIdx.x % GROUP_THREADS), {}, 0};
        for (int round = 0; find_block(p, round, producer.block); round++) {
            producer.run(first);
            first += num_tiles_of(producer.block);
        }
        producer.arrive<0>();
    } else {
        take_registers<CONSUMER_REGISTERS>();
        const int lane = threadIdx.x % 32;
        if (group == CONSUMERS - 1) turn_pass(1, 2 * GROUP_THREADS);
        QueryBlock block;
        for (int round = 0; find_block(p, round, block); round++) {
            const int first_query = block.first_query + threadIdx.x / 32 * 16;
            Consumer consumer;
            consumer.start(p, block, first_query, lane);
            consumer.load_queries(p, block, first_query, lane);
            consumer.run(p, block, stages, first, group, lane);
            consumer.write(p, block, first_query, lane, to);
            first += num_tiles_of(block);
        }
    }
#endif
}
