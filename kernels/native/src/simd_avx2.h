// Sixteen floats in two registers; see simd_avx512.h.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace lamina::LAMINA_NS {

struct V {
  __m256 a, b;
};

inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline __m256i lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline __m256i first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes()); }
inline V load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
inline void store_n(float* p, V x, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), x.a);
  _mm256_maskstore_ps(p + 8, first_lanes(n - 8), x.b);
}

inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline V load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))}; }
inline void store_f16(uint16_t* p, V x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline float half_value(uint16_t half) { return _cvtsh_ss(half); }
inline __m256 widen_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
}
inline V load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline __m256 widen_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline V load_i8(const int8_t* p) { return {widen_i8(p), widen_i8(p + 8)}; }

inline V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V round_nearest(V x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
inline __m256 pow2_half(__m256 x) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline V pow2(V x) { return {pow2_half(x.a), pow2_half(x.b)}; }
inline V zero_below(V v, V x, float limit) {
  const __m256 l = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, l, _CMP_NLT_UQ), v.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, l, _CMP_NLT_UQ), v.b)};
}
inline V keep_lanes(V v, int lo, int hi, float fill) {
  const __m256 f = _mm256_set1_ps(fill);
  const __m256 a = _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes(lo), first_lanes(hi)));
  const __m256 b = _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes(lo - 8), first_lanes(hi - 8)));
  return {_mm256_blendv_ps(f, v.a, a), _mm256_blendv_ps(f, v.b, b)};
}

inline uint32_t at_least(V x, float limit) {
  const __m256 l = _mm256_set1_ps(limit);
  const int a = _mm256_movemask_ps(_mm256_cmp_ps(x.a, l, _CMP_GE_OQ));
  return static_cast<uint32_t>(a | _mm256_movemask_ps(_mm256_cmp_ps(x.b, l, _CMP_GE_OQ)) << 8);
}

inline float sum(V x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float max_lane(V x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

inline bool probe_integers(int three) {
  const __m256i x = _mm256_set1_epi8(static_cast<char>(three));
  return _mm256_extract_epi16(_mm256_maddubs_epi16(x, x), 5) == 18;
}

}  // namespace lamina::LAMINA_NS
