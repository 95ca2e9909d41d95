// How packed weights lie in memory, and how a warp turns them into int8 fragments.
//
// A unit is 16 rows x CHUNKS * 64 columns, stored as contiguous planes: codes, then scales. Units of a group of 16 rows
// follow each other along the columns. Of a chunk of 64 columns, lane 4 g + t holds rows g and g + 8, and per block of
// 32 the columns 4 t .. 4 t + 3 and 16 + 4 t ..: four registers of four int8, in the order of an m16n8k32 A fragment:
//     a[4 block + i],  i = 0: row g, low half   1: row g + 8, low half   2: row g, high half   3: row g + 8, high half
// A nibble plane keeps i = 0 | 2 << 4 in word 2 block and i = 1 | 3 << 4 in word 2 block + 1; a plane of single bits
// keeps the bit of register r at bit r of each byte; a plane of bit pairs has word `block`, register i at bits 2 i of
// each byte.
//
// Symmetric types are stored as two's complement and unpacked to the top bits of each byte, so sign extension is free;
// the power of two this multiplies by stands in unit_scale.
//
// A format offers: load() the lane's share of a unit; codes() of a chunk; scale(block or half-block, h) and, with MINS,
// minimum(block, h) for row g + 8 h; unit_scale(h) and unit_minimum(h). A value is
//     unit_scale * scale * code + unit_minimum * minimum.
// `Own` is what linear_row.cu loads instead of all scales: whole scales and minima of blocks 2t and 2t + 1 only, or the
// integer scales of half-blocks 2t, 2t + 1, 8 + 2t and 9 + 2t.
#include "planes.cuh"

// -- blocks of 32 with one fp16 scale: a unit is one chunk

template <int CODE_BYTES>
struct Scaled32 {
    static constexpr int CHUNKS = 1, SCALE_VALUES = 32, UNIT_BYTES = CODE_BYTES + 64;
    static constexpr bool MINS = false;
    u32 pair[2];
    DEVICE void load_scales(const u8* unit, int lane) {
        for (int h = 0; h < 2; h++) pair[h] = stream_load4(unit + CODE_BYTES + (lane / 4 + 8 * h) * 4);
    }
    DEVICE float scale(int block, int h) const { return half_to_float((pair[h] >> (16 * block)) & 0xffff); }
    template <int UNIT_DIVISOR>
    struct OwnScaled {
        u32 pair[2];
        DEVICE void load(const u8* unit, int lane) {
            for (int h = 0; h < 2; h++) pair[h] = stream_load4(unit + CODE_BYTES + (lane / 4 + 8 * h) * 4);
        }
        DEVICE float scale(int j, int h) const {
            return half_to_float((pair[h] >> (16 * j)) & 0xffff) * (1.f / UNIT_DIVISOR);
        }
    };
    DEVICE float minimum(int, int) const { return 0.f; }
    DEVICE float unit_minimum(int) const { return 0.f; }
};

struct Q4_0 : Scaled32<512> {
    typedef OwnScaled<16> Own;
    u32 nibbles[4];
    DEVICE void load_codes(const u8* unit, int lane) {
        stream_load(nibbles, unit + lane * 16);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        load_scales(unit, lane);
    }
    DEVICE void codes(int, u32 (&a)[8]) const { nibble_codes(nibbles, 4, a); }
    DEVICE float unit_scale(int) const { return 1.f / 16; }
};

struct IQ4_NL : Scaled32<512> {
    typedef OwnScaled<1> Own;
    u32 nibbles[4];
    DEVICE void load_codes(const u8* unit, int lane) {
        stream_load(nibbles, unit + lane * 16);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        load_scales(unit, lane);
    }
    // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
    DEVICE void codes(int, u32 (&a)[8]) const {
        table_codes(nibbles, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, a);
    }
    DEVICE float unit_scale(int) const { return 1.f; }
};

struct Q5_0 : Scaled32<640> {
    typedef OwnScaled<8> Own;
    u32 nibbles[4], bits;
    DEVICE void load_codes(const u8* unit, int lane) {
        stream_load(nibbles, unit + lane * 16);
        bits = stream_load4(unit + 512 + lane * 4);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        load_scales(unit, lane);
    }
    DEVICE void codes(int, u32 (&a)[8]) const {
        nibble_codes(nibbles, 3, a);
        add_bits(bits, 7, a);
    }
    DEVICE float unit_scale(int) const { return 1.f / 8; }
};

