// Codes out of their planes, four a register; the layout is described in formats.cuh.
#include "common.cuh"

DEVICE int byte_of(const u32* words, int index) { return (words[index / 4] >> (8 * (index % 4))) & 255; }

DEVICE int signed_byte_of(const u32* words, int index) {
    return static_cast<int>(words[index / 4] << (24 - 8 * (index % 4))) >> 24;
}

// Bits MASK of `word` shifted left by `shift` (right if negative).
DEVICE u32 moved(u32 word, int shift, u32 mask) { return (shift >= 0 ? word << shift : word >> -shift) & mask; }

// Nibbles of all eight registers, placed at bit `at` of each byte.
DEVICE void nibble_codes(const u32 (&plane)[4], int at, u32 (&a)[8]) {
    const u32 mask = 0x0f0f0f0fu << at;
#pragma unroll
    for (int word = 0; word < 4; word++) {
        const int first = (word / 2) * 4 + word % 2;
        a[first] = moved(plane[word], at, mask);
        a[first + 2] = moved(plane[word], at - 4, mask);
    }
}

DEVICE void add_bits(u32 plane, int at, u32 (&a)[8]) {
#pragma unroll
    for (int r = 0; r < 8; r++) a[r] |= moved(plane, at - r, 0x01010101u << at);
}

DEVICE void add_pairs(const u32* plane, int at, u32 (&a)[8]) {
#pragma unroll
    for (int r = 0; r < 8; r++) a[r] |= moved(plane[r / 4], at - 2 * (r % 4), 0x03030303u << at);
}

// Nibbles as indices into 16 int8.
DEVICE void table_codes(const u32 (&plane)[4], u32 t0, u32 t1, u32 t2, u32 t3, u32 (&a)[8]) {
#pragma unroll
    for (int word = 0; word < 4; word++) {
        const u32 q = plane[word];
        const u32 choice = 0x32103210u | ((q & 0x88888888u) >> 1);
        u32 looked_up[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 index = (q >> (16 * half)) & 0x7777u;
            const u32 low = __byte_perm(t0, t1, index), high = __byte_perm(t2, t3, index);
            looked_up[half] = __byte_perm(low, high, choice >> (16 * half));
        }
        const int first = (word / 2) * 4 + word % 2;
        a[first] = __byte_perm(looked_up[0], looked_up[1], 0x6420);
        a[first + 2] = __byte_perm(looked_up[0], looked_up[1], 0x7531);
    }
}
