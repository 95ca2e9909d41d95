// Sixteen floats as four vectors of the compiler's own, which it lowers to whatever the baseline has; see
// simd_avx512.h.
#pragma once
#include <cstdint>
#include <cstring>

#include "half.h"

namespace lamina::LAMINA_NS {

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

struct V {
  F4 q[4];
};

template <typename Function>
inline V each(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

inline V zero() { return {}; }
inline V splat(float x) {
  return each([&](int) { return F4{x, x, x, x}; });
}
inline V load(const float* p) {
  V r;
  std::memcpy(&r, p, sizeof(r));
  return r;
}
inline void store(float* p, V x) { std::memcpy(p, &x, sizeof(x)); }
inline V load_n(const float* p, int n) {
  float padded[16] = {};
  for (int i = 0; i < n && i < 16; ++i) padded[i] = p[i];
  return load(padded);
}
inline void store_n(float* p, V x, int n) {
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < n && i < 16; ++i) p[i] = lanes[i];
}

// Sixteen stored values one by one.
template <typename Element, typename Function>
inline V convert(const Element* p, Function function) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = function(p[i]);
  return load(lanes);
}
inline V load_f16(const uint16_t* p) { return convert(p, half_to_float); }
inline void store_f16(uint16_t* p, V x) {
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(lanes[i]);
}
inline V load_bf16(const uint16_t* p) { return convert(p, bf16_to_float); }
inline V load_i8(const int8_t* p) {
  return convert(p, [](int8_t x) { return static_cast<float>(x); });
}

inline V operator+(V x, V y) {
  return each([&](int i) { return x.q[i] + y.q[i]; });
}
inline V operator-(V x, V y) {
  return each([&](int i) { return x.q[i] - y.q[i]; });
}
inline V operator*(V x, V y) {
  return each([&](int i) { return x.q[i] * y.q[i]; });
}
inline V operator/(V x, V y) {
  return each([&](int i) { return x.q[i] / y.q[i]; });
}
inline V fma(V x, V y, V z) {
  return each([&](int i) { return x.q[i] * y.q[i] + z.q[i]; });
}
inline F4 choose(I4 mask, F4 yes, F4 no) {
  return reinterpret_cast<F4>((mask & reinterpret_cast<I4>(yes)) | (~mask & reinterpret_cast<I4>(no)));
}
inline V max(V x, V y) {
  return each([&](int i) { return choose(x.q[i] > y.q[i], x.q[i], y.q[i]); });
}
inline V round_nearest(V x) {
  // Adding and taking away 1.5 * 2^23 rounds to even; callers stay far below 2^22.
  return (x + splat(12582912.0f)) - splat(12582912.0f);
}
inline V pow2(V x) {
  return each([&](int i) { return reinterpret_cast<F4>((__builtin_convertvector(x.q[i], I4) + 127) << 23); });
}
inline V zero_below(V v, V x, float limit) {
  const F4 bound{limit, limit, limit, limit};
  return each([&](int i) { return choose(x.q[i] < bound, F4{}, v.q[i]); });
}
inline V keep_lanes(V v, int lo, int hi, float fill) {
  float lanes[16];
  store(lanes, v);
  for (int i = 0; i < 16; ++i) lanes[i] = i >= lo && i < hi ? lanes[i] : fill;
  return load(lanes);
}

inline uint32_t at_least(V x, float limit) {
  float lanes[16];
  store(lanes, x);
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(lanes[i] >= limit) << i;
  return mask;
}

inline float sum(V x) {
  const F4 half = (x.q[0] + x.q[2]) + (x.q[1] + x.q[3]);
  return (half[0] + half[2]) + (half[1] + half[3]);
}
inline float max_lane(V x) {
  const V swapped{{x.q[2], x.q[3], x.q[0], x.q[1]}};
  const V halves = max(x, swapped);
  const F4 best = choose(halves.q[0] > halves.q[1], halves.q[0], halves.q[1]);
  float largest = best[0];
  for (int i = 1; i < 4; ++i) largest = best[i] > largest ? best[i] : largest;
  return largest;
}

inline bool probe_integers(int three) { return three == 3; }

}  // namespace lamina::LAMINA_NS
