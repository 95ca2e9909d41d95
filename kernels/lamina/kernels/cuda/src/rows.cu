// Everything that works on rows of float32 activations: norms, rope, cache writes, sums, gathers, argmax.
#include "kv.cuh"

DEVICE void store_quad(float* row, int quad, int columns, float4 x) {
    const int column = 4 * quad;
    float* at = row + column;
    if (column + 4 <= columns && (reinterpret_cast<u64>(at) & 15) == 0) {
        *reinterpret_cast<float4*>(at) = x;
        return;
    }
    if (column < columns) at[0] = x.x;
    if (column + 1 < columns) at[1] = x.y;
    if (column + 2 < columns) at[2] = x.z;
    if (column + 3 < columns) at[3] = x.w;
}

// Quads of a row, rounded up so that whole warps take part in hand_over.
DEVICE int padded_quads(int columns) { return ceil_div(columns, 128) * 32; }

// What varies from step to step, for kernels to read.
KERNEL __launch_bounds__(32) set_shape(int* counts, int num_rows, int num_seqs, int num_logit_rows) {
    grid_wait();  // and dependents are not released: they read the counts before they wait
    if (threadIdx.x != 0) return;
    counts[0] = num_rows;
    counts[1] = num_seqs;
    counts[2] = num_logit_rows;
}

// Small transfers: one side is page-locked memory of the host, which the card reads and writes over the bus.
KERNEL __launch_bounds__(256) copy_words(const u32* from, u32* to, int count) {
    grid_wait();  // and dependents are not released: what steps read is read before they wait
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i];
}

// The activations of a linear. Grid (blocks, rows).
KERNEL __launch_bounds__(256)
prepare(const float* x, int stride, const int* num_rows, const Activations to) {
    grid_release_dependents();
    const int n = blockIdx.y, quad = blockIdx.x * blockDim.x + threadIdx.x, rows = *num_rows;
    grid_wait();
    if (n >= rows || quad >= padded_quads(to.columns)) return;
    const float4 v = load_quad(x + static_cast<size_t>(n) * stride, quad, to.columns);
    hand_over(to, n, quad, v.x, v.y, v.z, v.w);
}

constexpr int MAX_NORM_BLOCKS = 1024;  // of 32 columns, whose sums of squares are kept apart

// Blocks of 1,024 threads that a multiprocessor has room for; ptxas refuses a bound beyond that.
#if __CUDA_ARCH__ == 750 || (__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1100
constexpr int WIDEST_BLOCKS = 1;
#else
constexpr int WIDEST_BLOCKS = 2;
#endif

// One block a row; also hands the result over to the linear that comes next. Rows of up to four columns a thread, which
// is what decoding waits for, are read once, by little code that needs few registers: such a block finds room beside
// the kernel it follows, and has its gains before the row is there.
KERNEL __launch_bounds__(1024, WIDEST_BLOCKS)
rms_norm(const float* x, int x_stride, const float* weight, float* out, int out_stride, int columns, float eps,
         const int* num_rows, const Activations to) {
    grid_release_dependents();
    const int n = blockIdx.x, quads = padded_quads(columns), rows = *num_rows;
    const float* row = x + static_cast<size_t>(n) * x_stride;
    float4 gain = load_quad(weight, threadIdx.x, columns);
    __shared__ float squares[MAX_NORM_BLOCKS];
    grid_wait();
    if (n >= rows) return;
    float4 v = load_quad(row, threadIdx.x, columns);
    const float first = block_squares(v);
    if (threadIdx.x % 8 == 0) squares[threadIdx.x / 8] = first;
#pragma unroll 1
    for (int quad = threadIdx.x + blockDim.x; quad < quads; quad += blockDim.x) {
        const float more = block_squares(load_quad(row, quad, columns));
        float* sum = squares + quad / 8 % MAX_NORM_BLOCKS;
        if (quad % 8 == 0) *sum = quad / 8 < MAX_NORM_BLOCKS ? more : *sum + more;
    }
    __syncthreads();
    const float scale = inverse_rms(squares, min(quads / 8, MAX_NORM_BLOCKS), columns, eps);
    const float before = to.kind == BYTES ? 1.f : scale, after = to.kind == BYTES ? scale : 1.f;
#pragma unroll 1
    for (int quad = threadIdx.x; quad < quads;) {
        const float4 y = make_float4(v.x * gain.x, v.y * gain.y, v.z * gain.z, v.w * gain.w);
        const float4 normed = make_float4(y.x * scale, y.y * scale, y.z * scale, y.w * scale);
        store_quad(out + static_cast<size_t>(n) * out_stride, quad, columns, normed);
        hand_over(to, n, quad, y.x * before, y.y * before, y.z * before, y.w * before, after);
        quad += blockDim.x;
        if (quad >= quads) break;
        v = load_quad(row, quad, columns);
        gain = load_quad(weight, quad, columns);
    }
}

