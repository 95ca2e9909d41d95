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

enum Flags { ACCUMULATE = 1, GATED = 2, GATE_SHIFT = 2 };  // and the kind of gate

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

// What the end of a group needs of memory, copied to shared memory ahead of it: a round trip at the end would delay all
// that follows, and registers are scarce. Results are numbered n * per_row + local.
template <int WIDTH, int NUM_GROUPS = 1>
struct Ending {
    static constexpr int RESULTS = 16 * NUM_GROUPS * WIDTH;
    static constexpr int COUNT = RESULTS < 32 * MAX_WARPS ? RESULTS : 32 * MAX_WARPS;
    int num_rows;
    float bias[COUNT], up_bias[COUNT], old[COUNT];

    DEVICE static int per_row(const Problem& p) { return p.flags & GATED ? 8 : 16 * NUM_GROUPS; }

    // Before grid_wait; the number of rows, for after it.
    DEVICE int load_bias(const Part& part, const Problem& p, int group) {
        const int i = threadIdx.x, row = row_at(part, group, i % per_row(p));
        if (i == 0) copy_word_async(&num_rows, p.num_rows, true);
        if (i >= COUNT) return 0;
        const bool is_there = part.bias && row >= 0;
        copy_word_async(bias + i, part.bias + max(row, 0), is_there);
        copy_word_async(up_bias + i, part.bias + max(row, 0) + part.half, is_there && p.flags & GATED);
        return *p.num_rows;
    }
    // After it.
    DEVICE void load_old(const Part& part, const Problem& p, int group, int rows) {
        const int i = threadIdx.x, row = row_at(part, group, i % per_row(p)), n = i / per_row(p);
        if (i >= COUNT) return;
        copy_word_async(old + i, address(part, p, max(row, 0), n), p.flags & ACCUMULATE && row >= 0 && n < rows);
    }
    // After the barrier that follows copy_async_wait: all threads.
    DEVICE void write(const Part& part, const Problem& p, int group, const float (*partial)[16][WIDTH + 1],
                      int warps) const {
        const int count = per_row(p) * min(num_rows, WIDTH);
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const int local = i % per_row(p), n = i / per_row(p), row = row_at(part, group, local);
            if (row < 0) continue;
            float* to = address(part, p, row, n);
            const bool is_early = i < min(COUNT, static_cast<int>(blockDim.x));
            float value = is_early ? bias[i] : part.bias ? part.bias[row] : 0.f;
            for (int warp = 0; warp < warps; warp++) value += partial[warp][local][n];
            if (p.flags & GATED) {
                float up = is_early ? up_bias[i] : part.bias ? part.bias[row + part.half] : 0.f;
                for (int warp = 0; warp < warps; warp++) up += partial[warp][local + 8][n];
                value = gated(value, up, p.flags >> GATE_SHIFT);
            }
            if (p.flags & ACCUMULATE) value += is_early ? old[i] : *to;
            *to = value;
        }
    }
    // The same of several groups of a part that is not interleaved, for the only row: a result a thread, which gets it.
    // `partial` has the warps of a group after those of the group before.
    DEVICE float write_only_row(const Part& part, const Problem& p, int first_group,
                                const float (*partial)[16][WIDTH + 1], int warps) const {
        const int i = threadIdx.x;
        float value = bias[i];
        for (int warp = 0; warp < warps; warp++) value += partial[i / 16 * warps + warp][i % 16][0];
        if (p.flags & ACCUMULATE) value += old[i];
        *address(part, p, first_group * 16 + i, 0) = value;
        return value;
    }

private:
    DEVICE static float* address(const Part& part, const Problem& p, int row, int n) {
        return p.out + static_cast<size_t>(n) * p.out_stride + part.first + row;
    }
};