struct Q8_0 : Scaled32<1024> {
    typedef OwnScaled<1> Own;
    u32 bytes[2][4];
    DEVICE void load_codes(const u8* unit, int lane) {
        for (int block = 0; block < 2; block++) stream_load(bytes[block], unit + block * 512 + lane * 16);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        load_scales(unit, lane);
    }
    DEVICE void codes(int, u32 (&a)[8]) const {
#pragma unroll
        for (int r = 0; r < 8; r++) a[r] = bytes[r / 4][r % 4];
    }
    DEVICE float unit_scale(int) const { return 1.f; }
};

// One E8M0 byte per 32 values: 2^(e - 128), for codes that are twice the E2M1 values.
struct MXFP4 {
    static constexpr int CHUNKS = 1, SCALE_VALUES = 32, UNIT_BYTES = 544;
    static constexpr bool MINS = false;
    u32 nibbles[4], exponents[2];
    DEVICE void load_codes(const u8* unit, int lane) { stream_load(nibbles, unit + lane * 16); }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        for (int h = 0; h < 2; h++) exponents[h] = stream_load2(unit + 512 + (lane / 4 + 8 * h) * 2);
    }
    DEVICE void codes(int, u32 (&a)[8]) const {  // 0 1 2 3 4 6 8 12 and their negatives
        table_codes(nibbles, 0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu, a);
    }
    DEVICE static float power(u32 e) { return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23); }
    DEVICE float scale(int block, int h) const { return power((exponents[h] >> (8 * block)) & 255); }
    DEVICE float minimum(int, int) const { return 0.f; }
    DEVICE float unit_scale(int) const { return 1.f; }
    DEVICE float unit_minimum(int) const { return 0.f; }
    struct Own {
        u32 exponents[2];
        DEVICE void load(const u8* unit, int lane) {
            for (int h = 0; h < 2; h++) exponents[h] = stream_load2(unit + 512 + (lane / 4 + 8 * h) * 2);
        }
        DEVICE float scale(int j, int h) const { return power((exponents[h] >> (8 * j)) & 255); }
    };
};

// -- blocks of 32 with fp16 scale and minimum

template <int CODE_BYTES>
struct Affine32 {
    static constexpr int CHUNKS = 1, SCALE_VALUES = 32, UNIT_BYTES = CODE_BYTES + 128;
    static constexpr bool MINS = true;
    u32 pairs[2][2];  // [h][block]: scale | minimum << 16
    DEVICE void load_scales(const u8* unit, int lane) {
        for (int h = 0; h < 2; h++) stream_load(pairs[h], unit + CODE_BYTES + (lane / 4 + 8 * h) * 8);
    }
    DEVICE float scale(int block, int h) const { return half_to_float(pairs[h][block] & 0xffff); }
    DEVICE float minimum(int block, int h) const { return half_to_float(pairs[h][block] >> 16); }
    DEVICE float unit_scale(int) const { return 1.f; }
    DEVICE float unit_minimum(int) const { return 1.f; }
    struct Own {
        u32 pairs[2][2];
        DEVICE void load(const u8* unit, int lane) {
            for (int h = 0; h < 2; h++) stream_load(pairs[h], unit + CODE_BYTES + (lane / 4 + 8 * h) * 8);
        }
        DEVICE float scale(int j, int h) const { return half_to_float(pairs[h][j] & 0xffff); }
        DEVICE float minimum(int j, int h) const { return half_to_float(pairs[h][j] >> 16); }
    };
};

struct Q4_1 : Affine32<512> {
    u32 nibbles[4];
    DEVICE void load_codes(const u8* unit, int lane) {
        stream_load(nibbles, unit + lane * 16);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        load_scales(unit, lane);
    }
    DEVICE void codes(int, u32 (&a)[8]) const { nibble_codes(nibbles, 0, a); }
};

struct Q5_1 : Affine32<640> {
    u32 nibbles[4], bits;
    DEVICE void load_codes(const u8* unit, int lane) {
        stream_load(nibbles, unit + lane * 16);
        bits = stream_load4(unit + 512 + lane * 4);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        load_scales(unit, lane);
    }
    DEVICE void codes(int, u32 (&a)[8]) const {
        nibble_codes(nibbles, 0, a);
        add_bits(bits, 4, a);
    }
};

// -- superblocks of 256: integer scales under one or two fp16 numbers; a unit is four chunks

