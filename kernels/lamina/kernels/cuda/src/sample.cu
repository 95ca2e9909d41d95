// Drawing tokens from filtered logits, one block a row. Nothing is sorted and no order of additions matters:
//
//   Weights exp((logit - largest) / temperature) are whole multiples of 2^-40, so sums are exact and every run gives
//   the same token. A logit's key grows with its place in the order (logit descending, column ascending), so what a
//   filter keeps are the keys up to some bound, which `select` finds digit by digit from counts or sums of weights per
//   digit. A cheap bound first leaves a list of candidates in shared memory; where it leaves too many, the row stands
//   for it.
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int LISTED = 2048;      // candidates in shared memory
constexpr int DIGIT_BITS = 10;    // one digit value a thread
constexpr int COLUMN_BITS = 20;   // of a key, below 32 bits of distance from the largest logit, below a digit that ...
constexpr int FIRST_SHIFT = 52;   // ... cuts the range of candidates into equal parts, so that they spread
constexpr float WEIGHT_UNIT = 1099511627776.f;  // 2^40: weights are counted in its inverse
constexpr float LEAST_FINITE = -3.402823466e38f;

DEVICE u32 ordered(float value) {
    const u32 bits = __float_as_uint(value + 0.f);  // -0 becomes 0, which it equals
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float unordered(u32 bits) { return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits); }

struct Row {
    const float* x;
    int columns;
    float largest, rate, scale;  // rate: log2 e / temperature; scale: parts of the first digit per unit of logit

    DEVICE u64 weight(float value) const {
        return static_cast<u64>(fast_exp2((value - largest) * rate) * WEIGHT_UNIT + 0.5f);
    }
    DEVICE u64 key(float value, int column) const {
        const u64 part = static_cast<u64>(fminf((largest - value) * scale, 1023.f));
        return part << FIRST_SHIFT | static_cast<u64>(ordered(largest) - ordered(value)) << COLUMN_BITS |
               static_cast<u64>(column);
    }
    DEVICE float value(u64 key) const { return unordered(ordered(largest) - static_cast<u32>(key >> COLUMN_BITS)); }

    // visit(value, column) of columns [begin, end), in quads of the lanes `first`, `first + step`, ...; begin is a
    // multiple of 4.
    template <class Visit>
    DEVICE void each(int begin, int end, int first, int step, Visit visit) const {
        for (int quad = begin / 4 + first; 4 * quad < end; quad += step) {
            const float4 four = load_quad(x, quad, columns);
            const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (4 * quad + j < end) visit(values[j], 4 * quad + j);
        }
    }
};

// Over all threads of the block; all of them get the result.
template <class T, class Join>
DEVICE T block_join(T value, Join join) {
    __shared__ T warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(FULL_WARP, value, step));
    __syncthreads();  // what an earlier call left has been read
    if (lane == 0) warps[warp] = value;
    __syncthreads();
    value = warps[lane];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(FULL_WARP, value, step));
    return value;
}

template <class T>
DEVICE T block_total(T value) {
    return block_join(value, [](T a, T b) { return a + b; });
}

// Sums of this and all earlier threads.
DEVICE u64 block_scan(u64 value) {
    __shared__ u64 warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto scan = [lane](u64 sum) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u64 before = __shfl_sync(FULL_WARP, sum, (lane - step) & 31);
            if (lane >= step) sum += before;
        }
        return sum;
    };
    value = scan(value);
    __syncthreads();
    if (lane == 31) warps[warp] = value;
    __syncthreads();
    const u64 of_warps = scan(warps[lane]);
    const u64 before = __shfl_sync(FULL_WARP, of_warps, (warp - 1) & 31);
    return value + (warp > 0 ? before : 0);
}

// The keys up to `limit`: all in `list` if they are at most LISTED, else to be found in the row.
struct Candidates {
    const u64* list;
    u64 limit;
    int count;

    template <class Visit>
    DEVICE void each(const Row& row, Visit visit) const {
        if (count <= LISTED) {
            for (int i = threadIdx.x; i < count; i += THREADS)
                if (list[i] <= limit) visit(list[i]);
        } else {
            row.each(0, row.columns, threadIdx.x, THREADS, [&](float value, int column) {
                const u64 key = row.key(value, column);
                if (key <= limit) visit(key);
            });
        }
    }
};

