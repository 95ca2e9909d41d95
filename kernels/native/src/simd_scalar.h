// Sixteen floats in an array, for any machine (the compiler may use what its baseline has); see simd_avx512.h.
#pragma once
#include <cmath>
#include <cstdint>

#include "half.h"

namespace lamina::LAMINA_NS {

struct V {
  float v[16];
};

template <typename Function>
inline V each(Function function) {
  V r;
  for (int i = 0; i < 16; ++i) r.v[i] = function(i);
  return r;
}

inline V zero() { return {}; }
inline V splat(float x) {
  return each([&](int) { return x; });
}
inline V load(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline void store(float* p, V x) {
  for (int i = 0; i < 16; ++i) p[i] = x.v[i];
}
inline V load_n(const float* p, int n) {
  return each([&](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store_n(float* p, V x, int n) {
  for (int i = 0; i < n && i < 16; ++i) p[i] = x.v[i];
}
inline V load_f16(const uint16_t* p) {
  return each([&](int i) { return half_to_float(p[i]); });
}
inline void store_f16(uint16_t* p, V x) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(x.v[i]);
}
inline float half_value(uint16_t half) { return half_to_float(half); }
inline V load_bf16(const uint16_t* p) {
  return each([&](int i) { return bf16_to_float(p[i]); });
}
inline V load_i8(const int8_t* p) {
  return each([&](int i) { return static_cast<float>(p[i]); });
}

inline V operator+(V x, V y) {
  return each([&](int i) { return x.v[i] + y.v[i]; });
}
inline V operator-(V x, V y) {
  return each([&](int i) { return x.v[i] - y.v[i]; });
}
inline V operator*(V x, V y) {
  return each([&](int i) { return x.v[i] * y.v[i]; });
}
inline V operator/(V x, V y) {
  return each([&](int i) { return x.v[i] / y.v[i]; });
}
inline V fma(V x, V y, V z) {
  return each([&](int i) { return x.v[i] * y.v[i] + z.v[i]; });
}
inline V max(V x, V y) {
  return each([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; });
}
inline V round_nearest(V x) {
  // Adding and taking away 1.5 * 2^23 rounds to even; callers stay far below 2^22.
  return each([&](int i) { return (x.v[i] + 12582912.0f) - 12582912.0f; });
}
inline V pow2(V x) {
  return each([&](int i) { return bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(x.v[i]) + 127) << 23); });
}
inline V zero_below(V v, V x, float limit) {
  return each([&](int i) { return x.v[i] < limit ? 0.0f : v.v[i]; });
}
inline V keep_lanes(V v, int lo, int hi, float fill) {
  return each([&](int i) { return i >= lo && i < hi ? v.v[i] : fill; });
}

template <typename Combine>
inline float fold(V x, Combine combine) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x.v[i] = combine(x.v[i], x.v[i + half]);
  }
  return x.v[0];
}
inline float sum(V x) {
  return fold(x, [](float a, float b) { return a + b; });
}
inline float max_lane(V x) {
  return fold(x, [](float a, float b) { return a > b ? a : b; });
}

inline bool probe_integers(int three) { return three == 3; }

}  // namespace lamina::LAMINA_NS