// Per row 8 x (scale, minimum) bytes, then (d, dmin).
template <int CODE_BYTES>
struct SuperAffine {
    static constexpr int CHUNKS = 4, SCALE_VALUES = 32, UNIT_BYTES = CODE_BYTES + 320;
    static constexpr bool MINS = true;
    u32 scales[2][4], pair[2];
    DEVICE void load_scales(const u8* unit, int lane) {
        for (int h = 0; h < 2; h++) {
            const int row = lane / 4 + 8 * h;
            stream_load(scales[h], unit + CODE_BYTES + row * 16);
            pair[h] = stream_load4(unit + CODE_BYTES + 256 + row * 4);
        }
    }
    DEVICE int scale(int block, int h) const { return byte_of(scales[h], 2 * block); }
    DEVICE float minimum(int block, int h) const { return static_cast<float>(byte_of(scales[h], 2 * block + 1)); }
    DEVICE float unit_scale(int h) const { return half_to_float(pair[h] & 0xffff); }
    DEVICE float unit_minimum(int h) const { return -half_to_float(pair[h] >> 16); }
    struct Own {
        u32 scales[2], pair[2];
        DEVICE void load(const u8* unit, int lane) {
            for (int h = 0; h < 2; h++) {
                const int row = lane / 4 + 8 * h;
                scales[h] = stream_load4(unit + CODE_BYTES + row * 16 + lane % 4 * 4);
                pair[h] = stream_load4(unit + CODE_BYTES + 256 + row * 4);
            }
        }
        DEVICE float scale(int j, int h) const {
            return half_to_float(pair[h] & 0xffff) * static_cast<float>((scales[h] >> (16 * j)) & 255);
        }
        DEVICE float minimum(int j, int h) const {
            return -half_to_float(pair[h] >> 16) * static_cast<float>((scales[h] >> (16 * j + 8)) & 255);
        }
    };
};

struct Q4_K : SuperAffine<2048> {
    u32 nibbles[4][4];
    DEVICE void load_codes(const u8* unit, int lane) {
        for (int chunk = 0; chunk < 4; chunk++) stream_load(nibbles[chunk], unit + chunk * 512 + lane * 16);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        load_scales(unit, lane);
    }
    DEVICE void codes(int chunk, u32 (&a)[8]) const { nibble_codes(nibbles[chunk], 0, a); }
};

struct Q5_K : SuperAffine<2560> {
    u32 nibbles[4][4], bits[4];
    DEVICE void load_codes(const u8* unit, int lane) {
        for (int chunk = 0; chunk < 4; chunk++) stream_load(nibbles[chunk], unit + chunk * 512 + lane * 16);
        stream_load(bits, unit + 2048 + lane * 16);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        load_scales(unit, lane);
    }
    DEVICE void codes(int chunk, u32 (&a)[8]) const {
        nibble_codes(nibbles[chunk], 0, a);
        add_bits(bits[chunk], 4, a);
    }
};

// Per row 16 int8 scales, one per 16 values, then d.
template <int CODE_BYTES>
struct SuperScaled16 {
    static constexpr int CHUNKS = 4, SCALE_VALUES = 16, UNIT_BYTES = CODE_BYTES + 288;
    static constexpr bool MINS = false;
    u32 scales[2][4], d[2];
    DEVICE void load_scales(const u8* unit, int lane) {
        for (int h = 0; h < 2; h++) {
            const int row = lane / 4 + 8 * h;
            stream_load(scales[h], unit + CODE_BYTES + row * 16);
            d[h] = stream_load2(unit + CODE_BYTES + 256 + row * 2);
        }
    }
    DEVICE int scale(int half_block, int h) const { return signed_byte_of(scales[h], half_block); }
    DEVICE float minimum(int, int) const { return 0.f; }
    DEVICE float unit_minimum(int) const { return 0.f; }
    template <int UNIT_DIVISOR>
    struct OwnScaled {
        u32 scales[2][2], d[2];  // [set][h]
        DEVICE void load(const u8* unit, int lane) {
            for (int h = 0; h < 2; h++) {
                const int row = lane / 4 + 8 * h;
                for (int set = 0; set < 2; set++)
                    scales[set][h] = stream_load2(unit + CODE_BYTES + row * 16 + set * 8 + lane % 4 * 2);
                d[h] = stream_load2(unit + CODE_BYTES + 256 + row * 2);
            }
        }
        DEVICE int scale(int set, int j, int h) const {
            return static_cast<int>(scales[set][h] << (24 - 8 * j)) >> 24;
        }
        DEVICE float unit_scale(int h) const { return half_to_float(d[h]) * (1.f / UNIT_DIVISOR); }
    };
};