// One warp a group of columns (a norm per head). Grid (blocks of 8 groups, rows).
KERNEL __launch_bounds__(256)
rms_norm_groups(const float* x, int x_stride, const float* weight, float* out, int out_stride, int columns,
                int group_size, float eps, const int* num_rows) {
    grid_release_dependents();
    const int n = blockIdx.y, lane = threadIdx.x % 32, group = blockIdx.x * 8 + threadIdx.x / 32, rows = *num_rows;
    grid_wait();
    if (n >= rows || group >= columns / group_size) return;
    const float* from = x + static_cast<size_t>(n) * x_stride + group * group_size;
    float* to = out + static_cast<size_t>(n) * out_stride + group * group_size;
    float squares = 0.f;
    for (int i = lane; i < group_size; i += 32) squares += from[i] * from[i];
    const float scale = rsqrtf(warp_sum(squares) / group_size + eps);
    for (int i = lane; i < group_size; i += 32) to[i] = from[i] * scale * weight[i];
}

struct Heads {
    float* x;
    int stride, num_heads;
};

struct Rotation {
    const int* positions;
    const float* inv_freq;  // [num_pairs]
    int num_pairs, neox;
    float magnitude;
};

struct Cache {
    const int* slots;  // null: nothing is written
    u8* k;
    u8* v;
    int num_heads, value_dim, type;

    DEVICE u8* page(u8* pages, int slot, int head, int width) const {
        return pages + (static_cast<size_t>(slot / PAGE_TOKENS) * num_heads + head) * page_bytes(type, width);
    }
};

// Where a pair of a head's elements stands, and the angle it turns by if it is one of the first num_pairs.
struct Pair {
    int head, first, second;
    bool turns;
    float sine, cosine;

    DEVICE Pair(const Rotation& rotation, int n, int head_dim, int index) {
        const int pairs = (head_dim + 1) / 2, pair = index % pairs;
        head = index / pairs;
        turns = pair < rotation.num_pairs;
        const bool neox = turns && rotation.neox;
        first = neox ? pair : 2 * pair;
        second = neox ? pair + rotation.num_pairs : 2 * pair + 1;
        sine = cosine = 0.f;
        if (!turns) return;
        sincosf(static_cast<float>(rotation.positions[n]) * rotation.inv_freq[pair], &sine, &cosine);
        sine *= rotation.magnitude;
        cosine *= rotation.magnitude;
    }
};

// Turns a pair in place; a key goes into the cache as well.
DEVICE void rotate(const Heads& heads, const Pair& pair, const Cache& cache, int n, int head_dim, int slot) {
    float* x = heads.x + static_cast<size_t>(n) * heads.stride + pair.head * head_dim;
    float a = x[pair.first], b = pair.second < head_dim ? x[pair.second] : 0.f;
    if (pair.turns) {
        const float turned = a * pair.cosine - b * pair.sine;
        b = b * pair.cosine + a * pair.sine;
        a = turned;
        x[pair.first] = a;
        x[pair.second] = b;
    }
    if (slot < 0) return;
    u8* page = cache.page(cache.k, slot, pair.head, key_width(head_dim));
    kv_store(page, cache.type, key_index(slot % PAGE_TOKENS, pair.first), a);
    if (pair.second < head_dim) kv_store(page, cache.type, key_index(slot % PAGE_TOKENS, pair.second), b);
}

