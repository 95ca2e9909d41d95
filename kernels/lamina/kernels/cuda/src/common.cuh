// What every kernel shares: reductions, and how a producer hands its result to the linear that comes next.
#include "intrinsics.cuh"

constexpr u32 FULL_WARP = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;
#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
    return value;
}

DEVICE float warp_max(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
    return value;
}

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A warp starts to bring consecutive memory into the L2 cache.
DEVICE void prefetch(const u8* from, int num_bytes, int lane) {
    for (int at = lane * 128; at < num_bytes; at += 32 * 128) prefetch_line(from + at);
}

// Columns 4 quad .. 4 quad + 3 of a row, zeros beyond its end.
DEVICE float4 load_quad(const float* row, int quad, int columns) {
    const int column = 4 * quad;
    const float* at = row + column;
    if (column + 4 <= columns && (reinterpret_cast<u64>(at) & 15) == 0) return *reinterpret_cast<const float4*>(at);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (column < columns) x.x = at[0];
    if (column + 1 < columns) x.y = at[1];
    if (column + 2 < columns) x.z = at[2];
    if (column + 3 < columns) x.w = at[3];
    return x;
}

// -- activations in the form a linear reads. `kind`: NONE, BYTES (few rows, int8) or HALVES (many rows, for cuBLAS).
//
//    BYTES, a chunk of 64 columns of row n at codes + (chunk * slots + n) * 64: lane t = 0..3 of a fragment finds its
//    16 codes in one load: [t][block 0, 1][half 0, 1][4 consecutive columns], column = 32 block + 16 half + 4 t + j.
//    scales[chunk * slots + n] = (d0, s0, d1, s1): d = max|x| / 127 of a block of 32, s = d * (sum of its codes).
//    HALVES: row-major, `columns` per row.

enum ActivationKind { NONE = 0, BYTES = 1, BF16S = 2, F16S = 3 };

struct Activations {
    u8* codes;
    float* scales;
    u16* halves;
    int slots;
    int columns;
    int kind;
};

DEVICE u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// All lanes of a warp call this, each with four consecutive columns 4 * quad .. 4 * quad + 3 of row n, consecutive
// lanes with consecutive quads, the first lane's quad a multiple of 8. Columns beyond the row must be passed as zeros.
// int8 codes are scaled by `scale` as well, after rounding.
DEVICE void hand_over(const Activations& to, int n, int quad, float x0, float x1, float x2, float x3,
                      float scale = 1.f) {
    const int column = 4 * quad;
    if (to.kind == BYTES) {
        // Magnitudes are compared as integers: a maximum of floats passes over NaN, which must show in the scale (A-05).
        u32 bits = max(max(magnitude_bits(x0), magnitude_bits(x1)), max(magnitude_bits(x2), magnitude_bits(x3)));
#pragma unroll
        for (int step = 1; step < 8; step *= 2) bits = max(bits, __shfl_xor_sync(FULL_WARP, bits, step));
        const float largest = __uint_as_float(bits);
        const float inverse = largest > 0.f ? 127.f / largest : 0.f;
        const int q0 = __float2int_rn(x0 * inverse), q1 = __float2int_rn(x1 * inverse);
        const int q2 = __float2int_rn(x2 * inverse), q3 = __float2int_rn(x3 * inverse);
        int sum = q0 + q1 + q2 + q3;
#pragma unroll
        for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
        if (column >= ceil_div(to.columns, 64) * 64) return;
        const size_t slot = static_cast<size_t>(column / 64) * to.slots + n;
        const int block = (column / 32) & 1, half = (column / 16) & 1, t = quad & 3;
        const u32 word = (q0 & 255) | (q1 & 255) << 8 | (q2 & 255) << 16 | static_cast<u32>(q3 & 255) << 24;
        reinterpret_cast<u32*>(to.codes + slot * 64)[t * 4 + block * 2 + half] = word;
        if ((quad & 7) == 0) {
            const float d = largest / 127.f;
            reinterpret_cast<float2*>(to.scales)[slot * 2 + block] = make_float2(d * scale, d * sum * scale);
        }
    } else if (to.kind >= BF16S && column < to.columns) {
        u16* row = to.halves + static_cast<size_t>(n) * to.columns;
        const u32 low = to.kind == BF16S ? pack_bf16s(x0, x1) : pack_halves(x0, x1);
        const u32 high = to.kind == BF16S ? pack_bf16s(x2, x3) : pack_halves(x2, x3);
        if (to.columns % 4 == 0) {
            *reinterpret_cast<uint2*>(row + column) = make_uint2(low, high);
        } else {
            const u32 values[4] = {low & 0xffff, low >> 16, high & 0xffff, high >> 16};
            for (int j = 0; j < 4 && column + j < to.columns; j++) row[column + j] = static_cast<u16>(values[j]);
        }
    }
}

