// The vector primitives of NEON (AArch64): every vector of 16 rows is four registers. With the dot product extension a
// group takes four instructions; without it products are widened in two steps.
#pragma once
#include <arm_neon.h>

#include "formats.h"
#include "isa_macros.h"

namespace lamina::LAMINA_LINEAR_NS {

struct U8x64 { uint8x16_t v[4]; };
struct I32x16 { int32x4_t v[4]; };
struct F32x16 { float32x4_t v[4]; };
struct Pairs { int16x8_t v[4]; };
using Act4 = int8x16_t;

constexpr int kSignedBias = 0;
constexpr int kDirectCols = 4;
constexpr int kStripTiles = 1;
constexpr int kGroupCols = 4;
constexpr int kDotCols = 1;
constexpr bool kIntegerScales = false;  // decode.h

template <class Result, class Function>
LAMINA_INLINE Result each4(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

LAMINA_INLINE U8x64 load_u8(const uint8_t* p) {
  return each4<U8x64>([&](int i) { return vld1q_u8(p + 16 * i); });
}
LAMINA_INLINE void store_u8(uint8_t* p, U8x64 v) {
  for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, v.v[i]);
}
template <int kShift, int kMask>
LAMINA_INLINE U8x64 bits(U8x64 v) {
  return each4<U8x64>([&](int i) {
    if constexpr (kShift == 0) return vandq_u8(v.v[i], vdupq_n_u8(kMask));
    else return vandq_u8(vshrq_n_u8(v.v[i], kShift), vdupq_n_u8(kMask));
  });
}
template <int kFrom, int kTo, int kMask>
LAMINA_INLINE U8x64 join(U8x64 low, U8x64 plane) {
  constexpr int kDown = kFrom - kTo;
  return each4<U8x64>([&](int i) {
    uint8x16_t moved = plane.v[i];
    if constexpr (kDown > 0) moved = vshrq_n_u8(moved, kDown);
    if constexpr (kDown < 0) moved = vshlq_n_u8(moved, -kDown);
    return vorrq_u8(low.v[i], vandq_u8(moved, vdupq_n_u8(kMask)));
  });
}
LAMINA_INLINE U8x64 lookup(const int8_t* table, U8x64 v) {
  const uint8x16_t values = vreinterpretq_u8_s8(vld1q_s8(table));
  return each4<U8x64>([&](int i) { return vqtbl1q_u8(values, v.v[i]); });
}

LAMINA_INLINE int32_t load_word(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return word;
}
LAMINA_INLINE Act4 load_act(const int8_t* p) { return vreinterpretq_s8_s32(vdupq_n_s32(load_word(p))); }

enum class Codes { kInt8 };
constexpr Codes codes_of(int, bool) { return Codes::kInt8; }

LAMINA_INLINE int32x4_t dot4(int32x4_t sum, int8x16_t codes, int8x16_t act) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, codes, act);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(act)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(codes, act));
  return vaddq_s32(sum, vpaddq_s32(low, high));
#endif
}

template <Codes kCodes>
struct Dot {
  I32x16 sum;
  LAMINA_INLINE_MEMBER void start(I32x16 init) { sum = init; }
  LAMINA_INLINE_MEMBER void add(int, int, U8x64 codes, Act4 act) {
    for (int i = 0; i < 4; ++i) sum.v[i] = dot4(sum.v[i], vreinterpretq_s8_u8(codes.v[i]), act);
  }
  LAMINA_INLINE_MEMBER I32x16 finish() const { return sum; }
};