// Rotates the heads of q and k in place and stores k and v, each part optional. Grid (rows, blocks): a thread does one
// pair of q, or of k, or one element of v.
KERNEL __launch_bounds__(256)
rope_and_store(const Heads q, const Heads k, const Heads v, const Rotation rotation, const Cache cache, int head_dim,
               const int* num_rows) {
    grid_release_dependents();
    const int n = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x, pairs = (head_dim + 1) / 2;
    const int num_q = q.num_heads * pairs, num_rotated = num_q + k.num_heads * pairs;
    if (n >= *num_rows) {
        grid_wait();
        return;
    }
    const int slot = i >= num_q && cache.slots ? cache.slots[n] : -1;
    if (i < num_rotated) {
        const bool is_q = i < num_q;
        const Pair pair(rotation, n, head_dim, is_q ? i : i - num_q);
        grid_wait();
        rotate(is_q ? q : k, pair, cache, n, head_dim, slot);
        return;
    }
    grid_wait();
    const int element = i - num_rotated;
    if (slot < 0 || element >= v.num_heads * cache.value_dim) return;
    const int head = element / cache.value_dim, d = element % cache.value_dim;
    u8* page = cache.page(cache.v, slot, head, value_width(cache.value_dim));
    kv_store(page, cache.type, value_index(slot % PAGE_TOKENS, d), v.x[static_cast<size_t>(n) * v.stride + element]);
}

// Keys and values into a Q8 cache, a warp a block of 32: scale = max|x| / 127 kept as f16, codes rounded half away from
// zero with the scale before rounding (as ggml). Heads are whole blocks. Grid (rows, eighths of the row's blocks).
KERNEL __launch_bounds__(256)
store_q8(const Heads k, const Heads v, const Cache cache, int key_dim, const int* num_rows) {
    grid_release_dependents();
    const int n = blockIdx.x, lane = threadIdx.x % 32, keys = k.num_heads * key_dim / Q8_VALUES;
    const int index = blockIdx.y * 8 + threadIdx.x / 32, slot = n < *num_rows ? cache.slots[n] : -1;
    grid_wait();
    if (slot < 0 || index >= keys + v.num_heads * cache.value_dim / Q8_VALUES) return;
    const bool is_key = index < keys;
    const int column = (is_key ? index : index - keys) * Q8_VALUES + lane, dim = is_key ? key_dim : cache.value_dim;
    const float* row = is_key ? k.x + static_cast<size_t>(n) * k.stride : v.x + static_cast<size_t>(n) * v.stride;
    const float x = row[column];
    const float scale = warp_max(fabsf(x)) / 127.f, poison = warp_sum(x * 0.f);
    const float inverse = scale > 0.f ? 1.f / scale : 0.f;
    u8* page = cache.page(is_key ? cache.k : cache.v, slot, column / dim, dim);
    const int token = slot % PAGE_TOKENS, d = column % dim;
    page[is_key ? key_index(token, d) : value_index(token, d)] = static_cast<u8>(static_cast<int>(roundf(x * inverse)));
    if (lane != 0) return;
    // a value that is not finite must show
    const u32 bits = float_to_half(poison != 0.f ? __uint_as_float(0x7fc00000u) : scale);
    *reinterpret_cast<u16*>(page + scale_offset(dim, token, d)) = static_cast<u16>(bits);
}

enum Flags { ACCUMULATE = 1, GATED = 2, GATE_SHIFT = 2 };  // and the kind of gate

