// Layout of a KV page: 16 tokens of one KV head, in the order in which tensor-core fragments want it (see tile.cuh).
//
// A K page is [width / 32][2][lane 4 g + t][8]: the B fragments of S = Q K^T. Tile j = 0, 1 has token 4 (g / 2) + 2 j
// + g % 2 in column g; lane t holds dimensions 32 c + 8 t .. + 7. A V page is [width / 16][lane 4 g + t][2][4]: the
// B fragments of P V; lane (g, t) holds tokens 4 t .. 4 t + 3 of dimensions 16 c + g and 16 c + 8 + g. The same order
// serves all types. `width` is the head's size rounded up to whole fragments; what is beyond the head stays zero.
// Q8 is ggml's Q8_0: int8 codes in that order, then one f16 scale per 32 dimensions and token, [width / 32][16].
#include "common.cuh"

constexpr int PAGE_TOKENS = 16, Q8_VALUES = 32;

enum KvType { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2, KV_Q8 = 3 };

DEVICE constexpr int key_width(int dim) { return (dim + 31) / 32 * 32; }
DEVICE constexpr int value_width(int dim) { return (dim + 15) / 16 * 16; }
DEVICE constexpr int page_bytes(int type, int width) {
    if (type == KV_Q8) return (PAGE_TOKENS + PAGE_TOKENS * 2 / Q8_VALUES) * width;
    return (type == KV_F32 ? 4 : 2) * PAGE_TOKENS * width;
}

DEVICE int key_index(int token, int d) {
    const int lane = (2 * (token / 4) + token % 2) * 4 + (d / 8) % 4;
    return ((d / 32 * 2 + (token / 2) % 2) * 32 + lane) * 8 + d % 8;
}

DEVICE int value_index(int token, int d) {
    return (d / 16 * 32 + (d % 8) * 4 + token / 4) * 8 + (d / 8) % 2 * 4 + token % 4;
}

// Where a Q8 page keeps the scale of a token's dimension d, in bytes.
DEVICE int scale_offset(int width, int token, int d) {
    return PAGE_TOKENS * width + (d / Q8_VALUES * PAGE_TOKENS + token) * 2;
}

DEVICE const u8* page_at(const void* pages, int block, int num_heads, int head, int page_bytes) {
    return static_cast<const u8*>(pages) + (static_cast<size_t>(block) * num_heads + head) * page_bytes;
}

// Element `index` of a page that is not Q8.
DEVICE void kv_store(u8* page, int type, int index, float value) {
    if (type == KV_F32) {
        reinterpret_cast<float*>(page)[index] = value;
    } else {
        const u32 bits = type == KV_F16 ? float_to_half(value) : float_to_bf16(value);
        reinterpret_cast<u16*>(page)[index] = static_cast<u16>(bits);
    }
}

// Element `index` of a page of any type; it belongs to this token and dimension.
DEVICE float kv_load(const u8* page, int type, int width, int index, int token, int d) {
    if (type == KV_F32) return reinterpret_cast<const float*>(page)[index];
    if (type == KV_Q8) {
        const u32 scale = *reinterpret_cast<const u16*>(page + scale_offset(width, token, d));
        return half_to_float(scale) * static_cast<float>(static_cast<i8>(page[index]));
    }
    const u32 bits = reinterpret_cast<const u16*>(page)[index];
    return type == KV_F16 ? half_to_float(bits) : bf16_to_float(bits);
}