LAMINA_INLINE I32x16 set_i32(int32_t v) {
  const int32x4_t four = vdupq_n_s32(v);
  return {{four, four, four, four}};
}
LAMINA_INLINE I32x16 zero_i32() { return set_i32(0); }
LAMINA_INLINE I32x16 broadcast_i32(const uint8_t* p) { return set_i32(load_word(p)); }
LAMINA_INLINE I32x16 mul_add_i32(I32x16 acc, I32x16 a, I32x16 b) {
  return each4<I32x16>([&](int i) { return vmlaq_s32(acc.v[i], a.v[i], b.v[i]); });
}
template <int kShift, int kMask>
LAMINA_INLINE I32x16 field_i32(I32x16 v) {
  return each4<I32x16>([&](int i) { return vandq_s32(vshlq_s32(v.v[i], vdupq_n_s32(-kShift)), vdupq_n_s32(kMask)); });
}
template <int kFactor>
LAMINA_INLINE I32x16 scale_i32(I32x16 v, int addend) {
  return each4<I32x16>([&](int i) { return vmlaq_s32(vdupq_n_s32(addend), v.v[i], vdupq_n_s32(kFactor)); });
}
LAMINA_INLINE I32x16 load_u8_i32(const uint8_t* p) {
  const uint8x16_t v = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(v));
  const uint16x8_t high = vmovl_high_u8(v);
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_high_u16(low)),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_high_u16(high))}};
}
LAMINA_INLINE I32x16 load_s8_i32(const uint8_t* p) {
  const int8x16_t v = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(v));
  const int16x8_t high = vmovl_high_s8(v);
  return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}

LAMINA_INLINE Pairs load_pairs_u8(const uint8_t* p) {
  return each4<Pairs>([&](int i) { return vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p + 8 * i))); });
}
LAMINA_INLINE Pairs load_pairs_u4(const uint8_t* p) {
  const I32x16 v = load_u8_i32(p);
  return each4<Pairs>([&](int i) {
    const int32x4_t both = vorrq_s32(v.v[i], vshlq_n_s32(v.v[i], 12));
    return vreinterpretq_s16_s32(vandq_s32(both, vdupq_n_s32(0x000F000F)));
  });
}
LAMINA_INLINE Pairs load_pairs(const uint8_t* p) {
  return each4<Pairs>([&](int i) { return vreinterpretq_s16_u8(vld1q_u8(p + 16 * i)); });
}
LAMINA_INLINE void store_pairs(uint8_t* p, Pairs v) {
  for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, vreinterpretq_u8_s16(v.v[i]));
}
LAMINA_INLINE I32x16 dot_pairs(I32x16 acc, Pairs pairs, const uint8_t* act) {
  const int16x8_t values = vreinterpretq_s16_s32(vdupq_n_s32(load_word(act)));
  return each4<I32x16>([&](int i) {
    const int32x4_t low = vmull_s16(vget_low_s16(pairs.v[i]), vget_low_s16(values));
    return vaddq_s32(acc.v[i], vpaddq_s32(low, vmull_high_s16(pairs.v[i], values)));
  });
}
LAMINA_INLINE U8x64 scale_codes(U8x64 codes, I32x16 factor, I32x16 addend) {
  const int32x4_t low_byte = vdupq_n_s32(0xFF);
  const int32x4_t each_byte = vdupq_n_s32(0x01010101);
  return each4<U8x64>([&](int i) {
    const uint8x16_t factors = vreinterpretq_u8_s32(vmulq_s32(vandq_s32(factor.v[i], low_byte), each_byte));
    const uint8x16_t addends = vreinterpretq_u8_s32(vmulq_s32(vandq_s32(addend.v[i], low_byte), each_byte));
    return vmlaq_u8(addends, codes.v[i], factors);
  });
}

