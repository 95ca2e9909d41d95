// Layout of a KV page: 16 tokens of one KV head, in the order in which tensor-core fragments want it (see tile.cuh).
//
// A K page is [key_dim / 32][2][lane 4 g + t][8]: the B fragments of S = Q K^T. Tile j = 0, 1 has token 4 (g / 2) + 2 j
// + g % 2 in column g; lane t holds dimensions 32 c + 8 t .. + 7. A V page is [value_dim / 16][lane 4 g + t][2][4]: the
// B fragments of P V; lane (g, t) holds tokens 4 t .. 4 t + 3 of dimensions 16 c + g and 16 c + 8 + g. The same order
// serves f32 pages.
#include "common.cuh"

constexpr int PAGE_TOKENS = 16;

enum KvType { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2 };

DEVICE int key_index(int token, int d) {
    const int lane = (2 * (token / 4) + token % 2) * 4 + (d / 8) % 4;
    return ((d / 32 * 2 + (token / 2) % 2) * 32 + lane) * 8 + d % 8;
}

DEVICE int value_index(int token, int d) {
    return (d / 16 * 32 + (d % 8) * 4 + token / 4) * 8 + (d / 8) % 2 * 4 + token % 4;
}

DEVICE void kv_store(void* pages, int type, size_t at, float value) {
    if (type == KV_F32) {
        static_cast<float*>(pages)[at] = value;
    } else {
        static_cast<u16*>(pages)[at] = static_cast<u16>(type == KV_F16 ? float_to_half(value) : float_to_bf16(value));
    }
}

DEVICE float kv_load(const void* pages, int type, size_t at) {
    if (type == KV_F32) return static_cast<const float*>(pages)[at];
    const u32 bits = static_cast<const u16*>(pages)[at];
    return type == KV_F16 ? half_to_float(bits) : bf16_to_float(bits);
}
