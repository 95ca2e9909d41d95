// 256 columns of packed weights against one activation row on int8 tensor cores, with the eight columns of a fragment
// for eight blocks.
//
// A warp takes 256 columns at a time: 8 blocks of 32. Column n of B is the activations of block n, so the product of
// the weights of block b with B has the wanted dot product in column b, which lane t = b / 2 of each quad keeps: every
// lane then scales the two blocks 2t and 2t + 1 for its two rows, and nothing is done twice. Formats with a scale per
// 16 values do this with two sets of eight half-blocks. A `Row` offers chunks, codes_of(chunk) and scales_of(chunk);
// the scales of its codes are multiplied by `scale`.
#include "formats.cuh"

constexpr int SPAN_CHUNKS = 4;

// The codes of 256 columns: one unit, or four (fewer at the end of a row) where a unit is one chunk.
template <class F>
struct Codes {
    static constexpr int UNITS = SPAN_CHUNKS / F::CHUNKS;
    F units[UNITS];

    DEVICE void load(const u8* packed, int first_unit, int num_units, int lane) {
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            if (UNITS == 1 || first_unit + i < num_units)
                units[i].load_codes(packed + static_cast<size_t>(first_unit + i) * F::UNIT_BYTES, lane);
    }
    DEVICE void chunk(int index, u32 (&a)[8]) const { units[index / F::CHUNKS].codes(index % F::CHUNKS, a); }
};

// One scale per 32 values.
template <class F, int SCALE_VALUES = F::SCALE_VALUES>
struct Span {
    Codes<F> codes;
    typename F::Own own;
    uint2 x;      // block g
    float4 meta;  // (d, s) of blocks 2t and 2t + 1

    DEVICE void load_weights(const u8* packed, int first_unit, int num_units, int lane) {
        codes.load(packed, first_unit, num_units, lane);
        const int unit = first_unit + (F::CHUNKS == 1 ? lane % 4 : 0);
        if (F::CHUNKS == 4 || unit < num_units) own.load(packed + static_cast<size_t>(unit) * F::UNIT_BYTES, lane);
    }
    template <class Row>
    DEVICE void load_activations(const Row& row, int first_chunk, int lane) {
        const int g = lane / 4, t = lane % 4;
        const bool has_x = F::CHUNKS == 4 || first_chunk + g / 2 < row.chunks;
        const bool has_meta = F::CHUNKS == 4 || first_chunk + t < row.chunks;
        x = make_uint2(0, 0);
        meta = make_float4(0.f, 0.f, 0.f, 0.f);
        if (has_x) x = *reinterpret_cast<const uint2*>(row.codes_of(first_chunk + g / 2) + t * 16 + g % 2 * 8);
        if (has_meta) meta = *reinterpret_cast<const float4*>(row.scales_of(first_chunk + t));
    }
    DEVICE void add(int lane, float (&total)[2], float scale = 1.f) const {
        const int t = lane % 4;
        int mine[4] = {0, 0, 0, 0};  // [h][block 2t, 2t + 1]
#pragma unroll
        for (int chunk = 0; chunk < SPAN_CHUNKS; chunk++) {
            u32 a[8];
            codes.chunk(chunk, a);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u32 fragment[4] = {a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3]};
                int dot[4] = {0, 0, 0, 0};
                mma_bytes_k32(dot, fragment, x.x, x.y);
                if (t == chunk) {
                    mine[j] = dot[j];
                    mine[2 + j] = dot[2 + j];
                }
            }
        }
        if (F::CHUNKS == 1 && meta.x == 0.f && meta.z == 0.f) return;  // beyond the row's end, or nothing to add
#pragma unroll
        for (int h = 0; h < 2; h++) {
            total[h] += static_cast<float>(mine[2 * h]) * (own.scale(0, h) * (meta.x * scale));
            total[h] += static_cast<float>(mine[2 * h + 1]) * (own.scale(1, h) * (meta.z * scale));
            if constexpr (F::MINS) total[h] += own.minimum(0, h) * (meta.y * scale) + own.minimum(1, h) * (meta.w * scale);
        }
    }
};

// One scale per 16 values: half-blocks 0 .. 7 and 8 .. 15.
template <class F>
struct Span<F, 16> {
    Codes<F> codes;
    typename F::Own own;
    u32 x[2];    // half-blocks g and 8 + g
    float d[2];  // blocks t and 4 + t, to which half-blocks 2t, 2t + 1 and 8 + 2t, 9 + 2t belong

    DEVICE void load_weights(const u8* packed, int first_unit, int num_units, int lane) {
        codes.load(packed, first_unit, num_units, lane);
        own.load(packed + static_cast<size_t>(first_unit) * F::UNIT_BYTES, lane);
    }
    template <class Row>
    DEVICE void load_activations(const Row& row, int first_chunk, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int set = 0; set < 2; set++) {
            const int chunk = first_chunk + 2 * set;
            x[set] = *reinterpret_cast<const u32*>(row.codes_of(chunk + g / 4) + t * 16 + g % 4 * 4);
            d[set] = row.scales_of(chunk + t / 2)[t % 2 * 2];
        }
    }
    DEVICE void add(int lane, float (&total)[2], float scale = 1.f) const {
        const int t = lane % 4;
        int mine[2][4] = {};  // [set][h][half-block 2t, 2t + 1]
#pragma unroll
        for (int chunk = 0; chunk < SPAN_CHUNKS; chunk++) {
            u32 a[8];
            codes.chunk(chunk, a);
#pragma unroll
            for (int half_block = 0; half_block < 4; half_block++) {
                const int column = chunk % 2 * 4 + half_block, set = chunk / 2, j = half_block % 2;
                int dot[4] = {0, 0, 0, 0};
                mma_bytes_k16(dot, a[2 * half_block], a[2 * half_block + 1], x[set]);
                if (t == column / 2) {
                    mine[set][j] = dot[j];
                    mine[set][2 + j] = dot[2 + j];
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0.f;
#pragma unroll
            for (int set = 0; set < 2; set++)
                sum += static_cast<float>(mine[set][2 * h] * own.scale(set, 0, h) +
                                          mine[set][2 * h + 1] * own.scale(set, 1, h)) * (d[set] * scale);
            total[h] += own.unit_scale(h) * sum;
        }
    }
};
