// Packed linears for COLUMNS = 1 .. 8 activation rows without tensor cores: a lane multiplies its own bytes by dp4a.
#include "linear.cuh"

constexpr int WIDTH = COLUMNS;

DEVICE float weighed(int dot, float scale) { return static_cast<float>(dot) * scale; }
DEVICE float weighed(int dot, int scale) { return static_cast<float>(dot * scale); }
DEVICE int dot4(u32 a, u32 x, int sum) { return __dp4a(static_cast<int>(a), static_cast<int>(x), sum); }

// What a lane accumulates: rows g and g + 8 of its own columns.
struct Sums {
    float sum[2], low[2];
};

// One block of 32 columns for one activation row with scale d and scaled sum s.
template <class F>
DEVICE void add_block(const F& unit, const u32* a, int block, u32 x0, u32 x1, float d, float s, Sums& to) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int first = dot4(a[h], x0, 0);
        if constexpr (F::SCALE_VALUES == 32) {
            to.sum[h] += weighed(dot4(a[2 + h], x1, first), unit.scale(block, h)) * d;
            if constexpr (F::MINS) to.low[h] += unit.minimum(block, h) * s;
        } else {
            const int second = dot4(a[2 + h], x1, 0);
            const int both = first * unit.scale(2 * block, h) + second * unit.scale(2 * block + 1, h);
            to.sum[h] += static_cast<float>(both) * d;
            if constexpr (F::MINS) {
                const int dot = dot4(unit.half_minimum(2 * block, h) * 0x01010101u, x0, 0);
                to.low[h] += static_cast<float>(dot4(unit.half_minimum(2 * block + 1, h) * 0x01010101u, x1, dot)) * d;
            }
        }
    }
}

template <class F>
DEVICE void add_unit(const F& unit, int first_chunk, const Problem& p, int lane, float (&total)[COLUMNS][2]) {
    Sums sums[COLUMNS] = {};
#pragma unroll
    for (int chunk = 0; chunk < F::CHUNKS; chunk++) {
        u32 a[8];
        unit.codes(chunk, a);
        const size_t slot = static_cast<size_t>(first_chunk + chunk) * p.slots;
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            const uint4 x = *reinterpret_cast<const uint4*>(p.codes + (slot + n) * 64 + lane % 4 * 16);
            const float4 meta = *reinterpret_cast<const float4*>(p.scales + (slot + n) * 4);
            add_block(unit, a, 2 * chunk, x.x, x.y, meta.x, meta.y, sums[n]);
            add_block(unit, a + 4, 2 * chunk + 1, x.z, x.w, meta.z, meta.w, sums[n]);
        }
    }
    // four lanes hold the same terms of 32-block minima, and will be summed
    constexpr float SHARE = F::SCALE_VALUES == 32 ? 0.25f : 1.f;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            total[n][h] += unit.unit_scale(h) * sums[n].sum[h];
            if constexpr (F::MINS) total[n][h] += unit.unit_minimum(h) * SHARE * sums[n].low[h];
        }
    }
}

template <class F>
DEVICE void linear_group(const Part& part, const Problem& p, int group, float (*partial)[16][WIDTH + 1]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int num_units = ceil_div(p.chunks, F::CHUNKS);
    const u8* packed = part.packed + static_cast<size_t>(group) * num_units * F::UNIT_BYTES;
    F unit;
    if (warp < num_units) unit.load(packed + static_cast<size_t>(warp) * F::UNIT_BYTES, lane);
    __shared__ Ending<WIDTH> ending;
    const int num_rows = ending.load_bias(part, p, group);
    grid_wait();
    ending.load_old(part, p, group, num_rows);
    float total[COLUMNS][2] = {};
    for (int index = warp; index < num_units;) {
        add_unit(unit, index * F::CHUNKS, p, lane, total);
        index += warps;
        if (index < num_units) unit.load(packed + static_cast<size_t>(index) * F::UNIT_BYTES, lane);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float value = total[n][h];
            value += __shfl_xor_sync(FULL_WARP, value, 1);
            value += __shfl_xor_sync(FULL_WARP, value, 2);
            if (lane % 4 == 0) partial[warp][lane / 4 + 8 * h][n] = value;
        }
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
