// The vector primitives of AVX2 with FMA and F16C: every vector of 16 rows is a pair of registers.
#pragma once
#include <immintrin.h>

#include "formats.h"
#include "isa_macros.h"

namespace lamina::LAMINA_LINEAR_NS {

struct U8x64 { __m256i v[2]; };
struct I32x16 { __m256i v[2]; };
struct F32x16 { __m256 v[2]; };
struct Pairs { __m256i v[2]; };
using Act4 = __m256i;

constexpr int kSignedBias = 0;
constexpr int kDirectCols = 8;
constexpr int kStripTiles = 1;
constexpr int kGroupCols = 4;
constexpr int kDotCols = 4;
constexpr bool kIntegerScales = true;  // decode.h

LAMINA_INLINE __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
LAMINA_INLINE void store_256(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
LAMINA_INLINE __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
LAMINA_INLINE int32_t load_word(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return word;
}

LAMINA_INLINE U8x64 load_u8(const uint8_t* p) { return {{load_256(p), load_256(p + 32)}}; }
LAMINA_INLINE void store_u8(uint8_t* p, U8x64 v) {
  store_256(p, v.v[0]);
  store_256(p + 32, v.v[1]);
}

template <int kShift, int kMask>
LAMINA_INLINE __m256i bits_256(__m256i v) {
  const __m256i shifted = kShift == 0 ? v : _mm256_srli_epi16(v, kShift);
  return _mm256_and_si256(shifted, _mm256_set1_epi8(static_cast<char>(kMask)));
}
template <int kShift, int kMask>
LAMINA_INLINE U8x64 bits(U8x64 v) {
  return {{bits_256<kShift, kMask>(v.v[0]), bits_256<kShift, kMask>(v.v[1])}};
}
template <int kFrom, int kTo, int kMask>
LAMINA_INLINE __m256i join_256(__m256i low, __m256i plane) {
  constexpr int kDown = kFrom - kTo;
  if constexpr (kDown > 0) plane = _mm256_srli_epi16(plane, kDown);
  if constexpr (kDown < 0) plane = _mm256_slli_epi16(plane, -kDown);
  return _mm256_or_si256(low, _mm256_and_si256(plane, _mm256_set1_epi8(static_cast<char>(kMask))));
}
template <int kFrom, int kTo, int kMask>
LAMINA_INLINE U8x64 join(U8x64 low, U8x64 plane) {
  return {{join_256<kFrom, kTo, kMask>(low.v[0], plane.v[0]), join_256<kFrom, kTo, kMask>(low.v[1], plane.v[1])}};
}
LAMINA_INLINE U8x64 lookup(const int8_t* table, U8x64 v) {
  const __m256i values = _mm256_broadcastsi128_si256(load_128(table));
  return {{_mm256_shuffle_epi8(values, v.v[0]), _mm256_shuffle_epi8(values, v.v[1])}};
}
LAMINA_INLINE Act4 load_act(const int8_t* p) { return _mm256_set1_epi32(load_word(p)); }

// vpmaddubsw adds two products in 16 bits; the smaller the codes, the more such sums fit before they must be widened.
enum class Codes { kU4, kU5, kU6, kU7, kS8 };
constexpr Codes codes_of(int largest, bool is_signed) {
  if (is_signed) return Codes::kS8;
  return largest < 16 ? Codes::kU4 : largest < 32 ? Codes::kU5 : largest < 64 ? Codes::kU6 : Codes::kU7;
}
constexpr int groups_in_16_bits(Codes codes) {
  return codes == Codes::kU4 ? 8 : codes == Codes::kU5 ? 4 : codes == Codes::kU6 ? 2 : 1;
}

// Sums are pinned to registers after each step (by an empty asm): otherwise GCC computes the products of all groups
// before it adds any, and spills them.
template <Codes kCodes>
struct Dot {
  I32x16 sum;
  __m256i narrow[2];

  LAMINA_INLINE_MEMBER void start(I32x16 init) { sum = init; }
  // Groups are added in order, index 0 to count - 1.
  LAMINA_INLINE_MEMBER void add(int index, int count, U8x64 codes, Act4 act) {
    constexpr int kFit = groups_in_16_bits(kCodes);
    LAMINA_UNROLL
    for (int i = 0; i < 2; ++i) {
      if constexpr (kCodes == Codes::kS8) {
        add_signed(sum.v[i], codes.v[i], act, _mm256_set1_epi16(1));
      } else {
        const __m256i products = _mm256_maddubs_epi16(codes.v[i], act);
        narrow[i] = index % kFit == 0 ? products : _mm256_add_epi16(narrow[i], products);
        asm("" : "+x"(narrow[i]));
        if (index % kFit == kFit - 1 || index == count - 1) {
          sum.v[i] = _mm256_add_epi32(sum.v[i], _mm256_madd_epi16(narrow[i], _mm256_set1_epi16(1)));
          asm("" : "+x"(sum.v[i]));
        }
      }
    }
  }
  // The same under integer scales: sum += scale x dot, where vpmaddwd, which widens anyway, multiplies by the scale.
  // `lanes` (kCentred) is added once to the products of all groups, in 16 bits, so that codes less 2^(bits - 1) are
  // summed.
  //
  // No overflow. In 16 bits: activations are within +-127, so kFit groups make at most 8 x 2 x 15 x 127 = 30480 (4
  // bits), 4 x 2 x 31 x 127 = 31496 (5), 2 x 2 x 63 x 127 = 32004 (6); centred codes are within half of that range,
  // 32 for 6 bits, so twice as many groups make at most 4 x 2 x 32 x 127 = 32512. A sum on its way there may wrap:
  // vpaddw is exact modulo 2^16, and vpmaddubsw does not saturate below 2 x 127 x 127. In 32 bits: scales are within
  // +-128, so 256 values make at most 256 x 128 x 127 x 128 < 2^29.
  template <bool kCentred>
  LAMINA_INLINE_MEMBER void add_scaled(int index, int count, U8x64 codes, Act4 act, Pairs scale, Act4 lanes) {
    constexpr int kFit = groups_in_16_bits(kCodes) * (kCentred ? 2 : 1);
    LAMINA_UNROLL
    for (int i = 0; i < 2; ++i) {
      if constexpr (kCodes == Codes::kS8) {
        add_signed(sum.v[i], codes.v[i], act, scale.v[i]);
      } else {
        const __m256i products = _mm256_maddubs_epi16(codes.v[i], act);
        if (index % kFit != 0) narrow[i] = _mm256_add_epi16(narrow[i], products);
        else narrow[i] = kCentred ? _mm256_add_epi16(lanes, products) : products;
        asm("" : "+x"(narrow[i]));
        if (index % kFit == kFit - 1 || index == count - 1) {
          sum.v[i] = _mm256_add_epi32(sum.v[i], _mm256_madd_epi16(narrow[i], scale.v[i]));
          asm("" : "+x"(sum.v[i]));
        }
      }
    }
  }
  LAMINA_INLINE_MEMBER I32x16 finish() const { return sum; }
  // Every scale twice, for add_scaled.
  LAMINA_INLINE_MEMBER static Pairs spread(I32x16 scale) {
    const __m256i twice = _mm256_set1_epi64x(0x0504050401000100);
    const __m256i lanes = _mm256_add_epi8(twice, _mm256_set_epi64x(0x0808080808080808, 0, 0x0808080808080808, 0));
    return {{_mm256_shuffle_epi8(scale.v[0], lanes), _mm256_shuffle_epi8(scale.v[1], lanes)}};
  }

 private:
  // |codes| x (act with the sign of codes) x scale. One asm, for the same reason.
  LAMINA_INLINE_MEMBER static void add_signed(__m256i& sum, __m256i codes, Act4 act, __m256i scale) {
    __m256i product;
    asm("vpsignb %2, %3, %1\n\tvpmaddubsw %1, %4, %1\n\tvpmaddwd %5, %1, %1\n\tvpaddd %1, %0, %0"
        : "+x"(sum), "=&x"(product)
        : "x"(codes), "x"(act), "x"(_mm256_abs_epi8(codes)), "x"(scale));
  }
};

LAMINA_INLINE I32x16 both_i32(__m256i v) { return {{v, v}}; }
LAMINA_INLINE I32x16 zero_i32() { return both_i32(_mm256_setzero_si256()); }
LAMINA_INLINE I32x16 broadcast_i32(const uint8_t* p) { return both_i32(_mm256_set1_epi32(load_word(p))); }
LAMINA_INLINE I32x16 mul_add_i32(I32x16 acc, I32x16 a, I32x16 b) {
  return {{_mm256_add_epi32(acc.v[0], _mm256_mullo_epi32(a.v[0], b.v[0])),
           _mm256_add_epi32(acc.v[1], _mm256_mullo_epi32(a.v[1], b.v[1]))}};
}
template <int kShift, int kMask>
LAMINA_INLINE I32x16 field_i32(I32x16 v) {
  const __m256i mask = _mm256_set1_epi32(kMask);
  return {{_mm256_and_si256(_mm256_srli_epi32(v.v[0], kShift), mask),
           _mm256_and_si256(_mm256_srli_epi32(v.v[1], kShift), mask)}};
}
template <int kFactor>
LAMINA_INLINE I32x16 scale_i32(I32x16 v, int addend) {
  return mul_add_i32(both_i32(_mm256_set1_epi32(addend)), v, both_i32(_mm256_set1_epi32(kFactor)));
}
LAMINA_INLINE I32x16 load_u8_i32(const uint8_t* p) {
  const __m128i v = load_128(p);
  return {{_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))}};
}
LAMINA_INLINE I32x16 load_s8_i32(const uint8_t* p) {
  const __m128i v = load_128(p);
  return {{_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))}};
}

