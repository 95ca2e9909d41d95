// Packed linears for up to 8 * COLUMN_TILES activation rows on int8 tensor cores: a weight fragment meets every tile of
// activations once; each product of a block of 32 columns (or 16) is scaled in float32.
#include "linear.cuh"

constexpr int WIDTH = 8 * COLUMN_TILES;

// Scale (and minimum) of one block, or of its two halves, for rows g and g + 8.
template <class F>
struct BlockScales {
    float scale[2][2], minimum[2];  // [half][h]
    u32 minima[4];                  // SCALE_VALUES = 16 with MINS: an A fragment of minima

    DEVICE BlockScales(const F& unit, int block) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if constexpr (F::SCALE_VALUES == 32) {
                scale[0][h] = unit.unit_scale(h) * static_cast<float>(unit.scale(block, h));
                if constexpr (F::MINS) minimum[h] = unit.unit_minimum(h) * unit.minimum(block, h);
            } else {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    scale[half][h] = unit.unit_scale(h) * static_cast<float>(unit.scale(2 * block + half, h));
                    if constexpr (F::MINS) minima[2 * half + h] = unit.half_minimum(2 * block + half, h) * 0x01010101u;
                }
                if constexpr (F::MINS) minimum[h] = unit.unit_minimum(h);
            }
        }
    }
};

// Adds one block for the tile's 8 activation rows; d and s are those of columns 2t and 2t + 1.
template <class F>
DEVICE void add_block(const BlockScales<F>& scales, const u32* a, u32 x0, u32 x1, const float (&d)[2],
                      const float (&s)[2], float* total) {
    if constexpr (F::SCALE_VALUES == 32) {
        const u32 fragment[4] = {a[0], a[1], a[2], a[3]};
        int dot[4] = {0, 0, 0, 0};
        mma_bytes_k32(dot, fragment, x0, x1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            total[i] += static_cast<float>(dot[i]) * (scales.scale[0][i / 2] * d[i % 2]);
            if constexpr (F::MINS) total[i] += scales.minimum[i / 2] * s[i % 2];
        }
    } else {
        int first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
        mma_bytes_k16(first, a[0], a[1], x0);
        mma_bytes_k16(second, a[2], a[3], x1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float both = static_cast<float>(first[i]) * scales.scale[0][i / 2] +
                               static_cast<float>(second[i]) * scales.scale[1][i / 2];
            total[i] += both * d[i % 2];
        }
        if constexpr (F::MINS) {
            int dot[4] = {0, 0, 0, 0};
            mma_bytes_k32(dot, scales.minima, x0, x1);
#pragma unroll
            for (int i = 0; i < 4; i++) total[i] += static_cast<float>(dot[i]) * (scales.minimum[i / 2] * d[i % 2]);
        }
    }
}

template <class F>
DEVICE void add_unit(const F& unit, int first_chunk, const Problem& p, int lane, float (&total)[4 * COLUMN_TILES]) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int chunk = 0; chunk < F::CHUNKS; chunk++) {
        u32 a[8];
        unit.codes(chunk, a);
        const BlockScales<F> even(unit, 2 * chunk), odd(unit, 2 * chunk + 1);
        const size_t slot = static_cast<size_t>(first_chunk + chunk) * p.slots;
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++) {
            const uint4 x = *reinterpret_cast<const uint4*>(p.codes + (slot + 8 * tile + g) * 64 + t * 16);
            const float4 left = *reinterpret_cast<const float4*>(p.scales + (slot + 8 * tile + 2 * t) * 4);
            const float4 right = *reinterpret_cast<const float4*>(p.scales + (slot + 8 * tile + 2 * t + 1) * 4);
            const float d0[2] = {left.x, right.x}, s0[2] = {left.y, right.y};
            const float d1[2] = {left.z, right.z}, s1[2] = {left.w, right.w};
            add_block<F>(even, a, x.x, x.y, d0, s0, total + 4 * tile);
            add_block<F>(odd, a + 4, x.z, x.w, d1, s1, total + 4 * tile);
        }
    }
}

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
