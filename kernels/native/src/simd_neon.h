// Sixteen floats in four registers; see simd_avx512.h.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace lamina::LAMINA_NS {

struct V {
  float32x4_t v[4];
};

template <typename Function>
inline V each(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

inline V zero() {
  return each([](int) { return vdupq_n_f32(0.0f); });
}
inline V splat(float x) {
  return each([&](int) { return vdupq_n_f32(x); });
}
inline V load(const float* p) {
  return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, V x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
inline V load_n(const float* p, int n) {
  float padded[16] = {};
  for (int i = 0; i < n && i < 16; ++i) padded[i] = p[i];
  return load(padded);
}
inline void store_n(float* p, V x, int n) {
  float padded[16];
  store(padded, x);
  for (int i = 0; i < n && i < 16; ++i) p[i] = padded[i];
}
inline V load_f16(const uint16_t* p) {
  return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline void store_f16(uint16_t* p, V x) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
inline float half_value(uint16_t half) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0);
}
inline V load_bf16(const uint16_t* p) {
  return each([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline V load_i8(const int8_t* p) {
  const int8x16_t x = vld1q_s8(p);
  const int16x8_t lo = vmovl_s8(vget_low_s8(x)), hi = vmovl_s8(vget_high_s8(x));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))}};
}

inline V operator+(V x, V y) {
  return each([&](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
inline V operator-(V x, V y) {
  return each([&](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
inline V operator*(V x, V y) {
  return each([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
inline V operator/(V x, V y) {
  return each([&](int i) { return vdivq_f32(x.v[i], y.v[i]); });
}
inline V fma(V x, V y, V z) {
  return each([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
inline V max(V x, V y) {
  return each([&](int i) { return vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
inline V round_nearest(V x) {
  return each([&](int i) { return vrndnq_f32(x.v[i]); });
}
inline V pow2(V x) {
  return each([&](int i) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(x.v[i]), vdupq_n_s32(127)), 23));
  });
}
inline V zero_below(V v, V x, float limit) {
  return each([&](int i) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v.v[i]), vcltq_f32(x.v[i], vdupq_n_f32(limit))));
  });
}
inline V keep_lanes(V v, int lo, int hi, float fill) {
  static constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return each([&](int i) {
    const int32x4_t lane = vld1q_s32(kLanes + 4 * i);
    const uint32x4_t keep = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi)));
    return vbslq_f32(keep, v.v[i], vdupq_n_f32(fill));
  });
}

inline uint32_t at_least(V x, float limit) {
  static constexpr uint32_t kBits[4] = {1, 2, 4, 8};
  const uint32x4_t bits = vld1q_u32(kBits);
  uint32_t mask = 0;
  for (int i = 0; i < 4; ++i) mask |= vaddvq_u32(vandq_u32(vcgeq_f32(x.v[i], vdupq_n_f32(limit)), bits)) << (4 * i);
  return mask;
}

inline float sum(V x) {
  const float32x4_t q = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
inline float max_lane(V x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3]))); }

// What the matrix kernels need beyond the above: dot products. `three` is 3.
inline bool probe_integers(int three) {
  const int8x16_t x = vdupq_n_s8(static_cast<int8_t>(three));
  return vaddvq_s32(vdotq_s32(vdupq_n_s32(0), x, x)) == 16 * 9;
}

}  // namespace lamina::LAMINA_NS
