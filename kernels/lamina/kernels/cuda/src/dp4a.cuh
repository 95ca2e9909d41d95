// A unit of packed weights against a few activation rows without tensor cores: a lane multiplies its own bytes by dp4a.
// An `X` offers codes, scales and slots as common.cuh describes them.
#include "formats.cuh"

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

template <class F, class X, int COUNT>
DEVICE void add_unit(const F& unit, int first_chunk, const X& x, int lane, float (&total)[COUNT][2]) {
    Sums sums[COUNT] = {};
#pragma unroll
    for (int chunk = 0; chunk < F::CHUNKS; chunk++) {
        u32 a[8];
        unit.codes(chunk, a);
        const size_t slot = static_cast<size_t>(first_chunk + chunk) * x.slots;
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const uint4 codes = *reinterpret_cast<const uint4*>(x.codes + (slot + n) * 64 + lane % 4 * 16);
            const float4 meta = *reinterpret_cast<const float4*>(x.scales + (slot + n) * 4);
            add_block(unit, a, 2 * chunk, codes.x, codes.y, meta.x, meta.y, sums[n]);
            add_block(unit, a + 4, 2 * chunk + 1, codes.z, codes.w, meta.z, meta.w, sums[n]);
        }
    }
    // four lanes hold the same terms of 32-block minima, and will be summed
    constexpr float SHARE = F::SCALE_VALUES == 32 ? 0.25f : 1.f;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            total[n][h] += unit.unit_scale(h) * sums[n].sum[h];
            if constexpr (F::MINS) total[n][h] += unit.unit_minimum(h) * SHARE * sums[n].low[h];
        }
    }
}
