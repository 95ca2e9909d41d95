// The bit planes of one row of a sub-block, four codes at a time: a word holds the codes of group g, first code in its
// lowest byte. Codes are what Format counts: low and high bits together, not yet centred.
#pragma once
#include "formats.h"
#include "half.h"
#include "lamina/linear.h"

namespace lamina::LAMINA_LINEAR_NS {

constexpr int kWords = kSubCols / 4;
constexpr uint32_t kEachByte = 0x01010101U;

template <int kType>
inline void put_planes(const uint32_t (&codes)[kWords], int row, uint8_t* data) {
  constexpr Format f = format_of(kType);
  uint8_t* at = data + row * 4;
  if constexpr (f.low_bits == 8) {
    for (int g = 0; g < kWords; ++g) store_u32(at + g * kLine, codes[g]);
  } else if constexpr (f.low_bits == 4) {
    constexpr uint32_t mask = 15 * kEachByte;
    for (int i = 0; i < 4; ++i) store_u32(at + i * kLine, (codes[i] & mask) | (codes[i + 4] & mask) << 4);
  } else {
    constexpr uint32_t mask = 3 * kEachByte;
    for (int i = 0; i < 2; ++i) {
      uint32_t line = 0;
      for (int j = 0; j < 4; ++j) line |= (codes[4 * i + j] & mask) << (2 * j);
      store_u32(at + i * kLine, line);
    }
  }
  uint8_t* high = at + f.low_bits * kLine;
  if constexpr (f.high_bits == 1) {
    uint32_t line = 0;
    for (int g = 0; g < kWords; ++g) line |= ((codes[g] >> f.low_bits) & kEachByte) << g;
    store_u32(high, line);
  }
  if constexpr (f.high_bits == 2) {
    for (int i = 0; i < 2; ++i) {
      uint32_t line = 0;
      for (int j = 0; j < 4; ++j) line |= ((codes[4 * i + j] >> f.low_bits) & (3 * kEachByte)) << (2 * j);
      store_u32(high + i * kLine, line);
    }
  }
}

template <int kType>
inline void get_planes(const uint8_t* data, int row, uint32_t (&codes)[kWords]) {
  constexpr Format f = format_of(kType);
  const uint8_t* at = data + row * 4;
  const uint8_t* high = at + f.low_bits * kLine;
  for (int g = 0; g < kWords; ++g) {
    uint32_t word;
    if constexpr (f.low_bits == 8) word = load_u32(at + g * kLine);
    else if constexpr (f.low_bits == 4) word = (load_u32(at + g % 4 * kLine) >> (g / 4 * 4)) & (15 * kEachByte);
    else word = (load_u32(at + g / 4 * kLine) >> (g % 4 * 2)) & (3 * kEachByte);
    if constexpr (f.high_bits == 1) word |= ((load_u32(high) >> g) & kEachByte) << f.low_bits;
    if constexpr (f.high_bits == 2) {
      word |= ((load_u32(high + g / 4 * kLine) >> (g % 4 * 2)) & (3 * kEachByte)) << f.low_bits;
    }
    codes[g] = word;
  }
}

// Calls visit.template operator()<kType>() with the run-time `type` as a constant; types without a kernel do nothing.
template <class Visit>
inline void with_type(int type, Visit visit) {
  switch (type) {
    case kF32: return visit.template operator()<kF32>();
    case kF16: return visit.template operator()<kF16>();
    case kBF16: return visit.template operator()<kBF16>();
    case kQ4_0: return visit.template operator()<kQ4_0>();
    case kQ4_1: return visit.template operator()<kQ4_1>();
    case kQ5_0: return visit.template operator()<kQ5_0>();
    case kQ5_1: return visit.template operator()<kQ5_1>();
    case kQ8_0: return visit.template operator()<kQ8_0>();
    case kQ2_K: return visit.template operator()<kQ2_K>();
    case kQ3_K: return visit.template operator()<kQ3_K>();
    case kQ4_K: return visit.template operator()<kQ4_K>();
    case kQ5_K: return visit.template operator()<kQ5_K>();
    case kQ6_K: return visit.template operator()<kQ6_K>();
    case kIQ4_NL: return visit.template operator()<kIQ4_NL>();
    case kIQ4_XS: return visit.template operator()<kIQ4_XS>();
    case kMXFP4: return visit.template operator()<kMXFP4>();
    default: return;
  }
}

// What an ISA keeps signed codes biased by: AVX-512's vpdpbusd takes unsigned weights, and AMX shares its layout.
constexpr uint8_t stored_bias(Isa isa, const Format& f) {
  return (isa == Isa::kAvx512Vnni || isa == Isa::kAmx) && f.is_signed && f.table == Table::kNone ? 128 : 0;
}

}  // namespace lamina::LAMINA_LINEAR_NS
