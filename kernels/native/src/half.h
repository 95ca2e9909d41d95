// IEEE half and bfloat16 by integer arithmetic, for code that may run on any machine.
#pragma once
#include <cstdint>
#include <cstring>

namespace lamina {

static inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Normal and subnormal alike: place the bits as a float whose exponent is 112 too low, and scale by 2^112 exactly.
  return bits_to_float(float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f) | sign);
}

// Round to nearest even; overflow goes to infinity, NaN stays NaN.
static inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: let the float adder round at the half's last place
    const float aligned = bits_to_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(aligned) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

static inline float bf16_to_float(uint16_t value) { return bits_to_float(static_cast<uint32_t>(value) << 16); }

static inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace lamina
