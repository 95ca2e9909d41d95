// The vector primitives of AVX-512 with VNNI: one register holds a group (16 rows x 4 codes), 16 integers or 16 floats.
// Every vec_*.h offers the same names; a kernel written with them gives the same bits on every ISA.
#pragma once
#include <immintrin.h>

#include "formats.h"
#include "isa_macros.h"

namespace lamina::LAMINA_LINEAR_NS {

using U8x64 = __m512i;
using I32x16 = __m512i;
using F32x16 = __m512;
using Act4 = __m512i;   // 4 activations, repeated for every row
using Pairs = __m512i;  // int16 [16][2]

#if defined(LAMINA_LINEAR_AMX)
constexpr int kSignedBias = 0;   // tiles multiply signed codes
constexpr int kDirectCols = 8;   // few_amx.cpp and AVX-512 take these
constexpr int kStripTiles = 1;   // one tile register: 16 rows
constexpr int kGroupCols = 16;   // by 16 columns
#else
constexpr int kSignedBias = 128;  // signed codes are kept as code + 128: vpdpbusd takes unsigned weights
constexpr int kDirectCols = 8;    // most columns that the direct kernels take
constexpr int kStripTiles = 2;    // tiles of 16 rows in one register tile of the blocked kernels
constexpr int kGroupCols = 6;     // columns in it
#endif
constexpr int kDotCols = 1;       // columns whose dot products the direct kernels compute side by side
constexpr bool kIntegerScales = false;  // decode.h

LAMINA_INLINE U8x64 load_u8(const uint8_t* p) { return _mm512_load_si512(p); }
LAMINA_INLINE void store_u8(uint8_t* p, U8x64 v) { _mm512_store_si512(p, v); }

// (v >> kShift) & kMask in every byte.
template <int kShift, int kMask>
LAMINA_INLINE U8x64 bits(U8x64 v) {
  const U8x64 shifted = kShift == 0 ? v : _mm512_srli_epi16(v, kShift);
  return _mm512_and_si512(shifted, _mm512_set1_epi8(static_cast<char>(kMask)));
}

// low | ((plane >> kFrom) & (kMask >> kTo)) << kTo in every byte; kMask names the bits at their new place.
template <int kFrom, int kTo, int kMask>
LAMINA_INLINE U8x64 join(U8x64 low, U8x64 plane) {
  constexpr int kDown = kFrom - kTo;
  U8x64 moved = plane;
  if constexpr (kDown > 0) moved = _mm512_srli_epi16(plane, kDown);
  if constexpr (kDown < 0) moved = _mm512_slli_epi16(plane, -kDown);
  return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8(static_cast<char>(kMask)), 0xF8);
}

// table[v] + kSignedBias.
LAMINA_INLINE U8x64 lookup(const int8_t* table, U8x64 v) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m128i biased = _mm_xor_si128(raw, _mm_set1_epi8(static_cast<char>(kSignedBias)));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(biased), v);
}

