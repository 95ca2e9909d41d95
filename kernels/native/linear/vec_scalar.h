// The vector primitives in portable C++: the slowest kernels, and the definition of what the others compute.
#pragma once
#include <cstring>

#include "formats.h"
#include "half.h"
#include "isa_macros.h"

namespace lamina::LAMINA_LINEAR_NS {

struct U8x64 { uint8_t v[64]; };
struct I32x16 { int32_t v[16]; };
struct F32x16 { float v[16]; };
struct Act4 { int8_t v[4]; };
struct Pairs { int16_t v[32]; };

constexpr int kSignedBias = 0;
constexpr int kDirectCols = 1;
constexpr int kStripTiles = 1;
constexpr int kGroupCols = 3;
constexpr int kDotCols = 1;
constexpr bool kIntegerScales = false;  // decode.h

template <class Result, class Function>
LAMINA_INLINE Result each16(Function function) {
  Result r;
  for (int i = 0; i < 16; ++i) r.v[i] = function(i);
  return r;
}
template <class Function>
LAMINA_INLINE U8x64 each64(Function function) {
  U8x64 r;
  for (int i = 0; i < 64; ++i) r.v[i] = static_cast<uint8_t>(function(i));
  return r;
}

LAMINA_INLINE U8x64 load_u8(const uint8_t* p) { U8x64 r; std::memcpy(r.v, p, 64); return r; }
LAMINA_INLINE void store_u8(uint8_t* p, const U8x64& v) { std::memcpy(p, v.v, 64); }

template <int kShift, int kMask>
LAMINA_INLINE U8x64 bits(const U8x64& v) {
  return each64([&](int i) { return (v.v[i] >> kShift) & kMask; });
}
template <int kFrom, int kTo, int kMask>
LAMINA_INLINE U8x64 join(const U8x64& low, const U8x64& plane) {
  return each64([&](int i) { return low.v[i] | (((plane.v[i] >> kFrom) << kTo) & kMask); });
}
LAMINA_INLINE U8x64 lookup(const int8_t* table, const U8x64& v) {
  return each64([&](int i) { return table[v.v[i]]; });
}
LAMINA_INLINE Act4 load_act(const int8_t* p) { Act4 r; std::memcpy(r.v, p, 4); return r; }

// Whether codes are to be read as int8 (they all fit; unsigned codes are below 128).
enum class Codes { kInt8 };
constexpr Codes codes_of(int, bool) { return Codes::kInt8; }

template <Codes kCodes>
struct Dot {
  I32x16 sum;
  void start(const I32x16& init) { sum = init; }
  void add(int, int, const U8x64& codes, const Act4& act) {
    for (int r = 0; r < 16; ++r) {
      for (int i = 0; i < 4; ++i) sum.v[r] += static_cast<int8_t>(codes.v[4 * r + i]) * act.v[i];
    }
  }
  I32x16 finish() const { return sum; }
};

LAMINA_INLINE I32x16 zero_i32() { return I32x16{}; }
LAMINA_INLINE I32x16 broadcast_i32(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return each16<I32x16>([&](int) { return word; });
}
LAMINA_INLINE I32x16 mul_add_i32(const I32x16& acc, const I32x16& a, const I32x16& b) {
  return each16<I32x16>([&](int i) { return acc.v[i] + a.v[i] * b.v[i]; });
}
template <int kShift, int kMask>
LAMINA_INLINE I32x16 field_i32(const I32x16& v) {
  return each16<I32x16>([&](int i) { return (v.v[i] >> kShift) & kMask; });
}
template <int kFactor>
LAMINA_INLINE I32x16 scale_i32(const I32x16& v, int addend) {
  return each16<I32x16>([&](int i) { return kFactor * v.v[i] + addend; });
}
LAMINA_INLINE I32x16 load_u8_i32(const uint8_t* p) { return each16<I32x16>([&](int i) { return p[i]; }); }
LAMINA_INLINE I32x16 load_s8_i32(const uint8_t* p) {
  return each16<I32x16>([&](int i) { return static_cast<int8_t>(p[i]); });
}

LAMINA_INLINE Pairs load_pairs_u8(const uint8_t* p) {
  Pairs r;
  for (int i = 0; i < 32; ++i) r.v[i] = p[i];
  return r;
}
LAMINA_INLINE Pairs load_pairs_u4(const uint8_t* p) {
  Pairs r;
  for (int i = 0; i < 32; ++i) r.v[i] = static_cast<int16_t>((p[i / 2] >> (4 * (i % 2))) & 15);
  return r;
}
LAMINA_INLINE Pairs load_pairs(const uint8_t* p) { Pairs r; std::memcpy(r.v, p, 64); return r; }
LAMINA_INLINE void store_pairs(uint8_t* p, const Pairs& v) { std::memcpy(p, v.v, 64); }
LAMINA_INLINE I32x16 dot_pairs(const I32x16& acc, const Pairs& pairs, const uint8_t* act) {
  int16_t a[2];
  std::memcpy(a, act, 4);
  return each16<I32x16>([&](int i) { return acc.v[i] + pairs.v[2 * i] * a[0] + pairs.v[2 * i + 1] * a[1]; });
}
LAMINA_INLINE U8x64 scale_codes(const U8x64& codes, const I32x16& factor, const I32x16& addend) {
  return each64([&](int i) { return codes.v[i] * factor.v[i / 4] + addend.v[i / 4]; });
}

LAMINA_INLINE F32x16 zero_f32() { return F32x16{}; }
LAMINA_INLINE F32x16 set_f32(float v) { return each16<F32x16>([&](int) { return v; }); }
LAMINA_INLINE F32x16 broadcast_f32(const uint8_t* p) {
  float word;
  std::memcpy(&word, p, 4);
  return set_f32(word);
}
LAMINA_INLINE F32x16 load_f32(const float* p) { F32x16 r; std::memcpy(r.v, p, 64); return r; }
LAMINA_INLINE void store_f32(float* p, const F32x16& v) { std::memcpy(p, v.v, 64); }
LAMINA_INLINE F32x16 load_f32(const float* p, int count) {
  return each16<F32x16>([&](int i) { return i < count ? p[i] : 0.0F; });
}
LAMINA_INLINE void store_f32(float* p, const F32x16& v, int count) {
  for (int i = 0; i < count; ++i) p[i] = v.v[i];
}
LAMINA_INLINE F32x16 to_float(const I32x16& v) {
  return each16<F32x16>([&](int i) { return static_cast<float>(v.v[i]); });
}
LAMINA_INLINE F32x16 fma(const F32x16& a, const F32x16& b, const F32x16& c) {
  return each16<F32x16>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
LAMINA_INLINE F32x16 fnma(const F32x16& a, const F32x16& b, const F32x16& c) {
  return each16<F32x16>([&](int i) { return __builtin_fmaf(-a.v[i], b.v[i], c.v[i]); });
}
LAMINA_INLINE F32x16 mul(const F32x16& a, const F32x16& b) {
  return each16<F32x16>([&](int i) { return a.v[i] * b.v[i]; });
}
LAMINA_INLINE F32x16 add(const F32x16& a, const F32x16& b) {
  return each16<F32x16>([&](int i) { return a.v[i] + b.v[i]; });
}
LAMINA_INLINE F32x16 div(const F32x16& a, const F32x16& b) {
  return each16<F32x16>([&](int i) { return a.v[i] / b.v[i]; });
}
LAMINA_INLINE F32x16 clamp(const F32x16& v, float low, float high) {
  return each16<F32x16>([&](int i) { return v.v[i] < low ? low : v.v[i] > high ? high : v.v[i]; });
}
// Nearest, ties to even: adding 1.5 x 2^23 leaves the rounded value in the low mantissa bits. |v| < 2^22.
LAMINA_INLINE I32x16 round_i32(const F32x16& v) {
  return each16<I32x16>([&](int i) {
    const float shifted = v.v[i] + 12582912.0F;
    int32_t word;
    std::memcpy(&word, &shifted, 4);
    return word - 0x4B400000;
  });
}
LAMINA_INLINE F32x16 power_of_two(const I32x16& exponent) {
  return each16<F32x16>([&](int i) { return float_from_bits(static_cast<uint32_t>(exponent.v[i] + 127) << 23); });
}

LAMINA_INLINE F32x16 load_half(const uint8_t* p) {
  return each16<F32x16>([&](int i) { return float_from_half(load_u16(p + 2 * i)); });
}
LAMINA_INLINE F32x16 load_bf16(const uint8_t* p) {
  return each16<F32x16>([&](int i) { return float_from_bf16(load_u16(p + 2 * i)); });
}
LAMINA_INLINE F32x16 load_e8m0(const uint8_t* p) {
  return each16<F32x16>([&](int i) { return float_from_e8m0_half(p[i]); });
}

LAMINA_INLINE I32x16 max_magnitude(const I32x16& so_far, const F32x16& v) {
  return each16<I32x16>([&](int i) {
    int32_t word;
    std::memcpy(&word, &v.v[i], 4);
    word &= 0x7FFFFFFF;
    return word > so_far.v[i] ? word : so_far.v[i];
  });
}
LAMINA_INLINE int32_t reduce_max(const I32x16& v) {
  int32_t r = v.v[0];
  for (int i = 1; i < 16; ++i) r = v.v[i] > r ? v.v[i] : r;
  return r;
}
LAMINA_INLINE int32_t reduce_add(const I32x16& v) {
  int32_t r = 0;
  for (int i = 0; i < 16; ++i) r += v.v[i];
  return r;
}
LAMINA_INLINE void store_i8(int8_t* p, const I32x16& v) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(v.v[i]);
}

LAMINA_INLINE void prefetch(const uint8_t*) {}
LAMINA_INLINE void prefetch_l2(const uint8_t*) {}
LAMINA_INLINE void prefetch_write(const void*) {}

}  // namespace lamina::LAMINA_LINEAR_NS