LAMINA_INLINE Pairs load_pairs_u8(const uint8_t* p) {
  return {{_mm256_cvtepu8_epi16(load_128(p)), _mm256_cvtepu8_epi16(load_128(p + 16))}};
}
LAMINA_INLINE Pairs load_pairs_u4(const uint8_t* p) {
  const I32x16 v = load_u8_i32(p);
  const __m256i mask = _mm256_set1_epi32(0x000F000F);
  return {{_mm256_and_si256(_mm256_or_si256(v.v[0], _mm256_slli_epi32(v.v[0], 12)), mask),
           _mm256_and_si256(_mm256_or_si256(v.v[1], _mm256_slli_epi32(v.v[1], 12)), mask)}};
}
LAMINA_INLINE Pairs load_pairs(const uint8_t* p) { return {{load_256(p), load_256(p + 32)}}; }
LAMINA_INLINE void store_pairs(uint8_t* p, Pairs v) {
  store_256(p, v.v[0]);
  store_256(p + 32, v.v[1]);
}
LAMINA_INLINE I32x16 dot_pairs(I32x16 acc, Pairs pairs, const uint8_t* act) {
  const __m256i values = _mm256_set1_epi32(load_word(act));
  return {{_mm256_add_epi32(acc.v[0], _mm256_madd_epi16(pairs.v[0], values)),
           _mm256_add_epi32(acc.v[1], _mm256_madd_epi16(pairs.v[1], values))}};
}

