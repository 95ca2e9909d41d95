// The GGUF tensor types that have kernels and where each value stands in the packed layout. Knows no instruction set:
// kernels use these functions in constant expressions, pack.cpp and unpack.cpp at run time.
//
// Packed layout. Rows go in tiles of 16 (the last one padded with zeros); a tile is a sequence of superblocks of 256
// columns (the last one may hold fewer sub-blocks of 32). A superblock is a header, padded to 64 bytes, and per
// sub-block the bit planes of 16 rows x 32 values. A "group" is 16 rows x 4 neighbouring values = 64 bytes, row by row:
// what one vector instruction multiplies with 4 activations. Group g of a sub-block holds values 4g .. 4g+3.
//
//   low plane, 4 bits   256 bytes: line i (64 bytes) has group i in the low and group i + 4 in the high nibbles
//   low plane, 2 bits   128 bytes: line i has groups 4i .. 4i+3 at bits 0, 2, 4, 6
//   low plane, 8 bits   512 bytes: line i is group i
//   high plane, 1 bit   64 bytes:  group g at bit g
//   high plane, 2 bits  128 bytes: line i has groups 4i .. 4i+3 at bits 0, 2, 4, 6
//
//   header, kBlock32    scale[sub][16] (fp16; one E8M0 byte for MXFP4), then min[sub][16] (fp16)
//   header, kSuper      d[16] fp16, dmin[16] fp16, scale[256 / scale_group][16] int8, min pairs[4][16][2] uint8
//   header, kFold       as kSuper; Q2_K packs two scales to a byte, [8][16], and two mins to a byte, [8][16]
//
// Float types have no header: a tile is [cols][16] elements, padded to 64 bytes.
#pragma once
#include <cstdint>

#ifndef LAMINA_LINEAR_NS
#define LAMINA_LINEAR_NS linear_common
#endif

namespace lamina::LAMINA_LINEAR_NS {

enum TypeId : int {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ2_K = 10, kQ3_K = 11, kQ4_K = 12,
  kQ5_K = 13, kQ6_K = 14, kIQ4_NL = 20, kIQ4_XS = 23, kBF16 = 30, kMXFP4 = 39
};
constexpr int kNumTypeIds = 40;

constexpr int kTileRows = 16;
constexpr int kSuperCols = 256;
constexpr int kSubCols = 32;
constexpr int kSubsPerSuper = kSuperCols / kSubCols;
constexpr int kLine = 64;

// kBlock32: a float scale per 32 values, activations quantised per 32. kSuper: small integer scales under one float
// scale per 256, activations quantised per 256. kFold: as kSuper, with scales so small that scale x code fits a byte.
enum class Kind { kNone, kDense, kBlock32, kSuper, kFold };
enum class Table { kNone, kIq4, kMxfp4 };

struct Format {
  Kind kind = Kind::kNone;
  int low_bits = 0;
  int high_bits = 0;
  int scale_group = 32;  // values under one scale
  bool has_min = false;
  int offset = 0;          // what the code is centred by: weight = scale * (code - offset)
  bool is_signed = false;  // codes are int8 (looked up or stored); an ISA may keep them biased by 128
  Table table = Table::kNone;
  int element_bytes = 0;  // dense types
};

constexpr Format format_of(int type) {
  using K = Kind;
  switch (type) {
    case kF32: return {.kind = K::kDense, .element_bytes = 4};
    case kF16: return {.kind = K::kDense, .element_bytes = 2};
    case kBF16: return {.kind = K::kDense, .element_bytes = 2};
    case kQ4_0: return {.kind = K::kBlock32, .low_bits = 4, .offset = 8};
    case kQ4_1: return {.kind = K::kBlock32, .low_bits = 4, .has_min = true};
    case kQ5_0: return {.kind = K::kBlock32, .low_bits = 4, .high_bits = 1, .offset = 16};
    case kQ5_1: return {.kind = K::kBlock32, .low_bits = 4, .high_bits = 1, .has_min = true};
    case kQ8_0: return {.kind = K::kBlock32, .low_bits = 8, .is_signed = true};
    case kIQ4_NL: return {.kind = K::kBlock32, .low_bits = 4, .is_signed = true, .table = Table::kIq4};
    case kMXFP4: return {.kind = K::kBlock32, .low_bits = 4, .is_signed = true, .table = Table::kMxfp4};
    case kQ4_K: return {.kind = K::kSuper, .low_bits = 4, .has_min = true};
    case kQ5_K: return {.kind = K::kSuper, .low_bits = 4, .high_bits = 1, .has_min = true};
    case kQ6_K: return {.kind = K::kSuper, .low_bits = 4, .high_bits = 2, .scale_group = 16, .offset = 32};
    case kIQ4_XS: return {.kind = K::kSuper, .low_bits = 4, .is_signed = true, .table = Table::kIq4};
    case kQ2_K: return {.kind = K::kFold, .low_bits = 2, .scale_group = 16, .has_min = true};
    case kQ3_K: return {.kind = K::kFold, .low_bits = 2, .high_bits = 1, .scale_group = 16, .offset = 4};
    default: return {};
  }
}

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr int64_t align_line(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Header offsets of kSuper and kFold.
constexpr int kOffsetD = 0;
constexpr int kOffsetDmin = 32;
constexpr int kOffsetScales = 64;
constexpr int kOffsetMins = 192;

constexpr int sub_bytes(const Format& f) { return (f.low_bits + f.high_bits) * kLine; }

constexpr int scale_bytes(const Format& f) { return f.table == Table::kMxfp4 ? 16 : 32; }

constexpr int header_bytes(const Format& f, int num_subs) {
  if (f.kind == Kind::kBlock32) {
    return static_cast<int>(align_line(num_subs * (scale_bytes(f) + (f.has_min ? 32 : 0))));
  }
  return f.has_min || f.scale_group == 16 ? 320 : 192;
}

constexpr int super_bytes(const Format& f, int num_subs) {
  return header_bytes(f, num_subs) + num_subs * sub_bytes(f);
}

constexpr int64_t tile_bytes(const Format& f, int64_t cols) {
  if (f.kind == Kind::kDense) return align_line(cols * kTileRows * f.element_bytes);
  const int64_t full = cols / kSuperCols;
  const int rest = static_cast<int>(cols % kSuperCols) / kSubCols;
  return full * super_bytes(f, kSubsPerSuper) + (rest != 0 ? super_bytes(f, rest) : 0);
}

}  // namespace lamina::LAMINA_LINEAR_NS
