// Packed linears for one activation row, see spans.cuh.
#include "linear.cuh"
#include "spans.cuh"

constexpr int WIDTH = 1;

struct OnlyRow {
    const Problem& p;
    int chunks;

    DEVICE const u8* codes_of(int chunk) const { return p.codes + chunk * 64; }
    DEVICE const float* scales_of(int chunk) const { return p.scales + chunk * 4; }
};

template <class F>
DEVICE void linear_group(const Part& part, const Problem& p, int group, float (*partial)[16][WIDTH + 1]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int num_units = ceil_div(p.chunks, F::CHUNKS), num_spans = ceil_div(p.chunks, SPAN_CHUNKS);
    const u8* packed = part.packed + static_cast<size_t>(group) * num_units * F::UNIT_BYTES;
    constexpr int SPAN_UNITS = Codes<F>::UNITS;
    const OnlyRow row = {p, p.chunks};
    Span<F> span;
    if (warp < num_spans) span.load_weights(packed, warp * SPAN_UNITS, num_units, lane);
    __shared__ Ending<WIDTH> ending;
    const int num_rows = ending.load_bias(part, p, group);
    grid_wait();
    ending.load_old(part, p, group, num_rows);
    if (warp < num_spans) span.load_activations(row, warp * SPAN_CHUNKS, lane);
    float total[2] = {};
    for (int index = warp; index < num_spans; index += warps) {
        span.add(lane, total);
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
        if (lane % 4 == 0) partial[warp][lane / 4 + 8 * h][0] = value;
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    ending.write(part, p, group, partial, warps);
}

KERNEL __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)
linear(const Part a, const Part b, const Problem p) {
    __shared__ float partial[MAX_WARPS][16][WIDTH + 1];
    grid_release_dependents();
    const int group = blockIdx.x;
    if (NUM_PARTS == 1 || group < a.num_groups) {
        linear_group<FORMAT>(a, p, group, partial);
    } else {
        linear_group<FORMAT_B>(b, p, group - a.num_groups, partial);
    }
}