DEVICE Candidates collect(const Row& row, u64 limit, u64* list) {
    int mine = 0;
    row.each(0, row.columns, threadIdx.x, THREADS, [&](float v, int column) { mine += row.key(v, column) <= limit; });
    const int reached = static_cast<int>(block_scan(mine)), count = block_total(mine);
    if (count <= LISTED) {
        int place = reached - mine;
        row.each(0, row.columns, threadIdx.x, THREADS, [&](float value, int column) {
            const u64 key = row.key(value, column);
            if (key <= limit) list[place++] = key;
        });
    }
    __syncthreads();
    return {list, limit, count};
}

// A bound such that the keys up to it are the fewest whose number, or sum of weights, reaches `target`; the candidates
// together reach it.
template <bool BY_WEIGHT>
DEVICE u64 select(const Row& row, const Candidates& candidates, u64 target) {
    __shared__ u32 low[THREADS], high[THREADS], count[THREADS];
    __shared__ u64 digit, below;
    __shared__ u32 num_equal;
    u64 prefix = 0, before = 0;
    int shift = FIRST_SHIFT, width = DIGIT_BITS;
    while (true) {
        low[threadIdx.x] = high[threadIdx.x] = count[threadIdx.x] = 0;
        __syncthreads();
        candidates.each(row, [&](u64 key) {
            if (key >> (shift + width) != prefix) return;
            const int at = static_cast<int>(key >> shift) & ((1 << width) - 1);
            atomicAdd(&count[at], 1u);
            if (!BY_WEIGHT) return;
            const u64 weight = row.weight(row.value(key));
            const u32 part = static_cast<u32>(weight), old = atomicAdd(&low[at], part);
            const u32 rest = static_cast<u32>(weight >> 32) + (old + part < old);  // 64 bits by two of 32, exactly
            if (rest != 0) atomicAdd(&high[at], rest);
        });
        __syncthreads();
        const u32 mine = count[threadIdx.x];
        const u64 amount = BY_WEIGHT ? static_cast<u64>(high[threadIdx.x]) << 32 | low[threadIdx.x] : mine;
        const u64 reached = before + block_scan(amount);
        if (reached >= target && reached - amount < target) {
            digit = threadIdx.x;
            below = reached - amount;
            num_equal = mine;
        }
        __syncthreads();
        prefix = prefix << width | digit;
        before = below;
        if (num_equal == 1 || shift == 0) return ((prefix + 1) << shift) - 1;
        width = min(DIGIT_BITS, shift);
        shift -= width;
    }
}

DEVICE u64 weight_up_to(const Row& row, const Candidates& candidates) {
    u64 sum = 0;
    candidates.each(row, [&](u64 key) { sum += row.weight(row.value(key)); });
    return block_total(sum);
}

// The first column at which the sum of weights of keys up to `limit` exceeds uniform times all of them: 32 parts of the
// row, then 32 parts of the part that it falls into, and so on.
DEVICE int draw(const Row& row, u64 limit, float uniform) {
    __shared__ u64 sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int begin = 0, size = row.columns;
    u64 target = 0;
    while (true) {
        const int part = ceil_div(ceil_div(size, 32), 4) * 4, from = begin + warp * part;
        const int to = min(min(from + part, begin + size), row.columns);
        u64 sum = 0;
        row.each(from, to, lane, 32, [&](float value, int column) {
            if (row.key(value, column) <= limit) sum += row.weight(value);
        });
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
        __syncthreads();
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        if (size == row.columns) {
            u64 total = 0;
            for (int i = 0; i < 32; i++) total += sums[i];
            target = static_cast<u64>(uniform * static_cast<double>(total));
        }
        int chosen = 0;
        while (chosen < 31 && target >= sums[chosen]) target -= sums[chosen++];
        begin += chosen * part;
        size = min(part, row.columns - begin);
        if (part == 4) break;
    }
    int last = begin;
    for (int column = begin; column < begin + size; column++) {
        const float value = row.x[column];
        if (row.key(value, column) > limit) continue;
        const u64 weight = row.weight(value);
        last = column;
        if (target < weight) break;
        target -= weight;
    }
    return last;
}