// The same of the only row, BYTES: all lanes of a warp, each with its column of one block of 32.
DEVICE void hand_over_block(const Activations& to, int block, float x) {
    const int lane = threadIdx.x % 32;
    u32 bits = magnitude_bits(x);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) bits = max(bits, __shfl_xor_sync(FULL_WARP, bits, step));
    const float largest = __uint_as_float(bits);
    const int q = __float2int_rn(x * (largest > 0.f ? 127.f / largest : 0.f));
    int sum = q;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    const int word = lane % 16 / 4 * 4 + block % 2 * 2 + lane / 16;
    to.codes[block / 2 * 64 + word * 4 + lane % 4] = static_cast<u8>(q);
    const float d = largest / 127.f;
    if (lane == 0) reinterpret_cast<float2*>(to.scales)[block] = make_float2(d, d * sum);
}

// -- the rms of a row, from the sums of squares of its blocks of 32 columns. Whoever adds them up, a norm or the products
//    before and after it, does so in the same order: within a block by pairs of neighbours, pairs of pairs and so on.

// Each lane of a warp has a column of a block.
DEVICE float block_squares(float x) {
    float sum = __fmul_rn(x, x);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    return sum;
}

// Each lane has four columns, eight lanes a block.
DEVICE float block_squares(const float4& x) {
    float sum = (__fmul_rn(x.x, x.x) + __fmul_rn(x.y, x.y)) + (__fmul_rn(x.z, x.z) + __fmul_rn(x.w, x.w));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    return sum;
}

// 1 / rms, to all lanes of a warp.
DEVICE float inverse_rms(const float* squares, int num_blocks, int columns, float eps) {
    float sum = 0.f;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < num_blocks; i += 32) sum += squares[i];
    return rsqrtf(warp_sum(sum) / columns + eps);
}

enum Gate { SILU = 0, GELU_TANH = 1, SWIGLU_CLAMPED = 2 };

// The end of a gated linear; the clamped kind is gpt-oss's.
DEVICE float gated(float gate, float up, int kind) {
    if (kind == GELU_TANH) {
        const float inner = 0.7978845608028654f * gate * (1.f + 0.044715f * gate * gate);
        return 0.5f * gate * (1.f + tanhf(inner)) * up;
    }
    float slope = 1.f;
    if (kind == SWIGLU_CLAMPED) {  // NaN stays NaN
        gate = gate > 7.f ? 7.f : gate;
        up = (up > 7.f ? 7.f : up < -7.f ? -7.f : up) + 1.f;
        slope = 1.702f;
    }
    return gate / (1.f + expf(-slope * gate)) * up;
}

constexpr u64 ANY_NAN = ~0ull;

// Larger values, then smaller columns, have larger keys.
DEVICE u64 argmax_key(float value, int column) {
    const u32 bits = __float_as_uint(value + 0.f);  // -0 becomes 0, which it equals
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(ordered) << 32 | (0xffffffffu - static_cast<u32>(column));
}