// The end of a linear that cuBLAS multiplied: bias, gate, sum; hands over as well. Grid (blocks, rows).
KERNEL __launch_bounds__(256)
finish(const float* product, int product_stride, const float* bias, float* out, int out_stride, int columns, int half,
       int flags, const int* num_rows, const Activations to) {
    grid_release_dependents();
    const int rows = *num_rows;
    grid_wait();
    const int n = blockIdx.y, quad = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows || quad >= padded_quads(columns)) return;
    const float* from = product + static_cast<size_t>(n) * product_stride;
    float4 y = load_quad(from, quad, columns);
    float* values[4] = {&y.x, &y.y, &y.z, &y.w};
    for (int j = 0; j < 4; j++) {
        const int column = 4 * quad + j;
        if (column >= columns) break;
        if (bias) *values[j] += bias[column];
        if (flags & GATED) {
            const float up = from[half + column] + (bias ? bias[half + column] : 0.f);
            *values[j] = gated(*values[j], up, flags >> GATE_SHIFT);
        }
    }
    float* row = out + static_cast<size_t>(n) * out_stride;
    if (flags & ACCUMULATE) {
        const float4 old = load_quad(row, quad, columns);
        y = make_float4(y.x + old.x, y.y + old.y, y.z + old.z, y.w + old.w);
    }
    store_quad(row, quad, columns, y);
    hand_over(to, n, quad, y.x, y.y, y.z, y.w);
}

// Grid (blocks, rows) for the three that follow.
KERNEL __launch_bounds__(256)
add(const float* x, int x_stride, const float* y, int y_stride, float* out, int out_stride, int columns,
    const int* num_rows) {
    grid_release_dependents();
    const int rows = *num_rows;
    grid_wait();
    const int n = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows || i >= columns) return;
    out[static_cast<size_t>(n) * out_stride + i] =
        x[static_cast<size_t>(n) * x_stride + i] + y[static_cast<size_t>(n) * y_stride + i];
}

KERNEL __launch_bounds__(256) softcap(float* x, int stride, int columns, float cap, const int* num_rows) {
    grid_release_dependents();
    const int rows = *num_rows;
    grid_wait();
    const int n = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows || i >= columns) return;
    float* at = x + static_cast<size_t>(n) * stride + i;
    *at = cap * tanhf(*at / cap);
}

KERNEL __launch_bounds__(256)
gather_rows(const float* x, int x_stride, const int* indices, float* out, int out_stride, int columns,
            const int* num_rows) {
    grid_release_dependents();
    const int rows = *num_rows;
    grid_wait();
    const int n = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows || i >= columns) return;
    out[static_cast<size_t>(n) * out_stride + i] = x[static_cast<size_t>(indices[n]) * x_stride + i];
}

struct RowMaximum {
    u64 best;
    int any_finite, num_done;
};

// Grid (blocks, rows); `maxima` [rows] must be zero and is left zero: the last block of a row decides and cleans up.
KERNEL __launch_bounds__(256)
argmax(const float* x, int stride, int columns, int* out, int out_stride, RowMaximum* maxima, const int* num_rows) {
    __shared__ u64 bests[8];
    __shared__ int finite[8];
    grid_release_dependents();
    const int rows = *num_rows;
    grid_wait();
    const int n = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (n >= rows) return;
    u64 best = 0;
    int any_finite = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < columns; i += gridDim.x * blockDim.x) {
        const float value = x[static_cast<size_t>(n) * stride + i];
        const u64 key = value != value ? ANY_NAN : argmax_key(value, i);
        if (key > best) best = key;
        any_finite |= fabsf(value) <= 3.402823466e38f;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const u64 other = __shfl_xor_sync(FULL_WARP, best, step);
        if (other > best) best = other;
        any_finite |= __shfl_xor_sync(FULL_WARP, any_finite, step);
    }
    if (lane == 0) {
        bests[warp] = best;
        finite[warp] = any_finite;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < blockDim.x / 32; i++) {
        if (bests[i] > best) best = bests[i];
        any_finite |= finite[i];
    }
    RowMaximum* row = maxima + n;
    atomicMax(&row->best, best);
    atomicOr(&row->any_finite, any_finite);
    __threadfence();
    if (atomicAdd(&row->num_done, 1) != static_cast<int>(gridDim.x) - 1) return;
    const u64 winner = atomicExch(&row->best, 0ull);
    const int usable = atomicExch(&row->any_finite, 0);
    atomicExch(&row->num_done, 0);
    out[static_cast<size_t>(n) * out_stride] =
        winner == ANY_NAN || !usable ? -1 : static_cast<int>(0xffffffffu - static_cast<u32>(winner));
}
