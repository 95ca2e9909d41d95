// Packed matrices of experts against few rows: every row reads the matrices of its own experts, whose ids it finds in
// memory. See spans.cuh; USES_DP4A: see dp4a.cuh (older cards, and a format that the other scheme has no place for).
#include "experts.cuh"
#include "formats.cuh"
#if USES_DP4A
#include "dp4a.cuh"
#else
#include "spans.cuh"
#endif

#ifndef FORMAT_B
#define FORMAT_B FORMAT
#endif

// A warp's share of a group of 16 rows against one row of activations.
template <class F>
DEVICE void add_share(const u8* matrix, int group, const Inputs& x, int warp, int warps, float* partial) {
    const int lane = threadIdx.x % 32, num_units = ceil_div(x.chunks, F::CHUNKS);
    const u8* packed = matrix + static_cast<size_t>(group) * num_units * F::UNIT_BYTES;
    float total[1][2] = {};
#if USES_DP4A
    for (int index = warp; index < num_units; index += warps) {
        F unit;
        unit.load(packed + static_cast<size_t>(index) * F::UNIT_BYTES, lane);
        add_unit(unit, index * F::CHUNKS, x, lane, total);
    }
#else
    for (int index = warp; index * SPAN_CHUNKS < x.chunks; index += warps) {
        Span<F> span;
        span.load_weights(packed, index * Codes<F>::UNITS, num_units, lane);
        span.load_activations(x, index * SPAN_CHUNKS, lane);
        span.add(lane, total[0]);
    }
#endif
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float value = total[0][h];
        value += __shfl_xor_sync(FULL_WARP, value, 1);
        value += __shfl_xor_sync(FULL_WARP, value, 2);
        if (lane % 4 == 0) partial[lane / 4 + 8 * h] = value;
    }
}

// Grid (groups of 16 rows, pairs): half of the warps multiply by the gate, half by the other matrix. Activations are
// those of the row, or, if by_pair, of the pair counted from first_row on.
KERNEL __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)
expert_gated(const Matrices gate, const Matrices up, const Selection chosen, const Inputs x, float* out, int out_stride,
             int kind, int by_pair, int first_row) {
    __shared__ float partial[MAX_WARPS][16];
    grid_wait();
    grid_release_dependents();
    const int r = first_row + blockIdx.y / chosen.k, rank = blockIdx.y % chosen.k, group = blockIdx.x;
    if (r >= *chosen.num_rows) return;
    const int expert = chosen.of(r)[rank], warp = threadIdx.x / 32, each = blockDim.x / 64;
    const Inputs mine = x.from(by_pair ? blockIdx.y : r);
    if (warp < each) {
        add_share<FORMAT>(gate.of(expert), group, mine, warp, each, partial[warp]);
    } else {
        add_share<FORMAT_B>(up.of(expert), group, mine, warp - each, each, partial[warp]);
    }
    __syncthreads();
    const int local = threadIdx.x, row = group * 16 + local;
    if (local >= 16 || row >= gate.rows) return;
    float left = gate.bias_of(expert, row), right = up.bias_of(expert, row);
    for (int i = 0; i < each; i++) {
        left += partial[i][local];
        right += partial[each + i][local];
    }
    out[static_cast<size_t>(r) * out_stride + rank * gate.rows + row] = gated(left, right, kind);
}

// Grid (groups of 16 rows, rows): warps_each warps a rank. Activations are those of pairs counted from first_row on.
KERNEL __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)
expert_linear(const Matrices down, const Selection chosen, const Inputs x, float* out, int out_stride, int accumulate,
              int warps_each, int first_row) {
    __shared__ float partial[MAX_SELECTED][MAX_WARPS][16];
    grid_wait();
    grid_release_dependents();
    const int r = first_row + blockIdx.y, group = blockIdx.x, warp = threadIdx.x / 32;
    if (r >= *chosen.num_rows) return;
    const int* experts = chosen.of(r);
    const int streams = blockDim.x / 32 / warps_each, within = warp % warps_each;
    for (int rank = warp / warps_each; rank < chosen.k; rank += streams)
        add_share<FORMAT>(down.of(experts[rank]), group, x.from(blockIdx.y * chosen.k + rank), within, warps_each,
                          partial[rank][within]);
    __syncthreads();
    const int local = threadIdx.x, row = group * 16 + local;
    if (local >= 16 || row >= down.rows) return;
    float* to = out + static_cast<size_t>(r) * out_stride + row;
    float sum = accumulate ? *to : 0.f;
    for (int rank = rank_after(experts, chosen.k, -1); rank >= 0; rank = rank_after(experts, chosen.k, experts[rank])) {
        float value = down.bias_of(experts[rank], row);
        for (int i = 0; i < warps_each; i++) value += partial[rank][i][local];
        sum += chosen.share(r, rank) * value;
    }
    *to = sum;
}
