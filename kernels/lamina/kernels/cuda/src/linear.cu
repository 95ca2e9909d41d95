// Linear layers on packed weights for few rows of int8 activations: bound by the bytes of the weights.
//
// A block computes a group of 16 weight rows: its warps share out the units along the columns and add up through shared
// memory. COLUMN_TILES > 0: int8 tensor cores, 8 * COLUMN_TILES activation rows. COLUMN_TILES = 0: dp4a, COLUMNS rows.
// FORMAT_B, if defined, is the type of a second part of the weight, served by the blocks that follow the first part's.
#include "formats.cuh"

#ifndef FORMAT_B
#define FORMAT_B FORMAT
#define NUM_PARTS 1
#else
#define NUM_PARTS 2
#endif

constexpr int WIDTH = COLUMN_TILES ? 8 * COLUMN_TILES : COLUMNS;  // activation rows of a block

enum Flags { ACCUMULATE = 1, GATED = 2, GELU = 4 };

// Rows first .. first + rows - 1 of the stacked weight. half > 0: two interleaved parts of `half` rows each, a group holds
// 8 rows of the first and the same 8 of the second.
struct Part {
    const u8* packed;
    const float* bias;
    int num_groups, rows, half, first;
};

struct Problem {
    const u8* codes;
    const float* scales;
    const int* num_rows;
    float* out;
    int slots, chunks, out_stride, flags;
};

DEVICE float weighed(int dot, float scale) { return static_cast<float>(dot) * scale; }
DEVICE float weighed(int dot, int scale) { return static_cast<float>(dot * scale); }

template <class F>
struct Minimum16 {
    DEVICE static u32 bytes(const F&, int, int) { return 0; }
};
template <>
struct Minimum16<Q2_K> {
    DEVICE static u32 bytes(const Q2_K& unit, int half_block, int h) { return unit.half_minimum(half_block, h) * 0x01010101u; }
};

// One block of 32 columns for one activation row, the lane's own columns only: adds into sum and low (rows g, g + 8).
template <class F>
DEVICE void dot_block(const F& unit, const u32* a, int block, u32 x0, u32 x1, float d, float s, float (&sum)[2],
                      float (&low)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int first = __dp4a(static_cast<int>(a[h]), static_cast<int>(x0), 0);
        if constexpr (F::SCALE_VALUES == 32) {
            const int dot = __dp4a(static_cast<int>(a[2 + h]), static_cast<int>(x1), first);
            sum[h] += weighed(dot, unit.scale(block, h)) * d;
            if constexpr (F::MINS) low[h] += unit.minimum(block, h) * s;  // s counts in each lane of four: see finish
        } else {
            const int second = __dp4a(static_cast<int>(a[2 + h]), static_cast<int>(x1), 0);
            sum[h] += static_cast<float>(first * unit.scale(2 * block, h) + second * unit.scale(2 * block + 1, h)) * d;
            if constexpr (F::MINS) {
                const int dot = __dp4a(static_cast<int>(Minimum16<F>::bytes(unit, 2 * block, h)), static_cast<int>(x0), 0);
                low[h] += static_cast<float>(__dp4a(static_cast<int>(Minimum16<F>::bytes(unit, 2 * block + 1, h)),
                                                    static_cast<int>(x1), dot)) * d;
            }
        }
    }
}

// The same for 8 activation rows by tensor cores; d and s of columns 2t and 2t + 1.
template <class F>
DEVICE void mma_block(const F& unit, const u32* a, int block, u32 x0, u32 x1, const float (&d)[2], const float (&s)[2],
                      float (&sum)[4], float (&low)[4]) {
    const u32 fragment[4] = {a[0], a[1], a[2], a[3]};
    if constexpr (F::SCALE_VALUES == 32) {
        int dot[4] = {0, 0, 0, 0};
        mma_bytes_k32(dot, fragment, x0, x1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[i] += weighed(dot[i], unit.scale(block, i / 2)) * d[i % 2];
            if constexpr (F::MINS) low[i] += unit.minimum(block, i / 2) * s[i % 2];
        }
    } else {
        int first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
        mma_bytes_k16(first, a[0], a[1], x0);
        mma_bytes_k16(second, a[2], a[3], x1);
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[i] += static_cast<float>(first[i] * unit.scale(2 * block, i / 2) +
                                         second[i] * unit.scale(2 * block + 1, i / 2)) * d[i % 2];
        if constexpr (F::MINS) {
            const u32 minima[4] = {Minimum16<F>::bytes(unit, 2 * block, 0), Minimum16<F>::bytes(unit, 2 * block, 1),
                                   Minimum16<F>::bytes(unit, 2 * block + 1, 0), Minimum16<F>::bytes(unit, 2 * block + 1, 1)};
            int dot[4] = {0, 0, 0, 0};
            mma_bytes_k32(dot, minima, x0, x1);
#pragma unroll
            for (int i = 0; i < 4; i++) low[i] += static_cast<float>(dot[i]) * d[i % 2];
        }
    }
}

// What a lane accumulates over its warp's units: dp4a [h][column] of its own columns, mma [tile][D fragment].
constexpr int NUM_SUMS = COLUMN_TILES ? 4 * COLUMN_TILES : 2 * COLUMNS;

