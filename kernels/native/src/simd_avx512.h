// Sixteen floats in one register. The four simd_*.h offer the same names, so that every op is written once; results of
// an op differ between them only by fused multiply-adds.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace lamina::LAMINA_NS {

struct V {
  __m512 v;
};

inline V zero() { return {_mm512_setzero_ps()}; }
inline V splat(float a) { return {_mm512_set1_ps(a)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline V load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store_n(float* p, V a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

inline V load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_f16(uint16_t* p, V a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline float half_value(uint16_t half) { return _cvtsh_ss(half); }
inline V load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline V load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

inline V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// b where either is NaN.
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V round_nearest(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^a for whole a in [-126, 127].
inline V pow2(V a) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
// a, but 0 where x < limit.
inline V zero_below(V a, V x, float limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}
// a in lanes [lo, hi), `fill` elsewhere.
inline V keep_lanes(V a, int lo, int hi, float fill) {
  const auto keep = static_cast<__mmask16>(first_lanes(hi) & ~first_lanes(lo));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), keep, a.v)};
}

// Bit i: lane i is at least `limit`.
inline uint32_t at_least(V a, float limit) { return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(limit), _CMP_GE_OQ); }

// Sum and maximum over the lanes, by halves: i with i + 8, then + 4, + 2, + 1.
inline float sum(V a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float max_lane(V a) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

// What the matrix kernels need beyond the above: VNNI and VBMI. `three` is 3.
inline bool probe_integers(int three) {
  const __m512i x = _mm512_set1_epi8(static_cast<char>(three));
  const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_permutexvar_epi8(x, x), x);
  return _mm512_reduce_add_epi32(sums) == 64 * 9;
}

}  // namespace lamina::LAMINA_NS