LAMINA_INLINE F32x16 set_f32(float v) {
  const float32x4_t four = vdupq_n_f32(v);
  return {{four, four, four, four}};
}
LAMINA_INLINE F32x16 zero_f32() { return set_f32(0.0F); }
LAMINA_INLINE F32x16 broadcast_f32(const uint8_t* p) {
  float word;
  __builtin_memcpy(&word, p, 4);
  return set_f32(word);
}
LAMINA_INLINE F32x16 load_f32(const float* p) {
  return each4<F32x16>([&](int i) { return vld1q_f32(p + 4 * i); });
}
LAMINA_INLINE void store_f32(float* p, F32x16 v) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.v[i]);
}
LAMINA_INLINE F32x16 load_f32(const float* p, int count) {
  if (count == 16) return load_f32(p);
  float padded[16] = {};
  for (int i = 0; i < count; ++i) padded[i] = p[i];
  return load_f32(padded);
}
LAMINA_INLINE void store_f32(float* p, F32x16 v, int count) {
  if (count == 16) return store_f32(p, v);
  float padded[16];
  store_f32(padded, v);
  for (int i = 0; i < count; ++i) p[i] = padded[i];
}
LAMINA_INLINE F32x16 to_float(I32x16 v) {
  return each4<F32x16>([&](int i) { return vcvtq_f32_s32(v.v[i]); });
}
LAMINA_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return each4<F32x16>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
LAMINA_INLINE F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) {
  return each4<F32x16>([&](int i) { return vfmsq_f32(c.v[i], a.v[i], b.v[i]); });
}
LAMINA_INLINE F32x16 mul(F32x16 a, F32x16 b) {
  return each4<F32x16>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
LAMINA_INLINE F32x16 add(F32x16 a, F32x16 b) {
  return each4<F32x16>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
LAMINA_INLINE F32x16 div(F32x16 a, F32x16 b) {
  return each4<F32x16>([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
LAMINA_INLINE F32x16 clamp(F32x16 v, float low, float high) {
  return each4<F32x16>([&](int i) { return vminq_f32(vmaxq_f32(v.v[i], vdupq_n_f32(low)), vdupq_n_f32(high)); });
}
LAMINA_INLINE I32x16 round_i32(F32x16 v) {
  return each4<I32x16>([&](int i) { return vcvtnq_s32_f32(v.v[i]); });
}
LAMINA_INLINE F32x16 power_of_two(I32x16 exponent) {
  return each4<F32x16>([&](int i) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent.v[i], vdupq_n_s32(127)), 23));
  });
}

LAMINA_INLINE F32x16 load_half(const uint8_t* p) {
  return each4<F32x16>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
}
LAMINA_INLINE F32x16 load_bf16(const uint8_t* p) {
  return each4<F32x16>([&](int i) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i))), 16));
  });
}
LAMINA_INLINE F32x16 load_e8m0(const uint8_t* p) {
  const I32x16 code = load_u8_i32(p);
  const int32x4_t one = vdupq_n_s32(1);
  return each4<F32x16>([&](int i) {
    const int32x4_t normal = vshlq_n_s32(vsubq_s32(code.v[i], one), 23);
    const int32x4_t subnormal = vshlq_s32(vdupq_n_s32(0x00200000), vminq_s32(code.v[i], one));
    return vreinterpretq_f32_s32(vmaxq_s32(normal, subnormal));
  });
}

LAMINA_INLINE I32x16 max_magnitude(I32x16 so_far, F32x16 v) {
  return each4<I32x16>([&](int i) {
    return vmaxq_s32(so_far.v[i], vandq_s32(vreinterpretq_s32_f32(v.v[i]), vdupq_n_s32(0x7FFFFFFF)));
  });
}
LAMINA_INLINE int32_t reduce_max(I32x16 v) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(v.v[0], v.v[1]), vmaxq_s32(v.v[2], v.v[3])));
}
LAMINA_INLINE int32_t reduce_add(I32x16 v) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(v.v[0], v.v[1]), vaddq_s32(v.v[2], v.v[3])));
}
LAMINA_INLINE void store_i8(int8_t* p, I32x16 v) {
  const int16x8_t low = vcombine_s16(vmovn_s32(v.v[0]), vmovn_s32(v.v[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(v.v[2]), vmovn_s32(v.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

LAMINA_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
LAMINA_INLINE void prefetch_l2(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }
LAMINA_INLINE void prefetch_write(const void* p) { __builtin_prefetch(p, 1); }

}  // namespace lamina::LAMINA_LINEAR_NS
