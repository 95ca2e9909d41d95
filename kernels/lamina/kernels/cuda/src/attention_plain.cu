// Paged attention without tensor cores: f32 caches, large heads, and cards before compute capability 8.0. Heads have at
// most MAX_DIM values, a multiple of 32.
// One block per query row and head; its four warps share out the pages.
#include "attention.cuh"

constexpr int WARPS = 4, PER_LANE = MAX_DIM / 32;

DEVICE int sequence_of(const Attention& p, int row) {
    for (int seq = 0; seq < *p.num_seqs; seq++)
        if (row < p.row_starts[seq + 1]) return seq;
    return -1;
}

// Lane l scores key l % 16 over half of the dimensions; both halves get the sum.
DEVICE float page_score(const Attention& p, const float* q, const u8* keys, int type, int key_dim, int lane) {
    const int token = lane % 16, middle = key_dim / 2, end = lane < 16 ? middle : key_dim, width = key_width(key_dim);
    float dot = 0.f;
    for (int d = lane < 16 ? 0 : middle; d < end; d++)
        dot += q[d] * kv_load(keys, type, width, key_index(token, d), token, d);
    return dot + __shfl_xor_sync(FULL_WARP, dot, 16);
}

KERNEL __launch_bounds__(32 * WARPS)
attend_plain(const Attention p, int type, int key_dim, int value_dim, const int* num_rows) {
    __shared__ float q[MAX_DIM], sums[WARPS][MAX_DIM], highest[WARPS], totals[WARPS];
    grid_release_dependents();
    grid_wait();
    const int row = blockIdx.x, query_head = blockIdx.y, head = query_head / p.group;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= *num_rows) return;
    const int seq = sequence_of(p, row);
    if (seq < 0) return;
    for (int d = threadIdx.x; d < key_dim; d += blockDim.x)
        q[d] = query_scale(p) * p.q[static_cast<size_t>(row) * p.q_stride + query_head * key_dim + d];
    __syncthreads();
    const int position = p.positions[row], width = value_width(value_dim);
    const int key_bytes = page_bytes(type, key_width(key_dim)), value_bytes = page_bytes(type, width);
    float top = NEGATIVE_INFINITY, total = 0.f, o[PER_LANE] = {};
    for (int page = first_visible(p, position) / PAGE_TOKENS + warp; page <= position / PAGE_TOKENS; page += WARPS) {
        const int block = p.block_table[static_cast<size_t>(seq) * p.table_stride + page];
        const u8* keys = page_at(p.k, block, p.num_kv_heads, head, key_bytes);
        const u8* values = page_at(p.v, block, p.num_kv_heads, head, value_bytes);
        float score = page_score(p, q, keys, type, key_dim, lane);
        if (p.softcap > 0.f) score = capped(p, score);
        if (!visible(p, page * PAGE_TOKENS + lane % 16, position)) score = NEGATIVE_INFINITY;
        const float raised = fmaxf(top, warp_max(score));
        if (raised == NEGATIVE_INFINITY) {  // a maximum passes over NaN, an answer must not (A-05)
            if (warp_max(score != score ? 1.f : 0.f) > 0.f) total = __uint_as_float(0x7fc00000u);
            continue;
        }
        const float kept = exp2f(top - raised), weight = exp2f(score - raised);
        top = raised;
        total = total * kept + warp_sum(weight) * 0.5f;  // both halves of the warp hold the 16 weights
        for (int i = 0; i < PER_LANE; i++) o[i] *= kept;
        // slots after the row's position may hold another sequence's NaN, and 0 * NaN is NaN
        for (int token = 0; token < min(PAGE_TOKENS, position + 1 - page * PAGE_TOKENS); token++) {
            const float w = __shfl_sync(FULL_WARP, weight, token);
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                const int d = lane + 32 * i;
                if (d < value_dim) o[i] += w * kv_load(values, type, width, value_index(token, d), token, d);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sums[warp][lane + 32 * i] = o[i];
    if (lane == 0) {
        highest[warp] = top;
        totals[warp] = total;
    }
    __syncthreads();
    float overall = p.sinks ? p.sinks[query_head] * LOG2_E : NEGATIVE_INFINITY;
    for (int w = 0; w < WARPS; w++) overall = fmaxf(overall, highest[w]);
    float all = p.sinks ? exp2f(p.sinks[query_head] * LOG2_E - overall) : 0.f;
    for (int w = 0; w < WARPS; w++) all += totals[w] * exp2f(highest[w] - overall);
    for (int d = threadIdx.x; d < value_dim; d += blockDim.x) {
        float value = 0.f;
        for (int w = 0; w < WARPS; w++) value += sums[w][d] * exp2f(highest[w] - overall);
        p.out[static_cast<size_t>(row) * p.out_stride + query_head * value_dim + d] = value / all;
    }
}
