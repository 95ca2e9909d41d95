// Packed linears for up to 8 * COLUMN_TILES activation rows, see blocks.cuh.
#include "linear.cuh"
#include "blocks.cuh"

constexpr int WIDTH = 8 * COLUMN_TILES;

template <class F>
DEVICE void linear_group(const Part& part, const Problem& p, int group, float (*partial)[16][WIDTH + 1]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    const int num_units = ceil_div(p.chunks, F::CHUNKS);
    const u8* packed = part.packed + static_cast<size_t>(group) * num_units * F::UNIT_BYTES;
    F unit;
    if (warp < num_units) unit.load(packed + static_cast<size_t>(warp) * F::UNIT_BYTES, lane);
    __shared__ Ending<WIDTH> ending;
    const int num_rows = ending.load_bias(part, p, group);
    grid_wait();
    ending.load_old(part, p, group, num_rows);
    float total[4 * COLUMN_TILES] = {};
    for (int index = warp; index < num_units;) {
        add_unit(unit, index * F::CHUNKS, p, lane, total);
        index += warps;
        if (index < num_units) unit.load(packed + static_cast<size_t>(index) * F::UNIT_BYTES, lane);
    }
#pragma unroll
    for (int i = 0; i < 4 * COLUMN_TILES; i++)
        partial[warp][g + 8 * ((i % 4) / 2)][8 * (i / 4) + 2 * t + i % 2] = total[i];
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