// The standard deviation of the row's finite logits.
DEVICE float deviation(const Row& row) {
    double sum = 0, squares = 0;
    int count = 0;
    row.each(0, row.columns, threadIdx.x, THREADS, [&](float value, int) {
        if (!(fabsf(value) <= -LEAST_FINITE)) return;
        const double below = static_cast<double>(value) - row.largest;
        sum += below;
        squares += below * below;
        count++;
    });
    count = block_total(count);
    const double mean = block_total(sum) / count, square = block_total(squares) / count;
    return static_cast<float>(sqrt(fmax(0., square - mean * mean)));
}

struct Params {
    float temperature, top_k, top_p, min_p, top_n_sigma, uniform;
};

// Grid (rows). `out` holds the argmax; rows of temperature 0, or that are not finite, keep it.
KERNEL __launch_bounds__(1024)
sample(const float* x, int stride, int columns, const float* params, int params_stride, int* out, int out_stride,
       const int* num_rows) {
    __shared__ u64 list[LISTED];
    grid_release_dependents();
    grid_wait();
    const int n = blockIdx.x;
    if (n >= *num_rows) return;
    const float* at = params + static_cast<size_t>(n) * params_stride;
    const Params p = {at[0], at[1], at[2], at[3], at[4], at[5]};
    const int best = out[static_cast<size_t>(n) * out_stride];
    if (best < 0 || best >= columns || !(p.temperature > 0.f)) return;
    Row row = {x + static_cast<size_t>(n) * stride, columns, 0.f, 0.f, 0.f};
    row.largest = row.x[best];
    row.rate = LOG2_E / fminf(fmaxf(p.temperature, 1e-6f), 1e30f);
    float lowest = LEAST_FINITE;
    if (p.top_n_sigma > 0.f) lowest = fmaxf(lowest, row.largest - p.top_n_sigma * deviation(row));
    if (p.min_p > 0.f) lowest = fmaxf(lowest, row.largest + log2f(p.min_p) / row.rate);

    u64 weight = 0;
    float smallest = row.largest, mine = NEGATIVE_INFINITY;  // of those kept; the largest of this thread's
    row.each(0, columns, threadIdx.x, THREADS, [&](float value, int) {
        if (!(value >= lowest)) return;
        weight += row.weight(value);
        smallest = fminf(smallest, value);
        mine = fmaxf(mine, value);
    });
    weight = block_total(weight);
    lowest = block_join(smallest, [](float a, float b) { return fminf(a, b); });

    const bool has_top_k = p.top_k > 0.f && p.top_k < static_cast<float>(columns), has_top_p = p.top_p < 1.f;
    if (has_top_p && !has_top_k) {
        // Tokens below this share have less in all than top_p leaves out: none of them is needed.
        const float share = (1.f - p.top_p) * static_cast<float>(weight) / WEIGHT_UNIT / columns;
        lowest = fmaxf(lowest, row.largest + (log2f(share) - 1e-3f) / row.rate);
    }
    row.scale = lowest < row.largest ? 1023.f / (row.largest - lowest) : 0.f;
    u64 limit = row.key(lowest, (1 << COLUMN_BITS) - 1);
    if (has_top_k) {
        u64 bound = limit;
        if (p.top_k <= THREADS) {  // as many logits are among the threads' largest, so the k-th of these is a bound
            __syncthreads();
            list[threadIdx.x] = mine >= lowest ? row.key(mine, (1 << COLUMN_BITS) - 1) : ~0ull;
            __syncthreads();
            const Candidates maxima = {list, limit, THREADS};
            const int found = block_total(mine >= lowest ? 1 : 0);
            if (found >= static_cast<int>(p.top_k)) bound = select<false>(row, maxima, static_cast<u64>(p.top_k));
        }
        Candidates candidates = collect(row, bound, list);
        if (candidates.count > static_cast<int>(p.top_k))
            candidates.limit = select<false>(row, candidates, static_cast<u64>(p.top_k));
        limit = candidates.limit;
        if (has_top_p) {
            weight = weight_up_to(row, candidates);
            limit = select<true>(row, candidates, static_cast<u64>(ceil(p.top_p * static_cast<double>(weight))));
        }
    } else if (has_top_p) {
        const Candidates candidates = collect(row, limit, list);
        limit = select<true>(row, candidates, static_cast<u64>(ceil(p.top_p * static_cast<double>(weight))));
    }
    const int token = draw(row, limit, p.uniform);
    if (threadIdx.x == 0) out[static_cast<size_t>(n) * out_stride] = token;
}