struct Q6_K : SuperScaled16<3072> {
    typedef OwnScaled<4> Own;
    u32 nibbles[4][4], pairs[2][4];
    DEVICE void load_codes(const u8* unit, int lane) {
        for (int chunk = 0; chunk < 4; chunk++) stream_load(nibbles[chunk], unit + chunk * 512 + lane * 16);
        for (int two = 0; two < 2; two++) stream_load(pairs[two], unit + 2048 + two * 512 + lane * 16);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        load_scales(unit, lane);
    }
    DEVICE void codes(int chunk, u32 (&a)[8]) const {
        nibble_codes(nibbles[chunk], 2, a);
        add_pairs(pairs[chunk / 2] + 2 * (chunk % 2), 6, a);
    }
    DEVICE float unit_scale(int h) const { return half_to_float(d[h]) * (1.f / 4); }
};

struct Q3_K : SuperScaled16<1536> {
    typedef OwnScaled<32> Own;
    u32 pairs[2][4], bits[4];
    DEVICE void load_codes(const u8* unit, int lane) {
        for (int two = 0; two < 2; two++) stream_load(pairs[two], unit + two * 512 + lane * 16);
        stream_load(bits, unit + 1024 + lane * 16);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        load_scales(unit, lane);
    }
    DEVICE void codes(int chunk, u32 (&a)[8]) const {
#pragma unroll
        for (int r = 0; r < 8; r++) a[r] = 0;
        add_pairs(pairs[chunk / 2] + 2 * (chunk % 2), 5, a);
        add_bits(bits[chunk], 7, a);
    }
    DEVICE float unit_scale(int h) const { return half_to_float(d[h]) * (1.f / 32); }
};

// Per row 16 bytes scale | minimum << 4, one per 16 values, then (d, dmin).
struct Q2_K {
    static constexpr int CHUNKS = 4, SCALE_VALUES = 16, UNIT_BYTES = 1344;
    static constexpr bool MINS = true;
    u32 pairs[2][4], scales[2][4], pair[2];
    DEVICE void load(const u8* unit, int lane) {
        for (int two = 0; two < 2; two++) stream_load(pairs[two], unit + two * 512 + lane * 16);
        for (int h = 0; h < 2; h++) {
            const int row = lane / 4 + 8 * h;
            stream_load(scales[h], unit + 1024 + row * 16);
            pair[h] = stream_load4(unit + 1280 + row * 4);
        }
    }
    DEVICE void codes(int chunk, u32 (&a)[8]) const {
#pragma unroll
        for (int r = 0; r < 8; r++) a[r] = 0;
        add_pairs(pairs[chunk / 2] + 2 * (chunk % 2), 0, a);
    }
    DEVICE int scale(int half_block, int h) const { return byte_of(scales[h], half_block) & 15; }
    DEVICE int half_minimum(int half_block, int h) const { return byte_of(scales[h], half_block) >> 4; }
    DEVICE float unit_scale(int h) const { return half_to_float(pair[h] & 0xffff); }
    DEVICE float unit_minimum(int h) const { return -half_to_float(pair[h] >> 16); }
};

// Per row 8 int8 scales, one per 32 values, then d.
struct IQ4_XS {
    static constexpr int CHUNKS = 4, SCALE_VALUES = 32, UNIT_BYTES = 2208;
    static constexpr bool MINS = false;
    u32 nibbles[4][4], scales[2][2], d[2];
    struct Own {
        u32 scales[2], d[2];
        DEVICE void load(const u8* unit, int lane) {
            for (int h = 0; h < 2; h++) {
                const int row = lane / 4 + 8 * h;
                scales[h] = stream_load2(unit + 2048 + row * 8 + lane % 4 * 2);
                d[h] = stream_load2(unit + 2176 + row * 2);
            }
        }
        DEVICE float scale(int j, int h) const {
            return half_to_float(d[h]) * static_cast<float>(static_cast<int>(scales[h] << (24 - 8 * j)) >> 24);
        }
    };
    DEVICE void load_codes(const u8* unit, int lane) {
        for (int chunk = 0; chunk < 4; chunk++) stream_load(nibbles[chunk], unit + chunk * 512 + lane * 16);
    }
    DEVICE void load(const u8* unit, int lane) {
        load_codes(unit, lane);
        for (int h = 0; h < 2; h++) {
            const int row = lane / 4 + 8 * h;
            stream_load(scales[h], unit + 2048 + row * 8);
            d[h] = stream_load2(unit + 2176 + row * 2);
        }
    }
    DEVICE void codes(int chunk, u32 (&a)[8]) const {
        table_codes(nibbles[chunk], 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, a);
    }
    DEVICE int scale(int block, int h) const { return signed_byte_of(scales[h], block); }
    DEVICE float minimum(int, int) const { return 0.f; }
    DEVICE float unit_scale(int h) const { return half_to_float(d[h]); }
    DEVICE float unit_minimum(int) const { return 0.f; }
};
