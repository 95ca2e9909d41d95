// From GGUF blocks to packed units, once at load. What a unit looks like is described in formats.cuh.
#include "formats.cuh"

// -- how the blocks of a checkpoint hold codes: value i of a block

// Each `run` bytes hold 2 run values: their low nibbles, then their high ones.
DEVICE u32 nibble(const u8* packed, int i, int run) {
    return packed[i / (2 * run) * run + i % run] >> (i / run % 2 * 4) & 15;
}
DEVICE u32 bit_pair(const u8* packed, int i) { return packed[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3; }
DEVICE u32 bit_of_row(const u8* packed, int i) { return packed[i % 32] >> (i / 32) & 1; }
DEVICE u32 bit_of_string(const u8* packed, int i) { return packed[i / 8] >> (i % 8) & 1; }

// Six-bit scales and minima of Q4_K and Q5_K, in turn, from 12 bytes.
DEVICE u32 k_scale(const u8* packed, int k) {
    const int i = k / 2;
    const u8* own = packed + k % 2 * 4;
    return i < 4 ? own[i] & 63 : (packed[i + 4] >> (k % 2 * 4) & 15) | (own[i - 4] >> 6 << 4);
}

enum Plane { NO_PLANE, NIBBLE_PLANE, BYTE_PLANE, PAIR_PLANE, BIT_PLANE };

// For each type: values and bytes of a block; the planes that its codes go to, the second from bit REST_SHIFT on; how
// many bytes of a block go to the plane of scales and to that of the unit's scales.
namespace raw {

template <int BLOCK_VALUES, int BLOCK_BYTES, Plane FIRST_PLANE, int SCALE_BYTES, int UNIT_SCALE_BYTES,
          Plane REST_PLANE = NO_PLANE, int SHIFT = 0>
struct Layout {
    static constexpr int VALUES = BLOCK_VALUES, BYTES = BLOCK_BYTES, REST_SHIFT = SHIFT;
    static constexpr int SCALES = SCALE_BYTES, UNIT_SCALES = UNIT_SCALE_BYTES;
    static constexpr Plane FIRST = FIRST_PLANE, REST = REST_PLANE;
    DEVICE static u32 scale(const u8* block, int k) { return block[k]; }
    DEVICE static u32 unit_scale(const u8* block, int k) { return block[k]; }
};

struct Q4_0 : Layout<32, 18, NIBBLE_PLANE, 2, 0> {
    DEVICE static u32 code(const u8* block, int i) { return nibble(block + 2, i, 16) ^ 8; }
};
struct Q4_1 : Layout<32, 20, NIBBLE_PLANE, 4, 0> {
    DEVICE static u32 code(const u8* block, int i) { return nibble(block + 4, i, 16); }
};
struct Q5_0 : Layout<32, 22, NIBBLE_PLANE, 2, 0, BIT_PLANE, 4> {
    DEVICE static u32 code(const u8* block, int i) {
        return (nibble(block + 6, i, 16) | bit_of_string(block + 2, i) << 4) ^ 16;
    }
};
struct Q5_1 : Layout<32, 24, NIBBLE_PLANE, 4, 0, BIT_PLANE, 4> {
    DEVICE static u32 code(const u8* block, int i) {
        return nibble(block + 8, i, 16) | bit_of_string(block + 4, i) << 4;
    }
};
struct Q8_0 : Layout<32, 34, BYTE_PLANE, 2, 0> {
    DEVICE static u32 code(const u8* block, int i) { return block[2 + i]; }
};
struct IQ4_NL : Layout<32, 18, NIBBLE_PLANE, 2, 0> {
    DEVICE static u32 code(const u8* block, int i) { return nibble(block + 2, i, 16); }
};
struct MXFP4 : Layout<32, 17, NIBBLE_PLANE, 1, 0> {
    DEVICE static u32 code(const u8* block, int i) { return nibble(block + 1, i, 16); }
};
struct Q2_K : Layout<256, 84, PAIR_PLANE, 16, 4> {
    DEVICE static u32 code(const u8* block, int i) { return bit_pair(block + 16, i); }
    DEVICE static u32 unit_scale(const u8* block, int k) { return block[80 + k]; }
};
struct Q3_K : Layout<256, 110, PAIR_PLANE, 16, 2, BIT_PLANE, 2> {
    DEVICE static u32 code(const u8* block, int i) {
        return (bit_pair(block + 32, i) | bit_of_row(block, i) << 2) ^ 4;
    }
    DEVICE static u32 scale(const u8* block, int k) {
        const u32 low = block[96 + k % 8] >> (k / 8 * 4) & 15, high = block[104 + k % 4] >> (k / 4 * 2) & 3;
        return (low | high << 4) - 32;
    }
    DEVICE static u32 unit_scale(const u8* block, int k) { return block[108 + k]; }
};
struct Q4_K : Layout<256, 144, NIBBLE_PLANE, 16, 4> {
    DEVICE static u32 code(const u8* block, int i) { return nibble(block + 16, i, 32); }
    DEVICE static u32 scale(const u8* block, int k) { return k_scale(block + 4, k); }
};
struct Q5_K : Layout<256, 176, NIBBLE_PLANE, 16, 4, BIT_PLANE, 4> {
    DEVICE static u32 code(const u8* block, int i) {
        return nibble(block + 48, i, 32) | bit_of_row(block + 16, i) << 4;
    }
    DEVICE static u32 scale(const u8* block, int k) { return k_scale(block + 4, k); }
};
struct Q6_K : Layout<256, 210, NIBBLE_PLANE, 16, 2, PAIR_PLANE, 4> {
    DEVICE static u32 code(const u8* block, int i) {
        return (nibble(block, i, 64) | bit_pair(block + 128, i) << 4) ^ 32;
    }
    DEVICE static u32 scale(const u8* block, int k) { return block[192 + k]; }
    DEVICE static u32 unit_scale(const u8* block, int k) { return block[208 + k]; }
};
struct IQ4_XS : Layout<256, 136, NIBBLE_PLANE, 8, 2> {
    DEVICE static u32 code(const u8* block, int i) { return nibble(block + 8, i, 16); }
    DEVICE static u32 scale(const u8* block, int k) {
        return ((block[4 + k / 2] >> (k % 2 * 4) & 15) | (block[2 + k / 4] >> (k % 4 * 2) & 3) << 4) - 32;
    }
};

}  // namespace raw

typedef raw::FORMAT Raw;

// -- planes of a unit

DEVICE constexpr int plane_bytes(Plane plane) {
    const int of_chunk[] = {0, 512, 1024, 256, 128};
    return FORMAT::CHUNKS * of_chunk[plane];
}

DEVICE void store_word(u8* to, u32 word) { *reinterpret_cast<u32*>(to) = word; }

// The share of one lane and chunk of a plane, from its registers: the bits of each code from `shift` on.
template <Plane PLANE>
DEVICE void store_plane(u8* plane, int chunk, int lane, const u32 (&a)[8], int shift) {
    if constexpr (PLANE == BYTE_PLANE) {
        for (int r = 0; r < 8; r++) store_word(plane + chunk * 1024 + r / 4 * 512 + lane * 16 + r % 4 * 4, a[r]);
    } else if constexpr (PLANE == NIBBLE_PLANE) {
        for (int w = 0; w < 4; w++) {
            const int r = w / 2 * 4 + w % 2;
            const u32 low = a[r] >> shift & 0x0f0f0f0fu, high = a[r + 2] >> shift & 0x0f0f0f0fu;
            store_word(plane + chunk * 512 + lane * 16 + w * 4, low | high << 4);
        }
    } else if constexpr (PLANE == PAIR_PLANE) {
        for (int block = 0; block < 2; block++) {
            u32 word = 0;
            for (int i = 0; i < 4; i++) word |= (a[4 * block + i] >> shift & 0x03030303u) << (2 * i);
            store_word(plane + chunk / 2 * 512 + lane * 16 + chunk % 2 * 8 + block * 4, word);
        }
    } else if constexpr (PLANE == BIT_PLANE) {
        u32 word = 0;
        for (int r = 0; r < 8; r++) word |= (a[r] >> shift & 0x01010101u) << r;
        store_word(plane + lane * 4 * FORMAT::CHUNKS + chunk * 4, word);
    }
}

// Rows of `num_blocks` blocks to whole groups of units; rows and columns beyond the matrix become zeros. With `second`,
// groups of 8 rows of both matrices, of `rows` rows each; else groups of 16 rows. One warp a chunk of a unit.
KERNEL __launch_bounds__(256)
repack(const u8* first, const u8* second, u8* out, int rows, int num_blocks, int num_groups) {
    grid_release_dependents();
    grid_wait();
    constexpr int BLOCKS = FORMAT::CHUNKS * 64 / Raw::VALUES;  // of a row in a unit
    const int num_units = ceil_div(num_blocks, BLOCKS);
    const long long warp = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    const int chunk = warp % FORMAT::CHUNKS, index = warp / FORMAT::CHUNKS % num_units;
    const int group = warp / FORMAT::CHUNKS / num_units;
    if (group >= num_groups) return;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u8* unit = out + (static_cast<size_t>(group) * num_units + index) * FORMAT::UNIT_BYTES;
    const u8* row_of[2];  // g and g + 8 of the group; null beyond the matrix
    for (int h = 0; h < 2; h++) {
        const int row = second ? group * 8 + g : group * 16 + 8 * h + g;
        const u8* matrix = second && h ? second : first;
        row_of[h] = row < rows ? matrix + static_cast<size_t>(row) * num_blocks * Raw::BYTES : nullptr;
    }

    u32 a[8];
    for (int r = 0; r < 8; r++) {
        a[r] = 0;
        const int column = (index * FORMAT::CHUNKS + chunk) * 64 + r / 4 * 32 + r % 4 / 2 * 16 + 4 * t;
        const int block = column / Raw::VALUES;
        if (!row_of[r % 2] || block >= num_blocks) continue;
        const u8* from = row_of[r % 2] + static_cast<size_t>(block) * Raw::BYTES;
        for (int j = 0; j < 4; j++) a[r] |= (Raw::code(from, column % Raw::VALUES + j) & 255) << (8 * j);
    }
    u8* at = unit;
    store_plane<Raw::FIRST>(at, chunk, lane, a, 0);
    at += plane_bytes(Raw::FIRST);
    store_plane<Raw::REST>(at, chunk, lane, a, Raw::REST_SHIFT);
    at += plane_bytes(Raw::REST);
    if (chunk != 0) return;

    constexpr int SCALES = BLOCKS * Raw::SCALES, UNIT_SCALES = BLOCKS * Raw::UNIT_SCALES;
    static_assert(plane_bytes(Raw::FIRST) + plane_bytes(Raw::REST) + 16 * (SCALES + UNIT_SCALES) == FORMAT::UNIT_BYTES,
                  "planes fill a unit");
    for (int h = 0; h < 2; h++) {
        const int row = g + 8 * h;
        for (int k = t; k < SCALES + UNIT_SCALES; k += 4) {
            const int block = index * BLOCKS + (k < SCALES ? k / Raw::SCALES : 0);  // unit scales: the block is the unit
            const u8* from = row_of[h] + static_cast<size_t>(block) * Raw::BYTES;
            u32 byte = 0;
            if (row_of[h] && block < num_blocks)
                byte = k < SCALES ? Raw::scale(from, k % Raw::SCALES) : Raw::unit_scale(from, k - SCALES);
            (k < SCALES ? at + row * SCALES + k : at + 16 * SCALES + row * UNIT_SCALES + k - SCALES)[0] = byte;
        }
    }
}