template <class F>
DEVICE void add_unit(const F& unit, int first_chunk, const Problem& p, int lane, float (&total)[NUM_SUMS]) {
    const int g = lane / 4, t = lane % 4;
    float sum[NUM_SUMS] = {}, low[NUM_SUMS] = {};
#pragma unroll
    for (int chunk = 0; chunk < F::CHUNKS; chunk++) {
        u32 a[8];
        unit.codes(chunk, a);
        const size_t slot = static_cast<size_t>(first_chunk + chunk) * p.slots;
#if COLUMN_TILES
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++) {
            const uint4 x = *reinterpret_cast<const uint4*>(p.codes + (slot + 8 * tile + g) * 64 + t * 16);
            const float4 left = *reinterpret_cast<const float4*>(p.scales + (slot + 8 * tile + 2 * t) * 4);
            const float4 right = *reinterpret_cast<const float4*>(p.scales + (slot + 8 * tile + 2 * t + 1) * 4);
            float(&tile_sum)[4] = *reinterpret_cast<float(*)[4]>(sum + 4 * tile);
            float(&tile_low)[4] = *reinterpret_cast<float(*)[4]>(low + 4 * tile);
            const float d0[2] = {left.x, right.x}, s0[2] = {left.y, right.y};
            const float d1[2] = {left.z, right.z}, s1[2] = {left.w, right.w};
            mma_block(unit, a, 2 * chunk, x.x, x.y, d0, s0, tile_sum, tile_low);
            mma_block(unit, a + 4, 2 * chunk + 1, x.z, x.w, d1, s1, tile_sum, tile_low);
        }
#else
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            const uint4 x = *reinterpret_cast<const uint4*>(p.codes + (slot + n) * 64 + t * 16);
            const float4 meta = *reinterpret_cast<const float4*>(p.scales + (slot + n) * 4);
            float(&row_sum)[2] = *reinterpret_cast<float(*)[2]>(sum + 2 * n);
            float(&row_low)[2] = *reinterpret_cast<float(*)[2]>(low + 2 * n);
            dot_block(unit, a, 2 * chunk, x.x, x.y, meta.x, meta.y, row_sum, row_low);
            dot_block(unit, a + 4, 2 * chunk + 1, x.z, x.w, meta.z, meta.w, row_sum, row_low);
        }
#endif
    }
    // dp4a: four lanes hold the same 32-block minimum terms and are summed in the end
    constexpr float SHARE = !COLUMN_TILES && F::SCALE_VALUES == 32 ? 0.25f : 1.f;
#pragma unroll
    for (int i = 0; i < NUM_SUMS; i++) {
        const int h = COLUMN_TILES ? (i % 4) / 2 : i % 2;
        total[i] += unit.unit_scale(h) * sum[i];
        if constexpr (F::MINS) total[i] += unit.unit_minimum(h) * SHARE * low[i];
    }
}

DEVICE void store_sums(float (*partial)[WIDTH + 1], int lane, float (&total)[NUM_SUMS]) {
    const int g = lane / 4, t = lane % 4;
#if COLUMN_TILES
#pragma unroll
    for (int i = 0; i < NUM_SUMS; i++) partial[g + 8 * ((i % 4) / 2)][8 * (i / 4) + 2 * t + i % 2] = total[i];
#else
#pragma unroll
    for (int i = 0; i < NUM_SUMS; i++) {
        float value = total[i];
        value += __shfl_xor_sync(FULL_WARP, value, 1);
        value += __shfl_xor_sync(FULL_WARP, value, 2);
        if (t == 0) partial[g + 8 * (i % 2)][i / 2] = value;
    }
#endif
}

// Row of the part that stands at `local` in this group, or -1.
DEVICE int row_at(const Part& part, int group, int local) {
    if (part.half == 0) return group * 16 + local < part.rows ? group * 16 + local : -1;
    const int row = group * 8 + local % 8;
    return row < part.half ? row + (local / 8) * part.half : -1;
}

DEVICE void write_group(const Part& part, const Problem& p, int group, const float (*partial)[16][WIDTH + 1], int warps) {
    const int num_rows = min(*p.num_rows, WIDTH);
    const int per_row = p.flags & GATED ? 8 : 16;
    for (int i = threadIdx.x; i < per_row * num_rows; i += blockDim.x) {
        const int local = i % per_row, n = i / per_row;
        const int row = row_at(part, group, local);
        if (row < 0) continue;
        float value = part.bias ? part.bias[row] : 0.f;
        for (int warp = 0; warp < warps; warp++) value += partial[warp][local][n];
        if (p.flags & GATED) {
            float up = part.bias ? part.bias[row + part.half] : 0.f;
            for (int warp = 0; warp < warps; warp++) up += partial[warp][local + 8][n];
            value = activate(value, p.flags & GELU) * up;
        }
        float* to = p.out + static_cast<size_t>(n) * p.out_stride + part.first + row;
        *to = p.flags & ACCUMULATE ? *to + value : value;
    }
}

template <class F>
DEVICE void linear_group(const Part& part, const Problem& p, int group, float (*partial)[16][WIDTH + 1]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int num_units = ceil_div(p.chunks, F::CHUNKS);
    const u8* packed = part.packed + static_cast<size_t>(group) * num_units * F::UNIT_BYTES;
    F unit;
    if (warp < num_units) unit.load(packed + static_cast<size_t>(warp) * F::UNIT_BYTES, lane);
    grid_wait();
    float total[NUM_SUMS] = {};
    for (int index = warp; index < num_units;) {
        add_unit(unit, index * F::CHUNKS, p, lane, total);
        index += warps;
        if (index < num_units) unit.load(packed + static_cast<size_t>(index) * F::UNIT_BYTES, lane);
    }
    store_sums(partial[warp], lane, total);
    __syncthreads();
    write_group(part, p, group, partial, warps);
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
