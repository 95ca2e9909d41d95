// Packed linears for one activation row, see spans.cuh.
//
// A block computes a group of 16 weight rows, or two: then it does a norm's share for the 32 columns of its results as
// well, which is their codes for the linear that comes next, and their sum of squares.
#include "linear.cuh"
#include "spans.cuh"

#ifndef GROUPS
#define GROUPS 1
#endif

constexpr int WIDTH = 1;

struct OnlyRow {
    const Problem& p;
    int chunks;

    DEVICE const u8* codes_of(int chunk) const { return p.codes + chunk * 64; }
    DEVICE const float* scales_of(int chunk) const { return p.scales + chunk * 4; }
};

// A norm of the activations of which the linear before has done its share; null squares: none.
struct NormBefore {
    const float* squares;
    int num_blocks, columns;
    float eps;

    DEVICE float scale() const { return squares ? inverse_rms(squares, num_blocks, columns, eps) : 1.f; }
};

// A norm of the results of which this linear does its share.
struct NormAfter {
    Activations to;
    const float* gain;
    float* squares;
};

template <class F>
DEVICE void linear_groups(const Part& part, const Problem& p, const NormBefore& before, const NormAfter& after,
                          int first_group, float (*partial)[16][WIDTH + 1]) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / (32 * GROUPS), warp_of_block = threadIdx.x / 32;
    const int team = GROUPS == 1 ? 0 : warp_of_block / warps, warp = warp_of_block - team * warps;
    const int num_units = ceil_div(p.chunks, F::CHUNKS), num_spans = ceil_div(p.chunks, SPAN_CHUNKS);
    const u8* packed = part.packed + static_cast<size_t>(first_group + team) * num_units * F::UNIT_BYTES;
    constexpr int SPAN_UNITS = Codes<F>::UNITS;
    const OnlyRow row = {p, p.chunks};
    Span<F> span;
    if (warp < num_spans) span.load_weights(packed, warp * SPAN_UNITS, num_units, lane);
    __shared__ Ending<WIDTH, GROUPS> ending;
    __shared__ float gain[16 * GROUPS];
    const int num_rows = ending.load_bias(part, p, first_group);
    if (GROUPS == 2 && threadIdx.x < 32) copy_word_async(gain + lane, after.gain + first_group * 16 + lane, true);
    grid_wait();
    ending.load_old(part, p, first_group, num_rows);
    if (warp < num_spans) span.load_activations(row, warp * SPAN_CHUNKS, lane);
    const float scale = before.scale();
    float total[2] = {};
    for (int index = warp; index < num_spans; index += warps) {
        span.add(lane, total, scale);
        if (index + warps < num_spans) {
            span.load_weights(packed, (index + warps) * SPAN_UNITS, num_units, lane);
            span.load_activations(row, (index + warps) * SPAN_CHUNKS, lane);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float value = total[h];
        value += __shfl_xor_sync(FULL_WARP, value, 1);
        value += __shfl_xor_sync(FULL_WARP, value, 2);
        if (lane % 4 == 0) partial[warp_of_block][lane / 4 + 8 * h][0] = value;
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    if constexpr (GROUPS == 1) {
        ending.write(part, p, first_group, partial, warps);
    } else if (threadIdx.x < 32) {
        const float value = ending.write_only_row(part, p, first_group, partial, warps), sum = block_squares(value);
        if (lane == 0) after.squares[blockIdx.x] = sum;
        hand_over_block(after.to, blockIdx.x, __fmul_rn(value, gain[lane]));
    }
}

KERNEL __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)
linear(const Part a, const Part b, const Problem p, const NormBefore before, const NormAfter after) {
    __shared__ float partial[MAX_WARPS][16][WIDTH + 1];
    grid_release_dependents();
    const int group = blockIdx.x * GROUPS;
    if (NUM_PARTS == 1 || group < a.num_groups) {
        linear_groups<FORMAT>(a, p, before, after, group, partial);
    } else {
        linear_groups<FORMAT_B>(b, p, before, after, group - a.num_groups, partial);
    }
}