LAMINA_INLINE __m256i scale_codes_256(__m256i codes, __m256i factor, __m256i addend) {
  const __m256i low_bytes = _mm256_set1_epi16(0xFF);
  const __m256i factor16 =
      _mm256_or_si256(_mm256_and_si256(factor, _mm256_set1_epi32(0xFFFF)), _mm256_slli_epi32(factor, 16));
  const __m256i even = _mm256_mullo_epi16(_mm256_and_si256(codes, low_bytes), factor16);
  const __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(codes, 8), factor16);
  const __m256i product = _mm256_or_si256(_mm256_and_si256(even, low_bytes), _mm256_slli_epi16(odd, 8));
  const __m256i spread =
      _mm256_mullo_epi32(_mm256_and_si256(addend, _mm256_set1_epi32(0xFF)), _mm256_set1_epi32(0x01010101));
  return _mm256_add_epi8(product, spread);
}
LAMINA_INLINE U8x64 scale_codes(U8x64 codes, I32x16 factor, I32x16 addend) {
  return {{scale_codes_256(codes.v[0], factor.v[0], addend.v[0]),
           scale_codes_256(codes.v[1], factor.v[1], addend.v[1])}};
}

LAMINA_INLINE F32x16 both_f32(__m256 v) { return {{v, v}}; }
LAMINA_INLINE F32x16 zero_f32() { return both_f32(_mm256_setzero_ps()); }
LAMINA_INLINE F32x16 set_f32(float v) { return both_f32(_mm256_set1_ps(v)); }
LAMINA_INLINE F32x16 broadcast_f32(const uint8_t* p) {
  return both_f32(_mm256_castsi256_ps(_mm256_set1_epi32(load_word(p))));
}
LAMINA_INLINE F32x16 load_f32(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
LAMINA_INLINE void store_f32(float* p, F32x16 v) {
  _mm256_storeu_ps(p, v.v[0]);
  _mm256_storeu_ps(p + 8, v.v[1]);
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
LAMINA_INLINE F32x16 to_float(I32x16 v) { return {{_mm256_cvtepi32_ps(v.v[0]), _mm256_cvtepi32_ps(v.v[1])}}; }
LAMINA_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
LAMINA_INLINE F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) {
  return {{_mm256_fnmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fnmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
LAMINA_INLINE F32x16 mul(F32x16 a, F32x16 b) { return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}}; }
LAMINA_INLINE F32x16 add(F32x16 a, F32x16 b) { return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}}; }
LAMINA_INLINE F32x16 div(F32x16 a, F32x16 b) { return {{_mm256_div_ps(a.v[0], b.v[0]), _mm256_div_ps(a.v[1], b.v[1])}}; }
LAMINA_INLINE __m256 clamp_256(__m256 v, float low, float high) {
  return _mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), v));
}
LAMINA_INLINE F32x16 clamp(F32x16 v, float low, float high) {
  return {{clamp_256(v.v[0], low, high), clamp_256(v.v[1], low, high)}};
}
LAMINA_INLINE I32x16 round_i32(F32x16 v) { return {{_mm256_cvtps_epi32(v.v[0]), _mm256_cvtps_epi32(v.v[1])}}; }
LAMINA_INLINE __m256 power_of_two_256(__m256i exponent) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
}
LAMINA_INLINE F32x16 power_of_two(I32x16 e) { return {{power_of_two_256(e.v[0]), power_of_two_256(e.v[1])}}; }

