// What the attention kernels share: the problem, which rows a tile holds, and scores under the model's rules.
#include "kv.cuh"

// Rows of a sequence and the query heads of one KV head together form the "queries" m = row * group + head of a KV
// head.
struct Attention {
    const float* q;
    const void* k;
    const void* v;
    const int* positions;
    const int* row_starts;
    const int* block_table;
    const int* num_seqs;
    const float* sinks;
    float* out;
    float* partial;
    int* tickets;
    int q_stride, out_stride, table_stride, num_kv_heads, group, window, num_splits, few_queries;
    float scale, softcap;
};

// tanh by 2^x, to 2e-7: tanhf and exact division would fill the instruction cache, and what caps scores by it needs no
// more.
DEVICE float small_tanh(float x) {
    const float power = fast_exp2(2.f * LOG2_E * fminf(x, 20.f));
    return 1.f - __fdividef(2.f, power + 1.f);
}

// What queries are multiplied by before they meet keys: scores are then log2-scaled, unless they are capped first.
DEVICE float query_scale(const Attention& p) { return p.softcap > 0.f ? p.scale : p.scale * LOG2_E; }

// The log2-scaled score of a product with such a query, where scores are capped; the softmax works with 2^x.
DEVICE float capped(const Attention& p, float dot) {
    return p.softcap * LOG2_E * small_tanh(__fdividef(dot, p.softcap));
}

DEVICE bool visible(const Attention& p, int key, int position) {
    return key <= position && (p.window <= 0 || position - key < p.window);
}

DEVICE int first_visible(const Attention& p, int position) {
    return p.window > 0 ? max(position - p.window + 1, 0) : 0;
}

// What a sum over keys with this largest score counts in one with the largest score `overall`.
DEVICE float merge_factor(float highest, float overall) {
    return highest == NEGATIVE_INFINITY ? 0.f : fast_exp2(highest - overall);
}
