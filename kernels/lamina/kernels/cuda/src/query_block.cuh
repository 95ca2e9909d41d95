// What the kernels for many queries share: which a block has, and how their results are written. VALUE_DIM.
#include "attention.cuh"

// Consecutive queries of a sequence and KV head, and the pages that they see.
struct QueryBlock {
    int seq, head, first_row, queries;  // all of the sequence's
    int first_query, first_page, end_page, last_key;

    // The index-th block of `size` queries, of all sequences that have more than few_queries; false if there are fewer
    // blocks. Reads step inputs only.
    DEVICE bool find(const Attention& p, int kv_head, int index, int size) {
        const int num_seqs = *p.num_seqs;
        head = kv_head;
        for (seq = 0; seq < num_seqs; seq++) {
            first_row = p.row_starts[seq];
            queries = (p.row_starts[seq + 1] - first_row) * p.group;
            const int blocks = queries > p.few_queries ? ceil_div(queries, size) : 0;
            if (index < blocks) break;
            index -= blocks;
        }
        if (seq >= num_seqs) return false;
        first_query = ((queries - 1) / size - index) * size;  // the last rows see the most keys: start with them
        first_page = first_visible(p, position(p, first_query)) / PAGE_TOKENS;
        last_key = position(p, first_query + size - 1);
        end_page = last_key / PAGE_TOKENS + 1;
        return true;
    }
    // Of a query, or of the last if there are fewer.
    DEVICE int position(const Attention& p, int m) const {
        return p.positions[first_row + min(m, queries - 1) / p.group];
    }
    DEVICE const int* table(const Attention& p) const {
        return p.block_table + static_cast<size_t>(seq) * p.table_stride;
    }
};

// Writes half H of a lane's sums of values, those of query m: D fragments of COUNT tiles of eight dimensions.
template <int H, int COUNT>
DEVICE void write_query(const Attention& p, const QueryBlock& block, int m, float highest, float total,
                        const float (&o)[COUNT][4], int lane, const Activations& to) {
    const int row = block.first_row + m / p.group, query_head = block.head * p.group + m % p.group;
    float kept = 1.f;
    if (p.sinks) {
        const float sink = p.sinks[query_head] * LOG2_E, overall = fmaxf(highest, sink);
        kept = merge_factor(highest, overall);
        total = total * kept + fast_exp2(sink - overall);
    }
    const float factor = total > 0.f ? __fdividef(kept, total) : 0.f;
    const int first = query_head * VALUE_DIM + lane % 4 * 2;
    float* out = p.out + static_cast<size_t>(row) * p.out_stride + first;
    u16* halves = to.halves + static_cast<size_t>(row) * to.columns + first;
    const bool has_pairs = (reinterpret_cast<u64>(out) & 7) == 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float low = o[i][2 * H] * factor, high = o[i][2 * H + 1] * factor;
        const int left = VALUE_DIM - 8 * i - lane % 4 * 2;
        const bool is_whole = VALUE_DIM == 8 * COUNT || left > 1;
        if (has_pairs && is_whole) {
            *reinterpret_cast<float2*>(out + 8 * i) = make_float2(low, high);
        } else {
            if (is_whole || left > 0) out[8 * i] = low;
            if (is_whole) out[8 * i + 1] = high;
        }
        if (to.kind >= BF16S)
            *reinterpret_cast<u32*>(halves + 8 * i) = to.kind == BF16S ? pack_bf16s(low, high) : pack_halves(low, high);
    }
}
