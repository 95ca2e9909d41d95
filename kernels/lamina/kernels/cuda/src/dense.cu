// Linear layers on f32, f16 and bf16 weights for 1 .. 8 rows of float32 activations, and their rows as embeddings.
// Weights are [rows][stride] with stride a multiple of 8; ELEMENT is 0 (f32), 1 (f16) or 2 (bf16).
#include "common.cuh"

#ifndef COLUMNS
#define COLUMNS 1
#endif

enum Flags { ACCUMULATE = 1 };

#if ELEMENT == 0
typedef float Stored;
DEVICE float widen(float x) { return x; }
#else
typedef u16 Stored;
DEVICE float widen(u16 x) { return ELEMENT == 1 ? half_to_float(x) : bf16_to_float(x); }
#endif

DEVICE void load_eight(const Stored* at, float (&w)[8]) {
#if ELEMENT == 0
    u32 words[2][4];
    stream_load(words[0], at);
    stream_load(words[1], at + 4);
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = __uint_as_float(words[i / 4][i % 4]);
#else
    u32 words[4];
    stream_load(words, at);
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = widen(static_cast<u16>((words[i / 2] >> (16 * (i % 2))) & 0xffff));
#endif
}

// One warp a row of the weight; grid (blocks of rows, tiles of COLUMNS activation rows).
KERNEL __launch_bounds__(256)
linear(const Stored* weight, int weight_stride, int weight_rows, const float* x, int x_stride, int in_features,
       const float* bias, float* out, int out_stride, int flags, const int* num_rows) {
    grid_release_dependents();
    grid_wait();
    const int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= weight_rows) return;
    const int first = blockIdx.y * COLUMNS, rows = min(*num_rows - first, COLUMNS);
    x += static_cast<size_t>(first) * x_stride;
    out += static_cast<size_t>(first) * out_stride;
    const Stored* from = weight + static_cast<size_t>(row) * weight_stride;
    float sum[COLUMNS] = {};
    for (int column = 8 * lane; column < in_features; column += 256) {
        float w[8];
        load_eight(from + column, w);
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            if (n >= rows) break;
            const float* at = x + static_cast<size_t>(n) * x_stride + column;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (column + i < in_features) sum[n] += w[i] * at[i];
        }
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
        const float value = warp_sum(sum[n]);
        if (lane != 0 || n >= rows) continue;
        float* to = out + static_cast<size_t>(n) * out_stride + row;
        *to = value + (bias ? bias[row] : 0.f) + (flags & ACCUMULATE ? *to : 0.f);
    }
}

// Rows first_row .. of the weight as [num_rows, columns] of another type (0 f32, 2 bf16, 3 f16), for cuBLAS.
KERNEL __launch_bounds__(256)
convert(const Stored* weight, int weight_stride, void* out, int first_row, int columns, int target) {
    grid_release_dependents();
    grid_wait();
    const int row = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= columns) return;
    const float value = widen(weight[static_cast<size_t>(first_row + row) * weight_stride + i]);
    const size_t at = static_cast<size_t>(row) * columns + i;
    if (target == 0) {
        static_cast<float*>(out)[at] = value;
    } else {
        static_cast<u16*>(out)[at] = static_cast<u16>(target == 2 ? float_to_bf16(value) : float_to_half(value));
    }
}

// As `embed` of dequantise.cu. Grid (blocks, rows).
KERNEL __launch_bounds__(256)
embed(const Stored* table, int table_stride, const int* tokens, const int* num_rows, float* out, int out_stride,
      int first, int rows, int num_tokens, int columns, float scale) {
    grid_release_dependents();
    grid_wait();
    const int n = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= *num_rows || i >= columns) return;
    const int token = tokens[n];
    const bool known = token >= 0 && token < num_tokens;
    if (known ? token < first || token >= first + rows : first != 0) return;
    float value = __uint_as_float(0x7fc00000u);
    if (known) value = widen(table[static_cast<size_t>(token - first) * table_stride + i]);
    out[static_cast<size_t>(n) * out_stride + i] = scale * value;
}