LAMINA_INLINE F32x16 load_half(const uint8_t* p) {
  return {{_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 16))}};
}
LAMINA_INLINE __m256 bf16_256(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
}
LAMINA_INLINE F32x16 load_bf16(const uint8_t* p) { return {{bf16_256(p), bf16_256(p + 16)}}; }
LAMINA_INLINE __m256 e8m0_256(__m256i code) {
  const __m256i one = _mm256_set1_epi32(1);
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(code, one), 23);
  const __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), _mm256_min_epi32(code, one));
  return _mm256_castsi256_ps(_mm256_max_epi32(normal, subnormal));
}
LAMINA_INLINE F32x16 load_e8m0(const uint8_t* p) {
  const I32x16 code = load_u8_i32(p);
  return {{e8m0_256(code.v[0]), e8m0_256(code.v[1])}};
}

LAMINA_INLINE __m256i magnitude_256(__m256 v) {
  return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7FFFFFFF));
}
LAMINA_INLINE I32x16 max_magnitude(I32x16 so_far, F32x16 v) {
  return {{_mm256_max_epi32(so_far.v[0], magnitude_256(v.v[0])), _mm256_max_epi32(so_far.v[1], magnitude_256(v.v[1]))}};
}
LAMINA_INLINE int32_t reduce_max(I32x16 v) {
  const __m256i eight = _mm256_max_epi32(v.v[0], v.v[1]);
  __m128i r = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(r, _mm_shuffle_epi32(r, 0xB1)));
}
LAMINA_INLINE int32_t reduce_add(I32x16 v) {
  const __m256i eight = _mm256_add_epi32(v.v[0], v.v[1]);
  __m128i r = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  r = _mm_add_epi32(r, _mm_shuffle_epi32(r, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(r, _mm_shuffle_epi32(r, 0xB1)));
}
// Values fit int8, except those of blocks whose scale is NaN.
LAMINA_INLINE void store_i8(int8_t* p, I32x16 v) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.v[0], v.v[1]), 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

LAMINA_INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
LAMINA_INLINE void prefetch_l2(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }
LAMINA_INLINE void prefetch_write(const void* p) { __builtin_prefetch(p, 1); }

}  // namespace lamina::LAMINA_LINEAR_NS
