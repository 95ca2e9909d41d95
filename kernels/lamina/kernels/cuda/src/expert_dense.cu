// Float matrices of experts, [rows][stride] each with stride a multiple of 8: every row reads those of its own experts.
#include "experts.cuh"

enum Element { F32 = 0, F16 = 1, BF16 = 2 };

DEVICE void load_eight(const u8* row, int element, int column, float (&w)[8]) {
    u32 words[2][4];
    stream_load(words[0], row + column * (element == F32 ? 4 : 2));
    if (element == F32) stream_load(words[1], row + column * 4 + 16);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 half = (words[0][i / 2] >> (16 * (i % 2))) & 0xffff;
        w[i] = element == F32 ? __uint_as_float(words[i / 4][i % 4])
                              : element == F16 ? half_to_float(half) : bf16_to_float(half);
    }
}

// A warp's dot product of a weight row and a row of activations.
DEVICE float dot(const u8* row, int element, const float* x, int columns, int lane) {
    float sum = 0.f;
    for (int column = 8 * lane; column < columns; column += 256) {
        float w[8];
        load_eight(row, element, column, w);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (column + i < columns) sum += w[i] * x[column + i];
    }
    return warp_sum(sum);
}

// Grid (pairs, blocks of 8 weight rows): there may be more pairs than y counts up to.
KERNEL __launch_bounds__(256)
expert_gated(const Matrices gate, const Matrices up, const Selection chosen, int gate_element, int up_element,
             int weight_stride, const float* x, int x_stride, int columns, float* out, int out_stride, int kind) {
    grid_wait();
    grid_release_dependents();
    const int r = blockIdx.x / chosen.k, rank = blockIdx.x % chosen.k, lane = threadIdx.x % 32;
    const int row = blockIdx.y * 8 + threadIdx.x / 32;
    if (r >= *chosen.num_rows || row >= gate.rows) return;
    const int expert = chosen.of(r)[rank];
    const size_t at = static_cast<size_t>(row) * weight_stride;
    const float* mine = x + static_cast<size_t>(r) * x_stride;
    const float left = dot(gate.of(expert) + at * (gate_element == F32 ? 4 : 2), gate_element, mine, columns, lane);
    const float right = dot(up.of(expert) + at * (up_element == F32 ? 4 : 2), up_element, mine, columns, lane);
    if (lane != 0) return;
    out[static_cast<size_t>(r) * out_stride + rank * gate.rows + row] =
        gated(left + gate.bias_of(expert, row), right + up.bias_of(expert, row), kind);
}

// Grid (blocks of 8 weight rows, rows).
KERNEL __launch_bounds__(256)
expert_linear(const Matrices down, const Selection chosen, int element, int weight_stride, const float* x, int x_stride,
              int columns, float* out, int out_stride, int accumulate) {
    grid_wait();
    grid_release_dependents();
    const int r = blockIdx.y, lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
    if (r >= *chosen.num_rows || row >= down.rows) return;
    const int* experts = chosen.of(r);
    const size_t at = static_cast<size_t>(row) * weight_stride * (element == F32 ? 4 : 2);
    float* to = out + static_cast<size_t>(r) * out_stride + row;
    float sum = accumulate ? *to : 0.f;
    for (int rank = rank_after(experts, chosen.k, -1); rank >= 0; rank = rank_after(experts, chosen.k, experts[rank])) {
        const float* mine = x + static_cast<size_t>(r) * x_stride + rank * columns;
        const float value = dot(down.of(experts[rank]) + at, element, mine, columns, lane);
        sum += chosen.share(r, rank) * (value + down.bias_of(experts[rank], row));
    }
    if (lane == 0) *to = sum;
}
