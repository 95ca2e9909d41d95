// The router of a mixture of experts, and what stands around its matrices when there are many rows: pairs of a row and
// a rank sorted by expert, activations prepared per pair, and the sum over a row's experts.
#include "experts.cuh"

constexpr int ROUTE_WARPS = 4;

// The block's largest key; all threads get it.
DEVICE u64 block_max(u64 key) {
    __shared__ u64 warps[ROUTE_WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const u64 other = __shfl_xor_sync(FULL_WARP, key, step);
        if (other > key) key = other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = key;
    __syncthreads();
    key = warps[0];
    for (int i = 1; i < ROUTE_WARPS; i++)
        if (warps[i] > key) key = warps[i];
    return key;
}

DEVICE float block_sum(float value) {
    __shared__ float warps[ROUTE_WARPS];
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0.f;
    for (int i = 0; i < ROUTE_WARPS; i++) value += warps[i];
    return value;
}

// One block a row. Each round finds the largest key below the last one's.
KERNEL __launch_bounds__(32 * ROUTE_WARPS)
route(const float* logits, int stride, int num_experts, int* experts, int expert_stride, float* shares,
      int share_stride, int k, int of_selected, int normalise, float scale, float least_sum, const int* num_rows) {
    __shared__ int chosen[MAX_SELECTED];
    __shared__ float weights[MAX_SELECTED];
    grid_release_dependents();
    const int r = blockIdx.x, rows = *num_rows;
    grid_wait();
    if (r >= rows) return;
    const float* row = logits + static_cast<size_t>(r) * stride;
    u64 last = ANY_NAN;
    float highest = 0.f;
    bool is_spoiled = false;
    for (int rank = 0; rank < k; rank++) {
        u64 best = 0;
        for (int i = threadIdx.x; i < num_experts; i += blockDim.x) {
            const float value = row[i];
            const u64 key = value != value ? ANY_NAN : argmax_key(value, i);
            if (key > best && (rank == 0 || key < last)) best = key;
        }
        last = block_max(best);
        const int expert = static_cast<int>(0xffffffffu - static_cast<u32>(last));
        if (rank == 0) {
            is_spoiled = last == ANY_NAN || !(fabsf(row[expert]) <= 3.402823466e38f);
            if (is_spoiled) break;
            highest = row[expert];
        }
        if (threadIdx.x == 0) {
            chosen[rank] = expert;
            weights[rank] = expf(row[expert] - highest);
        }
    }
    float sum = 0.f;
    if (!is_spoiled && !of_selected) {
        for (int i = threadIdx.x; i < num_experts; i += blockDim.x) sum += expf(row[i] - highest);
        sum = block_sum(sum);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    float of_chosen = 0.f;
    for (int rank = 0; rank < k; rank++) of_chosen += weights[rank];
    if (of_selected) sum = of_chosen;
    const float divisor = normalise ? fmaxf(of_chosen / sum, least_sum) : 1.f;
    for (int rank = 0; rank < k; rank++) {
        experts[static_cast<size_t>(r) * expert_stride + rank] = is_spoiled ? rank : chosen[rank];
        shares[static_cast<size_t>(r) * share_stride + rank] =
            is_spoiled ? __uint_as_float(0x7fc00000u) : scale * (weights[rank] / sum) / divisor;
    }
}

// Sorts the pairs of up to most_rows rows from first_row on by expert. Positions of an expert start at a multiple of 8;
// a tile is up to `width` of them. One block; cursors and counts of all experts are in shared memory.
KERNEL __launch_bounds__(1024)
bin(const Selection chosen, int num_experts, int first_row, int most_rows, int width, int* table, int* num_tiles,
    int* pairs, int* positions) {
    DYNAMIC_SHARED(memory);
    int* counts = reinterpret_cast<int*>(memory);
    int* cursors = counts + num_experts;
    grid_wait();
    grid_release_dependents();
    const int lane = threadIdx.x % 32, num_pairs = max(0, min(most_rows, *chosen.num_rows - first_row)) * chosen.k;
    for (int i = threadIdx.x; i < num_experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < num_pairs; pair += blockDim.x)
        atomicAdd(counts + chosen.of(first_row + pair / chosen.k)[pair % chosen.k], 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        int next_position = 0, next_tile = 0;
        for (int first = 0; first < num_experts; first += 32) {
            const int expert = first + lane, count = expert < num_experts ? counts[expert] : 0;
            const int slots = ceil_div(count, 8) * 8, tiles = ceil_div(count, width);
            int position = slots, tile = tiles;  // inclusive sums over the lanes
            for (int step = 1; step < 32; step *= 2) {
                const int before = __shfl_sync(FULL_WARP, position, lane - step);
                const int tiles_before = __shfl_sync(FULL_WARP, tile, lane - step);
                position += lane >= step ? before : 0;
                tile += lane >= step ? tiles_before : 0;
            }
            const int start = next_position + position - slots;
            if (expert < num_experts) cursors[expert] = start;
            for (int i = 0; i < tiles; i++) {
                int* entry = table + 3 * (next_tile + tile - tiles + i);
                entry[0] = expert;
                entry[1] = start + i * width;
                entry[2] = min(width, count - i * width);
            }
            next_position += __shfl_sync(FULL_WARP, position, 31);
            next_tile += __shfl_sync(FULL_WARP, tile, 31);
        }
        if (lane == 0) *num_tiles = next_tile;
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < num_pairs; pair += blockDim.x) {
        const int position = atomicAdd(cursors + chosen.of(first_row + pair / chosen.k)[pair % chosen.k], 1);
        pairs[position] = pair;
        positions[pair] = position;
    }
}

// The activations of pairs: those of their row, or, if by_rank, of their rank's share of the row; at the pair's
// position, or, if positions are null, its number. Grid (blocks, pairs).
KERNEL __launch_bounds__(256)
prepare_pairs(const float* x, int stride, int by_rank, int k, int first_row, const int* positions, const int* num_rows,
              const Activations to) {
    grid_wait();
    grid_release_dependents();
    const int pair = blockIdx.y, r = first_row + pair / k, quad = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= *num_rows || quad >= ceil_div(to.columns, 128) * 32) return;
    const float* row = x + static_cast<size_t>(r) * stride + (by_rank ? pair % k * to.columns : 0);
    const float4 v = load_quad(row, quad, to.columns);
    hand_over(to, positions ? positions[pair] : pair, quad, v.x, v.y, v.z, v.w);
}

// Where each pair's product is: at its position, or, if positions are null, at r * row_step + rank * rank_step +
// expert * expert_step.
struct Products {
    const float* y;
    const int* positions;
    int row_step, rank_step, expert_step;
};

// The sum over the experts of rows from first_row on, in order of id. Grid (blocks of columns, rows).
KERNEL __launch_bounds__(256)
combine(const Products from, const Matrices down, const Selection chosen, float* out, int out_stride, int accumulate,
        int first_row) {
    grid_wait();
    grid_release_dependents();
    const int n = blockIdx.y, r = first_row + n, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= *chosen.num_rows || column >= down.rows) return;
    const int* experts = chosen.of(r);
    float* to = out + static_cast<size_t>(r) * out_stride + column;
    float sum = accumulate ? *to : 0.f;
    for (int rank = rank_after(experts, chosen.k, -1); rank >= 0; rank = rank_after(experts, chosen.k, experts[rank])) {
        const int expert = experts[rank];
        const size_t at = from.positions
            ? static_cast<size_t>(from.positions[n * chosen.k + rank]) * down.rows
            : static_cast<size_t>(n) * from.row_step + static_cast<size_t>(rank) * from.rank_step +
                  static_cast<size_t>(expert) * from.expert_step;
        sum += chosen.share(r, rank) * (from.y[at + column] + down.bias_of(expert, column));
    }
    *to = sum;
}
