// Rows of the packed layout back to floats, with gguf.quants' own operations in its order, so that bits agree.
#include "formats.h"
#include "half.h"
#include "lamina/linear.h"
#include "planes.h"

namespace lamina {
namespace LAMINA_LINEAR_NS {
namespace {

constexpr int code_at(const uint32_t (&codes)[kWords], int i) { return (codes[i / 4] >> (i % 4 * 8)) & 255; }

// The centred value of code `i`.
template <int kType>
float centred(const uint32_t (&codes)[kWords], int i, uint8_t bias) {
  constexpr Format f = format_of(kType);
  const int code = code_at(codes, i);
  if constexpr (f.table == Table::kIq4) return kIq4Values[code];
  if constexpr (f.table == Table::kMxfp4) return kMxfp4Values[code];
  if constexpr (f.is_signed) return static_cast<int8_t>(code ^ bias);
  return static_cast<float>(code - f.offset);
}

template <int kType>
void unpack_block32(const uint8_t* super, int num_subs, int row, uint8_t bias, float factor, float* out) {
  constexpr Format f = format_of(kType);
  const uint8_t* data = super + header_bytes(f, num_subs);
  for (int sub = 0; sub < num_subs; ++sub, data += sub_bytes(f)) {
    uint32_t codes[kWords];
    get_planes<kType>(data, row, codes);
    float scale;
    if constexpr (kType == kMXFP4) scale = float_from_e8m0_half(super[sub * kTileRows + row]);
    else scale = float_from_half(load_u16(super + sub * 32 + row * 2));
    const float min = f.has_min ? float_from_half(load_u16(super + (num_subs + sub) * 32 + row * 2)) : 0.0F;
    for (int i = 0; i < kSubCols; ++i) {
      const float product = scale * centred<kType>(codes, i, bias);
      *out++ = (f.has_min ? product + min : product) * factor;
    }
  }
}

// Integer scale and min `i` of a superblock's row.
template <int kType>
int scale_at(const uint8_t* super, int i, int row) {
  if constexpr (kType == kQ2_K) return (super[kOffsetScales + i / 2 * kTileRows + row] >> (4 * (i % 2))) & 15;
  const uint8_t stored = super[kOffsetScales + i * kTileRows + row];
  return format_of(kType).has_min ? stored : static_cast<int8_t>(stored);
}
template <int kType>
int min_at(const uint8_t* super, int i, int row) {
  if constexpr (kType == kQ2_K) return (super[kOffsetMins + i / 2 * kTileRows + row] >> (4 * (i % 2))) & 15;
  return super[kOffsetMins + i / 2 * 2 * kTileRows + row * 2 + i % 2];
}

template <int kType>
void unpack_super(const uint8_t* super, int row, float factor, float* out) {
  constexpr Format f = format_of(kType);
  const float d = float_from_half(load_u16(super + kOffsetD + row * 2));
  const float dmin = f.has_min ? float_from_half(load_u16(super + kOffsetDmin + row * 2)) : 0.0F;
  const uint8_t* data = super + header_bytes(f, kSubsPerSuper);
  for (int sub = 0; sub < kSubsPerSuper; ++sub, data += sub_bytes(f)) {
    uint32_t codes[kWords];
    get_planes<kType>(data, row, codes);
    for (int i = 0; i < kSubCols; ++i) {
      const int group = (sub * kSubCols + i) / f.scale_group;
      const float product = d * static_cast<float>(scale_at<kType>(super, group, row)) * centred<kType>(codes, i, 0);
      float value = product;
      if constexpr (f.has_min) value = product - dmin * static_cast<float>(min_at<kType>(super, group, row));
      *out++ = value * factor;
    }
  }
}

template <int kType>
float element(const uint8_t* p) {
  if constexpr (kType == kF32) return float_from_bits(load_u32(p));
  if constexpr (kType == kF16) return float_from_half(load_u16(p));
  return float_from_bf16(load_u16(p));
}

template <int kType>
void unpack(const uint8_t* tile, int row, int cols, uint8_t bias, float factor, float* out) {
  constexpr Format f = format_of(kType);
  if constexpr (f.kind == Kind::kDense) {
    for (int64_t k = 0; k < cols; ++k) out[k] = element<kType>(tile + (k * kTileRows + row) * f.element_bytes) * factor;
  } else {
    for (int left = cols; left > 0; left -= kSuperCols, out += kSuperCols, tile += super_bytes(f, kSubsPerSuper)) {
      const int num_subs = (left < kSuperCols ? left : kSuperCols) / kSubCols;
      if constexpr (f.kind == Kind::kBlock32) unpack_block32<kType>(tile, num_subs, row, bias, factor, out);
      else unpack_super<kType>(tile, row, factor, out);
    }
  }
}

}  // namespace
}  // namespace LAMINA_LINEAR_NS

using namespace LAMINA_LINEAR_NS;

void unpack_row(Isa isa, const PackedPart& part, int64_t row, float scale, float* out) {
  const Format f = format_of(part.type);
  const uint8_t* tile = part.data + row / kTileRows * tile_bytes(f, part.cols);
  const int row_in_tile = static_cast<int>(row % kTileRows);
  const uint8_t bias = stored_bias(isa, f);
  with_type(part.type, [&]<int kType>() { unpack<kType>(tile, row_in_tile, part.cols, bias, scale, out); });
}

}  // namespace lamina
