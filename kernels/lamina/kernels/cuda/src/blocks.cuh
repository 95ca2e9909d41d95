// A unit of packed weights against up to 8 * COLUMN_TILES activation rows on int8 tensor cores: a weight fragment meets
// every tile of activations once; each product of a block of 32 columns (or 16) is scaled in float32. An `X` offers
// codes, scales and slots as common.cuh describes them.
#include "formats.cuh"

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

template <class F, class X>
DEVICE void add_unit(const F& unit, int first_chunk, const X& x, int lane, float (&total)[4 * COLUMN_TILES]) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int chunk = 0; chunk < F::CHUNKS; chunk++) {
        u32 a[8];
        unit.codes(chunk, a);
        const BlockScales<F> even(unit, 2 * chunk), odd(unit, 2 * chunk + 1);
        const size_t slot = static_cast<size_t>(first_chunk + chunk) * x.slots;
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++) {
            const uint4 codes = *reinterpret_cast<const uint4*>(x.codes + (slot + 8 * tile + g) * 64 + t * 16);
            const float4 left = *reinterpret_cast<const float4*>(x.scales + (slot + 8 * tile + 2 * t) * 4);
            const float4 right = *reinterpret_cast<const float4*>(x.scales + (slot + 8 * tile + 2 * t + 1) * 4);
            const float d0[2] = {left.x, right.x}, s0[2] = {left.y, right.y};
            const float d1[2] = {left.z, right.z}, s1[2] = {left.w, right.w};
            add_block<F>(even, a, codes.x, codes.y, d0, s0, total + 4 * tile);
            add_block<F>(odd, a + 4, codes.z, codes.w, d1, s1, total + 4 * tile);
        }
    }
}
