// Strips: one superblock of one or a few tiles, unpacked to bytes and floats in L1 for the blocked kernels.
#pragma once

namespace lamina::LAMINA_LINEAR_NS {

constexpr int kDenseChunk = 64;  // columns of a float type in one strip

// kTiles tiles side by side: entry (i, tile) of a member stands at index i * kTiles + tile.
template <int kTiles>
struct Strip {
  // codes: [64 groups][kTiles][64 bytes]; float types: float [kDenseChunk][kTiles][16]
  // with byte planes those of low bytes, then those of high bytes
  alignas(64) uint8_t codes[(kUsesTiles ? 2 : 1) * kSuperCols / 4 * kTiles * kLine];
  float scales[kSuperCols / 16 * kTiles * kTileRows];  // per scale group; pairs [16][2] where it has integer scales
  // kBlock32: float [8][kTiles][16]; else pairs [4 or 8][kTiles][16][2]
  alignas(64) uint8_t mins[kSubsPerSuper * kTiles * kLine];
  float d[kTiles * kTileRows];
  float dmin[kTiles * kTileRows];
};

template <int kTiles, class Member>
LAMINA_INLINE Member* entry(Member* first, int i, int tile) {
  return first + (i * kTiles + tile) * (kLine / static_cast<int>(sizeof(Member)));
}

// Codes as the blocked kernels want them. tiles_amx.h has its own.
#if !defined(LAMINA_LINEAR_AMX)
template <int kType>
LAMINA_INLINE U8x64 strip_codes(U8x64 codes) {
  return codes;
}
LAMINA_INLINE void store_byte_planes(uint8_t*, U8x64, I32x16) {}
#endif

template <int kType, int kTiles>
static void unpack_block32(const uint8_t* super, int num_subs, int tile, Strip<kTiles>& strip) {
  constexpr Format f = format_of(kType);
  const uint8_t* data = super + header_bytes(f, num_subs);
  for (int sub = 0; sub < num_subs; ++sub, data += sub_bytes(f)) {
    U8x64 codes[kGroups];
    decode_sub<kType>(data, codes);
    LAMINA_UNROLL
    for (int g = 0; g < kGroups; ++g) store_u8(entry<kTiles>(strip.codes, sub * kGroups + g, tile), strip_codes<kType>(codes[g]));
    store_f32(entry<kTiles>(strip.scales, sub, tile), block_scale<kType>(super, sub));
    if constexpr (f.has_min) {
      float* mins = reinterpret_cast<float*>(strip.mins);
      store_f32(entry<kTiles>(mins, sub, tile), block_min(super, sub, num_subs));
    }
  }
}

// scale x (code - offset) as bytes; with an offset (Q3_K) its negative, which runs from -128 to 124, so that it fits.
template <int kType>
LAMINA_INLINE U8x64 fold_scale(U8x64 codes, I32x16 scale) {
  constexpr int offset = format_of(kType).offset;
  if constexpr (offset == 0) return scale_codes(codes, scale, zero_i32());
  const I32x16 negative = scale_i32<-1>(scale, 0);
  return scale_codes(codes, negative, scale_i32<offset>(scale, kSignedBias));
}

template <int kType, int kTiles>
static void unpack_super(const uint8_t* super, int, int tile, Strip<kTiles>& strip) {
  constexpr Format f = format_of(kType);
  constexpr int kPerSub = kSubCols / f.scale_group;
  const uint8_t* data = super + header_bytes(f, kSubsPerSuper);
  for (int sub = 0; sub < kSubsPerSuper; ++sub, data += sub_bytes(f)) {
    U8x64 codes[kGroups];
    decode_sub<kType>(data, codes);
    LAMINA_UNROLL
    for (int part = 0; part < kPerSub; ++part) {
      const int index = sub * kPerSub + part;
      const I32x16 scale = super_scale<kType>(super, index);
      float* scales = entry<kTiles>(strip.scales, index, tile);
      if constexpr (has_integer_scales(f)) {
        store_pairs(reinterpret_cast<uint8_t*>(scales), Dot<codes_of(f)>::spread(scale));
      } else if constexpr (f.kind == Kind::kSuper && !has_byte_planes(f)) {
        store_f32(scales, to_float(scale));
      }
      LAMINA_UNROLL
      for (int i = 0; i < kGroups / kPerSub; ++i) {
        const int g = part * kGroups / kPerSub + i;
        U8x64 group = strip_codes<kType>(codes[g]);
        if constexpr (f.kind == Kind::kFold) group = fold_scale<kType>(group, scale);
        uint8_t* at = entry<kTiles>(strip.codes, sub * kGroups + g, tile);
        if constexpr (has_byte_planes(f)) store_byte_planes(at, group, scale);
        else store_u8(at, group);
      }
    }
  }
  store_f32(entry<kTiles>(strip.d, 0, tile), load_half(super + kOffsetD));
  if constexpr (f.has_min) {
    constexpr int kPairs = num_min_pairs<kType>();
    store_f32(entry<kTiles>(strip.dmin, 0, tile), load_half(super + kOffsetDmin));
    LAMINA_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      store_pairs(entry<kTiles>(strip.mins, i, tile), super_mins<kType>(super, i));
    }
  }
}

template <int kType, int kTiles>
static void unpack_dense(const uint8_t* chunk, int num_cols, int tile, Strip<kTiles>& strip) {
  constexpr int kBytes = format_of(kType).element_bytes * kTileRows;
  float* weights = reinterpret_cast<float*>(strip.codes);
  for (int k = 0; k < num_cols; ++k) {
    store_f32(entry<kTiles>(weights, k, tile), load_dense<kType>(chunk + k * kBytes));
  }
}

// Unpacks superblock (or chunk) `super` of one tile into its place in the strip. `count` is the number of sub-blocks,
// for float types of columns.
template <int kType, int kTiles>
LAMINA_INLINE void unpack_tile(const uint8_t* super, int count, int tile, Strip<kTiles>& strip) {
  constexpr Kind kind = format_of(kType).kind;
  if constexpr (kind == Kind::kBlock32) unpack_block32<kType, kTiles>(super, count, tile, strip);
  if constexpr (kind == Kind::kSuper || kind == Kind::kFold) unpack_super<kType, kTiles>(super, count, tile, strip);
  if constexpr (kind == Kind::kDense) unpack_dense<kType, kTiles>(super, count, tile, strip);
}

}  // namespace lamina::LAMINA_LINEAR_NS
