// Packed matrices of experts against many rows, on int8 tensor cores: pairs of one expert stand side by side (see `bin`
// of experts.cu), and a block multiplies 16 rows of its matrix by a tile of up to 8 * COLUMN_TILES of them.
#include "experts.cuh"
#include "blocks.cuh"

#ifndef FORMAT_B
#define FORMAT_B FORMAT
#endif

constexpr int WIDTH = 8 * COLUMN_TILES;

struct Tiles {
    const int* table;  // expert, first position, positions
    const int* num_tiles;
    const int* pairs;  // by position
};

// A warp's share of a group of 16 rows against the tile.
template <class F>
DEVICE void add_share(const u8* matrix, int group, const Inputs& x, int warp, int warps, float (*partial)[WIDTH + 1]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, num_units = ceil_div(x.chunks, F::CHUNKS);
    const u8* packed = matrix + static_cast<size_t>(group) * num_units * F::UNIT_BYTES;
    float total[4 * COLUMN_TILES] = {};
    for (int index = warp; index < num_units; index += warps) {
        F unit;
        unit.load(packed + static_cast<size_t>(index) * F::UNIT_BYTES, lane);
        add_unit(unit, index * F::CHUNKS, x, lane, total);
    }
#pragma unroll
    for (int i = 0; i < 4 * COLUMN_TILES; i++)
        partial[g + 8 * ((i % 4) / 2)][8 * (i / 4) + 2 * t + i % 2] = total[i];
}

// Grid (groups of 16 rows, tiles) for both.
KERNEL __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)
expert_gated(const Matrices gate, const Matrices up, const Tiles tiles, const Inputs x, float* out, int out_stride,
             int kind, int k, int first_row) {
    __shared__ float partial[MAX_WARPS][16][WIDTH + 1];
    grid_wait();
    grid_release_dependents();
    if (blockIdx.y >= *tiles.num_tiles) return;
    const int* tile = tiles.table + 3 * blockIdx.y;
    const int expert = tile[0], first = tile[1], group = blockIdx.x, warp = threadIdx.x / 32, each = blockDim.x / 64;
    if (warp < each) {
        add_share<FORMAT>(gate.of(expert), group, x.from(first), warp, each, partial[warp]);
    } else {
        add_share<FORMAT_B>(up.of(expert), group, x.from(first), warp - each, each, partial[warp]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * tile[2]; i += blockDim.x) {
        const int local = i % 16, n = i / 16, row = group * 16 + local;
        if (row >= gate.rows) continue;
        float left = gate.bias_of(expert, row), right = up.bias_of(expert, row);
        for (int w = 0; w < each; w++) {
            left += partial[w][local][n];
            right += partial[each + w][local][n];
        }
        const int pair = tiles.pairs[first + n], r = first_row + pair / k;
        out[static_cast<size_t>(r) * out_stride + pair % k * gate.rows + row] = gated(left, right, kind);
    }
}

// y [positions, rows], without biases.
KERNEL __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)
expert_linear(const Matrices down, const Tiles tiles, const Inputs x, float* y) {
    __shared__ float partial[MAX_WARPS][16][WIDTH + 1];
    grid_wait();
    grid_release_dependents();
    if (blockIdx.y >= *tiles.num_tiles) return;
    const int* tile = tiles.table + 3 * blockIdx.y;
    const int first = tile[1], group = blockIdx.x, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    add_share<FORMAT>(down.of(tile[0]), group, x.from(first), warp, warps, partial[warp]);
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * tile[2]; i += blockDim.x) {
        const int local = i % 16, n = i / 16, row = group * 16 + local;
        if (row >= down.rows) continue;
        float value = 0.f;
        for (int w = 0; w < warps; w++) value += partial[w][local][n];
        y[static_cast<size_t>(first + n) * down.rows + row] = value;
    }
}