LAMINA_INLINE Act4 load_act(const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// How large the codes of a dot product are, which decides how AVX2 may add them up. One way serves all of them here.
enum class Codes { kAny };
constexpr Codes codes_of(int, bool) { return Codes::kAny; }

// The integer dot products of 16 rows, started at `init`; groups are added by add(index, count, codes, activations).
template <Codes kCodes>
struct Dot {
  I32x16 sum;
  LAMINA_INLINE_MEMBER void start(I32x16 init) { sum = init; }
  LAMINA_INLINE_MEMBER void add(int, int, U8x64 codes, Act4 act) { sum = _mm512_dpbusd_epi32(sum, codes, act); }
  LAMINA_INLINE_MEMBER I32x16 finish() const { return sum; }
};

LAMINA_INLINE I32x16 zero_i32() { return _mm512_setzero_si512(); }
LAMINA_INLINE I32x16 broadcast_i32(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
LAMINA_INLINE I32x16 mul_add_i32(I32x16 acc, I32x16 a, I32x16 b) {
  return _mm512_add_epi32(acc, _mm512_mullo_epi32(a, b));
}
template <int kShift, int kMask>
LAMINA_INLINE I32x16 field_i32(I32x16 v) {
  return _mm512_and_si512(_mm512_srli_epi32(v, kShift), _mm512_set1_epi32(kMask));
}
// kFactor v + addend
template <int kFactor>
LAMINA_INLINE I32x16 scale_i32(I32x16 v, int addend) {
  return _mm512_add_epi32(_mm512_mullo_epi32(v, _mm512_set1_epi32(kFactor)), _mm512_set1_epi32(addend));
}
LAMINA_INLINE I32x16 load_u8_i32(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
LAMINA_INLINE I32x16 load_s8_i32(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Pairs from uint8 [16][2], and from two nibbles of uint8 [16].
LAMINA_INLINE Pairs load_pairs_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}
LAMINA_INLINE Pairs load_pairs_u4(const uint8_t* p) {
  const __m512i v = load_u8_i32(p);
  return _mm512_and_si512(_mm512_or_si512(v, _mm512_slli_epi32(v, 12)), _mm512_set1_epi32(0x000F000F));
}
LAMINA_INLINE Pairs load_pairs(const uint8_t* p) { return _mm512_load_si512(p); }
LAMINA_INLINE void store_pairs(uint8_t* p, Pairs v) { _mm512_store_si512(p, v); }
// acc + pairs[row][0] * act[0] + pairs[row][1] * act[1]
LAMINA_INLINE I32x16 dot_pairs(I32x16 acc, Pairs pairs, const uint8_t* act) {
  return _mm512_dpwssd_epi32(acc, pairs, broadcast_i32(act));
}

// Each row's 4 codes times the row's factor, and plus the row's addend, modulo 256.
LAMINA_INLINE U8x64 scale_codes(U8x64 codes, I32x16 factor, I32x16 addend) {
  const __m512i low_bytes = _mm512_set1_epi16(0xFF);
  const __m512i factor16 = _mm512_or_si512(_mm512_and_si512(factor, _mm512_set1_epi32(0xFFFF)),
                                           _mm512_slli_epi32(factor, 16));
  const __m512i even = _mm512_mullo_epi16(_mm512_and_si512(codes, low_bytes), factor16);
  const __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(codes, 8), factor16);
  const __m512i product = _mm512_ternarylogic_epi32(even, _mm512_slli_epi16(odd, 8), low_bytes, 0xE4);
  const __m512i spread = _mm512_mullo_epi32(_mm512_and_si512(addend, _mm512_set1_epi32(0xFF)),
                                            _mm512_set1_epi32(0x01010101));
  return _mm512_add_epi8(product, spread);
}

LAMINA_INLINE F32x16 zero_f32() { return _mm512_setzero_ps(); }
LAMINA_INLINE F32x16 set_f32(float v) { return _mm512_set1_ps(v); }
LAMINA_INLINE F32x16 broadcast_f32(const uint8_t* p) {
  float word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_ps(word);
}
LAMINA_INLINE F32x16 load_f32(const float* p) { return _mm512_loadu_ps(p); }
LAMINA_INLINE void store_f32(float* p, F32x16 v) { _mm512_storeu_ps(p, v); }
LAMINA_INLINE F32x16 load_f32(const float* p, int count) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << count) - 1), p);
}
LAMINA_INLINE void store_f32(float* p, F32x16 v, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1U << count) - 1), v);
}
LAMINA_INLINE F32x16 to_float(I32x16 v) { return _mm512_cvtepi32_ps(v); }
LAMINA_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fmadd_ps(a, b, c); }
LAMINA_INLINE F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
LAMINA_INLINE F32x16 mul(F32x16 a, F32x16 b) { return _mm512_mul_ps(a, b); }
LAMINA_INLINE F32x16 add(F32x16 a, F32x16 b) { return _mm512_add_ps(a, b); }
LAMINA_INLINE F32x16 div(F32x16 a, F32x16 b) { return _mm512_div_ps(a, b); }
// A NaN in v comes out as NaN.
LAMINA_INLINE F32x16 clamp(F32x16 v, float low, float high) {
  return _mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), v));
}
LAMINA_INLINE I32x16 round_i32(F32x16 v) { return _mm512_cvtps_epi32(v); }
LAMINA_INLINE F32x16 power_of_two(I32x16 exponent) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(exponent, _mm512_set1_epi32(127)), 23));
}

LAMINA_INLINE F32x16 load_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}
LAMINA_INLINE F32x16 load_bf16(const uint8_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
LAMINA_INLINE F32x16 load_e8m0(const uint8_t* p) {
  const __m512i code = load_u8_i32(p);
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(code, one), 23);
  const __m512i subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), _mm512_min_epi32(code, one));
  return _mm512_castsi512_ps(_mm512_max_epi32(normal, subnormal));
}

// Quantising activations. Magnitudes are compared as integers, so that a NaN counts as larger than infinity.
LAMINA_INLINE I32x16 max_magnitude(I32x16 so_far, F32x16 v) {
  return _mm512_max_epi32(so_far, _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7FFFFFFF)));
}
LAMINA_INLINE int32_t reduce_max(I32x16 v) { return _mm512_reduce_max_epi32(v); }
LAMINA_INLINE int32_t reduce_add(I32x16 v) { return _mm512_reduce_add_epi32(v); }
LAMINA_INLINE void store_i8(int8_t* p, I32x16 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}

LAMINA_INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
LAMINA_INLINE void prefetch_l2(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }
LAMINA_INLINE void prefetch_write(const void* p) { __builtin_prefetch(p, 1); }

}  // namespace lamina::LAMINA_LINEAR_NS
