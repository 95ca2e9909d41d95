// Packed weights back to plain numbers: whole slices for cuBLAS, and single rows as embeddings.
#include "formats.cuh"

enum Target { TO_F32 = 0, TO_BF16 = 2, TO_F16 = 3 };

// The values of a register r = 4 block + i: factor * code + minimum, in the order of ggml's own products.
struct Line {
    float factor, minimum;

    DEVICE float operator()(u32 word, int j) const {
        return factor * static_cast<float>(static_cast<signed char>(word >> (8 * j))) + minimum;
    }
};

template <class F>
DEVICE Line line_of(const F& unit, int chunk, int r) {
    const int h = r % 2, block = 2 * chunk + r / 4;
    if constexpr (F::SCALE_VALUES == 32) {
        return {unit.unit_scale(h) * unit.scale(block, h), unit.unit_minimum(h) * unit.minimum(block, h)};
    } else {
        return {unit.unit_scale(h) * unit.scale(2 * block + (r % 4) / 2, h), 0.f};
    }
}

template <>
DEVICE Line line_of<Q2_K>(const Q2_K& unit, int chunk, int r) {
    const int h = r % 2, half_block = 4 * chunk + r / 2;
    return {unit.unit_scale(h) * unit.scale(half_block, h), unit.unit_minimum(h) * unit.half_minimum(half_block, h)};
}

// Column of byte 0 of register r of a lane.
DEVICE int column_of(int first_chunk, int chunk, int r, int t) {
    return (first_chunk + chunk) * 64 + (r / 4) * 32 + ((r % 4) / 2) * 16 + 4 * t;
}

DEVICE int row_at(int group, int local, int rows, int half) {
    if (half == 0) return group * 16 + local < rows ? group * 16 + local : -1;
    const int row = group * 8 + local % 8;
    return row < half ? row + (local / 8) * half : -1;
}

DEVICE uint2 narrowed(int target, const float (&x)[4]) {
    return target == TO_BF16 ? make_uint2(pack_bf16s(x[0], x[1]), pack_bf16s(x[2], x[3]))
                             : make_uint2(pack_halves(x[0], x[1]), pack_halves(x[2], x[3]));
}

// A block of 32 columns at `at`, of which lane t of four has columns 4 t .. (low) and 16 + 4 t .. (high). All lanes
// call.
DEVICE void store_block(void* out, size_t at, int target, int t, const float (&low)[4], const float (&high)[4],
                        bool wanted) {
    if (target == TO_F32) {
        float* to = static_cast<float*>(out) + at + 4 * t;
        if (!wanted) return;
        *reinterpret_cast<float4*>(to) = make_float4(low[0], low[1], low[2], low[3]);
        *reinterpret_cast<float4*>(to + 16) = make_float4(high[0], high[1], high[2], high[3]);
        return;
    }
    // neighbours swap, so that each lane has eight columns in a row: t = 0, 2 of the low half, t = 1, 3 of the high
    // half
    const uint2 l = narrowed(target, low), h = narrowed(target, high), given = t % 2 ? l : h;
    uint2 taken;
    taken.x = __shfl_xor_sync(FULL_WARP, given.x, 1);
    taken.y = __shfl_xor_sync(FULL_WARP, given.y, 1);
    if (!wanted) return;
    uint4 eight;
    if (t % 2) {
        eight.x = taken.x, eight.y = taken.y, eight.z = h.x, eight.w = h.y;
    } else {
        eight.x = l.x, eight.y = l.y, eight.z = taken.x, eight.w = taken.y;
    }
    *reinterpret_cast<uint4*>(static_cast<u16*>(out) + at + t % 2 * 16 + t / 2 * 8) = eight;
}

// Groups first_group .. of a part to out [rows, columns], row-major, rows in the part's natural order. One warp per
// unit. Rows of an interleaved part are numbered within the slice: [slice rows of part 0][slice rows of part 1].
KERNEL __launch_bounds__(256)
dequantise(const u8* packed, void* out, int first_group, int num_groups, int rows, int half, int chunks, int columns,
           int target) {
    grid_release_dependents();
    grid_wait();
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_units = ceil_div(chunks, FORMAT::CHUNKS);
    const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int group = warp / num_units, index = warp % num_units;
    if (group >= num_groups) return;
    FORMAT unit;
    unit.load(packed + (static_cast<size_t>(first_group + group) * num_units + index) * FORMAT::UNIT_BYTES, lane);
    const int first_row = first_group * (half ? 8 : 16);
    const int slice_half = half ? min(half - first_row, num_groups * 8) : 0;
    const int slice_rows = min(rows - first_row, num_groups * 16);
#pragma unroll
    for (int chunk = 0; chunk < FORMAT::CHUNKS; chunk++) {
        u32 a[8];
        unit.codes(chunk, a);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {  // registers r (low half) and r + 2 (high half) of one row and block
            const int r = pair / 2 * 4 + pair % 2, block = (index * FORMAT::CHUNKS + chunk) * 2 + r / 4;
            const int row = row_at(group, g + 8 * (r % 2), slice_rows, slice_half);
            const Line line = line_of(unit, chunk, r), line_of_high = line_of(unit, chunk, r + 2);
            float low[4], high[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                low[j] = line(a[r], j);
                high[j] = line_of_high(a[r + 2], j);
            }
            store_block(out, static_cast<size_t>(row) * columns + block * 32, target, t, low, high,
                        row >= 0 && block * 32 < columns);
        }
    }
}

// out[n] = scale * row tokens[n], if that row is one of this part's: first .. first + rows - 1 of the table's
// num_tokens. A token outside the table gives NaN. Grid (units, rows), one warp a block: the lanes that hold the row
// store it.
KERNEL __launch_bounds__(32)
embed(const u8* packed, const int* tokens, const int* num_rows, float* out, int out_stride, int first, int rows,
      int half, int num_tokens, int chunks, int columns, float scale) {
    grid_release_dependents();
    grid_wait();
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n = blockIdx.y;
    if (n >= *num_rows) return;
    const int token = tokens[n];
    const bool known = token >= 0 && token < num_tokens;
    if (known ? token < first || token >= first + rows : first != 0) return;
    const int row = known ? token - first : 0;
    const int part = half ? row / half : 0, within = half ? row % half : row;
    const int group = half ? within / 8 : within / 16;
    const int local = half ? within % 8 + 8 * part : within % 16;
    const int num_units = ceil_div(chunks, FORMAT::CHUNKS);
    FORMAT unit;
    unit.load(packed + (static_cast<size_t>(group) * num_units + blockIdx.x) * FORMAT::UNIT_BYTES, lane);
    if (g != local % 8) return;
#pragma unroll
    for (int chunk = 0; chunk < FORMAT::CHUNKS; chunk++) {
        u32 a[8];
        unit.codes(chunk, a);
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const int column = column_of(blockIdx.x * FORMAT::CHUNKS, chunk, r, t);
            if (r % 2 != local / 8 || column >= columns) continue;
            float* to = out + static_cast<size_t>(n) * out_stride + column;
            const Line line = line_of(unit, chunk, r);
#pragma unroll
            for (int j = 0; j < 4; j++)
                to[j] = known ? scale * line(a[r], j) : __uint_as_float(0x7fc00000u);
        }
    }
}
