// What the kernels of a mixture of experts share.
#include "common.cuh"

constexpr int MAX_SELECTED = 32;

// One matrix of each expert: that of expert 0, and how far on the next one is.
struct Matrices {
    const u8* first;
    const float* bias;  // null: none
    u64 expert_bytes;
    int bias_step, rows;

    DEVICE const u8* of(int expert) const { return first + expert * expert_bytes; }
    DEVICE float bias_of(int expert, int row) const {
        return bias ? bias[static_cast<size_t>(expert) * bias_step + row] : 0.f;
    }
};

// The k experts of each row. A pair is a row and one of its ranks: r * k + rank.
struct Selection {
    const int* experts;
    const float* shares;
    int expert_stride, share_stride, k;
    const int* num_rows;

    DEVICE const int* of(int r) const { return experts + static_cast<size_t>(r) * expert_stride; }
    DEVICE float share(int r, int rank) const { return shares[static_cast<size_t>(r) * share_stride + rank]; }
};

// Prepared activations, see common.cuh: of row n, those of chunk c are `slots` rows further on than those of c - 1.
struct Inputs {
    const u8* codes;
    const float* scales;
    int slots, chunks;

    DEVICE Inputs from(int n) const { return {codes + static_cast<size_t>(n) * 64, scales + n * 4, slots, chunks}; }
    DEVICE const u8* codes_of(int chunk) const { return codes + static_cast<size_t>(chunk) * slots * 64; }
    DEVICE const float* scales_of(int chunk) const { return scales + static_cast<size_t>(chunk) * slots * 4; }
};

// The rank of the next expert in order of id after `expert`, or -1.
DEVICE int rank_after(const int* experts, int k, int expert) {
    int best = -1;
    for (int rank = 0; rank < k; rank++)
        if (experts[rank] > expert && (best < 0 || experts[rank] < experts[best])) best = rank;
    return best;
}
