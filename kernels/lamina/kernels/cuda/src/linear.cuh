// What the linear kernels on packed weights share: the problem, how their warps divide it, and its end.
//
// A block computes a group of 16 weight rows: its warps share out the columns and add up through shared memory. A file
// that includes this defines WIDTH (activation rows of a block) and, per format, `lane_sums`: what a warp adds to the
// group's sums. FORMAT_B, if defined, is the type of a second part, served by the blocks that follow the first part's.
#include "formats.cuh"

#ifndef FORMAT_B
#define FORMAT_B FORMAT
#define NUM_PARTS 1
#else
#define NUM_PARTS 2
#endif

enum Flags { ACCUMULATE = 1, GATED = 2, GELU = 4 };

// Rows first .. first + rows - 1 of the stacked weight. half > 0: two interleaved parts of `half` rows each, a group
// holds 8 rows of the first and the same 8 of the second.
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

// Row of the part that stands at `local` in this group, or -1.
DEVICE int row_at(const Part& part, int group, int local) {
    if (part.half == 0) return group * 16 + local < part.rows ? group * 16 + local : -1;
    const int row = group * 8 + local % 8;
    return row < part.half ? row + (local / 8) * part.half : -1;
}

template <int WIDTH>
DEVICE void write_group(const Part& part, const Problem& p, int group, const float (*partial)[16][WIDTH + 1],
                        int warps) {
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
