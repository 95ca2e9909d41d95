// GGUF's own blocks: where a file keeps the codes and scales of each type.
#pragma once
#include "formats.h"
#include "half.h"
#include "planes.h"

namespace lamina::LAMINA_LINEAR_NS {

struct BlockSize {
  int values;
  int bytes;
};

constexpr BlockSize block_size(int type) {
  switch (type) {
    case kQ4_0: case kIQ4_NL: return {32, 18};
    case kQ4_1: return {32, 20};
    case kQ5_0: return {32, 22};
    case kQ5_1: return {32, 24};
    case kQ8_0: return {32, 34};
    case kMXFP4: return {32, 17};
    case kQ2_K: return {256, 84};
    case kQ3_K: return {256, 110};
    case kQ4_K: return {256, 144};
    case kQ5_K: return {256, 176};
    case kQ6_K: return {256, 210};
    case kIQ4_XS: return {256, 136};
    default: return {1, type == kF32 ? 4 : 2};
  }
}

// 16 bytes of nibbles: low ones are the first 16 codes, high ones the next.
inline void read_nibble_halves(const uint8_t* p, uint32_t (&codes)[kWords]) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = load_u32(p + 4 * i);
    codes[i] = word & (15 * kEachByte);
    codes[i + 4] = (word >> 4) & (15 * kEachByte);
  }
}

// Adds bit i of `bits` to code i as its fifth bit: 4 bits are spread over 4 bytes by a multiplication.
inline void add_fifth_bits(uint32_t bits, uint32_t (&codes)[kWords]) {
  for (int g = 0; g < kWords; ++g) {
    const uint32_t four = (bits >> (4 * g)) & 15U;
    codes[g] |= ((four * 0x00204081U) & kEachByte) << 4;
  }
}

// The codes of sub-block `sub` of a block.
template <int kType>
inline void read_codes(const uint8_t* block, int sub, uint32_t (&codes)[kWords]) {
  if constexpr (kType == kQ4_0 || kType == kIQ4_NL) read_nibble_halves(block + 2, codes);
  if constexpr (kType == kMXFP4) read_nibble_halves(block + 1, codes);
  if constexpr (kType == kQ4_1) read_nibble_halves(block + 4, codes);
  if constexpr (kType == kIQ4_XS) read_nibble_halves(block + 8 + 16 * sub, codes);
  if constexpr (kType == kQ5_0 || kType == kQ5_1) {
    constexpr int at = kType == kQ5_0 ? 2 : 4;
    read_nibble_halves(block + at + 4, codes);
    add_fifth_bits(load_u32(block + at), codes);
  }
  for (int g = 0; g < kWords; ++g) {
    if constexpr (kType == kQ8_0) codes[g] = load_u32(block + 2 + 4 * g);
    if constexpr (kType == kQ4_K || kType == kQ5_K) {
      const uint8_t* nibbles = block + (kType == kQ4_K ? 16 : 48) + 32 * (sub / 2);
      codes[g] = (load_u32(nibbles + 4 * g) >> (4 * (sub % 2))) & (15 * kEachByte);
      if constexpr (kType == kQ5_K) codes[g] |= ((load_u32(block + 16 + 4 * g) >> sub) & kEachByte) << 4;
    }
    if constexpr (kType == kQ6_K) {
      const int half = sub / 4, quarter = sub % 4;
      const uint32_t low = load_u32(block + 64 * half + 32 * (quarter % 2) + 4 * g) >> (4 * (quarter / 2));
      const uint32_t high = load_u32(block + 128 + 32 * half + 4 * g) >> (2 * quarter);
      codes[g] = (low & (15 * kEachByte)) | (high & (3 * kEachByte)) << 4;
    }
    if constexpr (kType == kQ2_K || kType == kQ3_K) {
      const uint8_t* two_bits = block + (kType == kQ2_K ? 16 : 32) + 32 * (sub / 4);
      codes[g] = (load_u32(two_bits + 4 * g) >> (2 * (sub % 4))) & (3 * kEachByte);
      if constexpr (kType == kQ3_K) codes[g] |= ((load_u32(block + 4 * g) >> sub) & kEachByte) << 2;
    }
  }
}

// Scale and min i (of 8) of Q4_K and Q5_K: 6 bits each in 12 bytes.
inline uint8_t scale6(const uint8_t* b, int i) {
  return static_cast<uint8_t>(i < 4 ? b[i] & 63 : (b[i + 4] & 15) | (b[i - 4] >> 6 << 4));
}
inline uint8_t min6(const uint8_t* b, int i) {
  return static_cast<uint8_t>(i < 4 ? b[i + 4] & 63 : (b[i + 4] >> 4) | (b[i] >> 6 << 4));
}

// Integer scale i of a block of 256 (8 or 16 of them), as int8 or uint8.
template <int kType>
inline uint8_t read_scale(const uint8_t* block, int i) {
  if constexpr (kType == kQ2_K) return block[i] & 15;
  if constexpr (kType == kQ4_K || kType == kQ5_K) return scale6(block + 4, i);
  if constexpr (kType == kQ6_K) return block[192 + i];
  if constexpr (kType == kQ3_K) {
    const uint8_t* b = block + 96;
    const int low = i < 8 ? b[i] & 15 : b[i - 8] >> 4;
    const int high = (b[8 + i % 4] >> (2 * (i / 4))) & 3;
    return static_cast<uint8_t>((low | high << 4) - 32);
  }
  if constexpr (kType == kIQ4_XS) {
    const int low = (block[4 + i / 2] >> (4 * (i % 2))) & 15;
    const int high = (load_u16(block + 2) >> (2 * i)) & 3;
    return static_cast<uint8_t>((low | high << 4) - 32);
  }
  return 0;
}

template <int kType>
inline uint8_t read_min(const uint8_t* block, int i) {
  return kType == kQ2_K ? static_cast<uint8_t>(block[i] >> 4) : min6(block + 4, i);
}

// Where a block of 256 keeps its fp16 scale; the fp16 of the mins follows it.
constexpr int super_scale_at(int type) {
  return type == kQ2_K ? 80 : type == kQ3_K ? 108 : type == kQ6_K ? 208 : 0;
}

}  // namespace lamina::LAMINA_LINEAR_NS
