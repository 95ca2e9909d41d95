// Packed linears for one activation row on int8 tensor cores, with the eight columns of a fragment for eight blocks.
//
// A warp takes 256 columns at a time: 8 blocks of 32. Column n of B is the activations of block n, so the product of
// the weights of block b with B has the wanted dot product in column b, which lane t = b / 2 of each quad keeps: every
// lane then scales the two blocks 2t and 2t + 1 for its two rows, and nothing is done twice. Formats with a scale per
// 16 values do this with two sets of eight half-blocks.
#include "linear.cuh"

constexpr int WIDTH = 1, SPAN_CHUNKS = 4;

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
    DEVICE void load_activations(const Problem& p, int first_chunk, int lane) {
        const int g = lane / 4, t = lane % 4;
        const bool has_x = F::CHUNKS == 4 || first_chunk + g / 2 < p.chunks;
        const bool has_meta = F::CHUNKS == 4 || first_chunk + t < p.chunks;
        x = make_uint2(0, 0);
        meta = make_float4(0.f, 0.f, 0.f, 0.f);
        if (has_x) x = *reinterpret_cast<const uint2*>(p.codes + (first_chunk + g / 2) * 64 + t * 16 + g % 2 * 8);
        if (has_meta) meta = *reinterpret_cast<const float4*>(p.scales + (first_chunk + t) * 4);
    }
    DEVICE void add(int lane, float (&total)[2]) const {
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
            total[h] += static_cast<float>(mine[2 * h]) * (own.scale(0, h) * meta.x);
            total[h] += static_cast<float>(mine[2 * h + 1]) * (own.scale(1, h) * meta.z);
            if constexpr (F::MINS) total[h] += own.minimum(0, h) * meta.y + own.minimum(1, h) * meta.w;
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
    DEVICE void load_activations(const Problem& p, int first_chunk, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int set = 0; set < 2; set++) {
            const int chunk = first_chunk + 2 * set;
            x[set] = *reinterpret_cast<const u32*>(p.codes + (chunk + g / 4) * 64 + t * 16 + g % 4 * 4);
            d[set] = p.scales[(chunk + t / 2) * 4 + t % 2 * 2];
        }
    }
    DEVICE void add(int lane, float (&total)[2]) const {
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
                                          mine[set][2 * h + 1] * own.scale(set, 1, h)) * d[set];
            total[h] += own.unit_scale(h) * sum;
        }
    }
};

template <class F>
DEVICE void linear_group(const Part& part, const Problem& p, int group, float (*partial)[16][WIDTH + 1]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int num_units = ceil_div(p.chunks, F::CHUNKS), num_spans = ceil_div(p.chunks, SPAN_CHUNKS);
    const u8* packed = part.packed + static_cast<size_t>(group) * num_units * F::UNIT_BYTES;
    constexpr int SPAN_UNITS = Codes<F>::UNITS;
    Span<F> span;
    if (warp < num_spans) span.load_weights(packed, warp * SPAN_UNITS, num_units, lane);
    __shared__ Ending<WIDTH> ending;
    const int num_rows = ending.load_bias(part, p, group);
    grid_wait();
    ending.load_old(part, p, group, num_rows);
    if (warp < num_spans) span.load_activations(p, warp * SPAN_CHUNKS, lane);
    float total[2] = {};
    for (int index = warp; index < num_spans; index += warps) {
        span.add(lane, total);
        if (index + warps < num_spans) {
            span.load_weights(packed, (index + warps) * SPAN_UNITS, num_units, lane);
            span.load_activations(p, (index + warps) * SPAN_CHUNKS, lane);
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
