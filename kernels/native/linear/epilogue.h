// What happens to a tile's sums on their way to `out`: bias, accumulation, or the activation of a gated pair.
#pragma once

namespace lamina::LAMINA_LINEAR_NS {

// e^v to 1-2 ulp by a degree-6 polynomial on [-ln2/2, ln2/2]; v is clamped to the range of normal results.
LAMINA_INLINE F32x16 exponential(F32x16 v) {
  v = clamp(v, -87.0F, 88.0F);
  const I32x16 exponent = round_i32(mul(v, set_f32(1.44269504F)));
  const F32x16 n = to_float(exponent);
  F32x16 r = fnma(n, set_f32(0.693359375F), v);  // ln2 in two parts, the first exact in a product with n
  r = fnma(n, set_f32(-2.12194440e-4F), r);
  F32x16 p = set_f32(1.0F / 720.0F);
  p = fma(p, r, set_f32(1.0F / 120.0F));
  p = fma(p, r, set_f32(1.0F / 24.0F));
  p = fma(p, r, set_f32(1.0F / 6.0F));
  p = fma(p, r, set_f32(0.5F));
  p = fma(p, r, set_f32(1.0F));
  p = fma(p, r, set_f32(1.0F));
  return mul(p, power_of_two(exponent));
}

// v / (1 + e^-z), which is SiLU for z = v.
LAMINA_INLINE F32x16 times_sigmoid(F32x16 v, F32x16 z) {
  const F32x16 denominator = add(set_f32(1.0F), exponential(mul(z, set_f32(-1.0F))));
  return div(v, denominator);
}

// The tanh form of GELU: v (1 + tanh(u)) / 2 = v / (1 + e^-2u) with u = sqrt(2 / pi) (v + 0.044715 v^3).
LAMINA_INLINE F32x16 gelu_tanh(F32x16 v) {
  const F32x16 cube = mul(mul(v, v), v);
  const F32x16 inner = fma(set_f32(0.044715F), cube, v);
  return times_sigmoid(v, mul(set_f32(2.0F * 0.797884561F), inner));
}

struct OutTile {
  float* out;         // first of `count` neighbouring outputs of one row of x
  const float* bias;  // of those outputs, or null
  int count;          // 16, or fewer at the end of a part
};

LAMINA_INLINE F32x16 add_bias(F32x16 v, const float* bias, int count) {
  return bias == nullptr ? v : add(v, load_f32(bias, count));
}

LAMINA_INLINE void store_plain(const OutTile& o, const float* sums, bool accumulate) {
  F32x16 v = add_bias(load_f32(sums), o.bias, o.count);
  if (accumulate) v = add(v, load_f32(o.out, o.count));
  store_f32(o.out, v, o.count);
}

// gpt-oss: gate' sigmoid(1.702 gate') (up' + 1) of clamped gate and up.
LAMINA_INLINE F32x16 swiglu_clamped(F32x16 gate, F32x16 up) {
  gate = clamp(gate, -3.0e38F, 7.0F);
  up = clamp(up, -7.0F, 7.0F);
  return mul(times_sigmoid(gate, mul(set_f32(1.702F), gate)), add(up, set_f32(1.0F)));
}

LAMINA_INLINE F32x16 join_gated(F32x16 gate, F32x16 up, LinearMode mode) {
  if (mode == LinearMode::kGateSwigluClamped) return swiglu_clamped(gate, up);
  return mul(mode == LinearMode::kGateSilu ? times_sigmoid(gate, gate) : gelu_tanh(gate), up);
}

LAMINA_INLINE void store_gated(const OutTile& o, const float* gate_sums, const float* up_sums, const float* up_bias,
                               LinearMode mode) {
  const F32x16 gate = add_bias(load_f32(gate_sums), o.bias, o.count);
  const F32x16 up = add_bias(load_f32(up_sums), up_bias, o.count);
  store_f32(o.out, join_gated(gate, up, mode), o.count);
}

}  // namespace lamina::LAMINA_LINEAR_NS
