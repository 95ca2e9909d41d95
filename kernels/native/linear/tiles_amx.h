// AMX's tile registers. Each holds up to 16 rows of 64 bytes: sums [16 columns][16 rows of weights] as int32, activations
// [16 columns][4 x depth] and weights [depth][16 rows][4] as int8, where depth is a number of groups.
#pragma once
#include "vec_avx512.h"

namespace lamina::LAMINA_LINEAR_NS {

// Which registers hold what.
constexpr int kSumTiles = 4;  // the first ones
constexpr int kActTile = 4;   // and the next
constexpr int kCodeTile = 6;  // and the next

struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t num_rows[16];
};

// Shapes of `num_cols` columns by `depth` groups for all registers. Clears them.
LAMINA_INLINE void load_tile_shapes(int num_cols, int depth) {
  TileConfig config{};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_act = tile >= kActTile && tile < kCodeTile;
    config.row_bytes[tile] = static_cast<uint16_t>(is_act ? 4 * depth : kLine);
    config.num_rows[tile] = static_cast<uint8_t>(tile >= kCodeTile ? depth : num_cols);
  }
  asm volatile("ldtilecfg %0" : : "m"(config));
}

// Leaves the tile registers in their initial state, which the system need not save.
LAMINA_INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
LAMINA_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
LAMINA_INLINE void tile_load(const void* p, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
LAMINA_INLINE void tile_store(void* p, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride_bytes), "i"(kTile) : "memory");
}
// sums[col][row] += dot product of int8 activations [col][..] and codes [..][row].
template <int kSums, int kAct, int kCodes>
LAMINA_INLINE void tile_dot() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kAct), "i"(kCodes));
}

// The same of unsigned codes.
template <int kSums, int kAct, int kCodes>
LAMINA_INLINE void tile_dot_unsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kAct), "i"(kCodes));
}

constexpr int kBytePlane = kSuperCols / 4 * kLine;  // bytes of one plane of a strip

// Products of signed codes and their row's scale, as unsigned low bytes at `p` and signed high bytes a plane behind.
LAMINA_INLINE void store_byte_planes(uint8_t* p, U8x64 codes, I32x16 scale) {
  const __m512i low_bytes = _mm512_set1_epi16(0xFF);
  const __m512i factor = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xFFFF), scale, _mm512_slli_epi32(scale, 16), 0xCA);
  const __m512i even = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8), factor);
  const __m512i odd = _mm512_mullo_epi16(_mm512_srai_epi16(codes, 8), factor);
  store_u8(p, _mm512_ternarylogic_epi32(low_bytes, even, _mm512_slli_epi16(odd, 8), 0xCA));
  store_u8(p + kBytePlane, _mm512_ternarylogic_epi32(low_bytes, _mm512_srli_epi16(even, 8), odd, 0xCA));
}

// Codes as they go into strips: without their offset, or what stored ones are biased by (planes.h).
template <int kType>
LAMINA_INLINE U8x64 strip_codes(U8x64 codes) {
  constexpr Format f = format_of(kType);
  constexpr int kOffset = f.kind == Kind::kFold ? 0 : f.is_signed && f.table == Table::kNone ? 128 : f.offset;
  return kOffset == 0 ? codes : _mm512_sub_epi8(codes, _mm512_set1_epi8(static_cast<char>(kOffset)));
}

}  // namespace lamina::LAMINA_LINEAR_NS
