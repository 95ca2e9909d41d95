// Scalar conversions of fp16, bf16 and E8M0, for packing, unpacking and the portable kernels.
#pragma once
#include <cstdint>
#include <cstring>

#include "formats.h"

namespace lamina::LAMINA_LINEAR_NS {

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float float_from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
  const uint32_t exponent = (half >> 10) & 31U;
  const uint32_t mantissa = half & 1023U;
  if (exponent == 31) return float_from_bits(sign | 0x7F800000U | (mantissa << 13));
  if (exponent != 0) return float_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
  return sign != 0 ? -magnitude : magnitude;
}

inline float float_from_bf16(uint16_t value) { return float_from_bits(static_cast<uint32_t>(value) << 16); }

// Half of 2^(code - 127): MXFP4's code values are doubled. Codes 0 and 1 give subnormals.
inline float float_from_e8m0_half(uint8_t code) {
  return float_from_bits(code < 2 ? 0x00200000U << code : static_cast<uint32_t>(code - 1) << 23);
}

inline uint16_t load_u16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline uint32_t load_u32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline void store_u32(uint8_t* p, uint32_t value) { std::memcpy(p, &value, sizeof value); }

}  // namespace lamina::LAMINA_LINEAR_NS
