// Packed weights to vector registers: the codes of a sub-block and the scales of a superblock. The bits of 16 rows stand
// side by side, so that decoding is the same shift and mask in every byte.
#pragma once

namespace lamina::LAMINA_LINEAR_NS {

constexpr int kGroups = kSubCols / 4;  // per sub-block

template <int kType>
LAMINA_INLINE U8x64 lookup_codes(U8x64 v) {
  constexpr Format f = format_of(kType);
  if constexpr (f.table == Table::kIq4) return lookup(kIq4Values, v);
  if constexpr (f.table == Table::kMxfp4) return lookup(kMxfp4Values, v);
  return v;
}

// Group kGroup of the sub-block at `p`.
template <int kType, int kGroup>
LAMINA_INLINE U8x64 decode_group(const uint8_t* p) {
  constexpr Format f = format_of(kType);
  U8x64 v;
  if constexpr (f.low_bits == 8) {
    v = load_u8(p + kGroup * kLine);
  } else if constexpr (f.low_bits == 4) {
    v = lookup_codes<kType>(bits<(kGroup < 4 ? 0 : 4), 15>(load_u8(p + kGroup % 4 * kLine)));
  } else {
    v = bits<2 * (kGroup % 4), 3>(load_u8(p + kGroup / 4 * kLine));
  }
  const uint8_t* high = p + f.low_bits * kLine;
  if constexpr (f.high_bits == 1) v = join<kGroup, f.low_bits, 1 << f.low_bits>(v, load_u8(high));
  if constexpr (f.high_bits == 2) {
    v = join<2 * (kGroup % 4), f.low_bits, 3 << f.low_bits>(v, load_u8(high + kGroup / 4 * kLine));
  }
  return v;
}

template <int kType>
LAMINA_INLINE void decode_sub(const uint8_t* p, U8x64 (&codes)[kGroups]) {
  codes[0] = decode_group<kType, 0>(p);
  codes[1] = decode_group<kType, 1>(p);
  codes[2] = decode_group<kType, 2>(p);
  codes[3] = decode_group<kType, 3>(p);
  codes[4] = decode_group<kType, 4>(p);
  codes[5] = decode_group<kType, 5>(p);
  codes[6] = decode_group<kType, 6>(p);
  codes[7] = decode_group<kType, 7>(p);
}

// kBlock32: scale and min of sub-block `sub` of `num_subs`.
template <int kType>
LAMINA_INLINE F32x16 block_scale(const uint8_t* header, int sub) {
  constexpr Format f = format_of(kType);
  if constexpr (f.table == Table::kMxfp4) return load_e8m0(header + sub * scale_bytes(f));
  return load_half(header + sub * scale_bytes(f));
}
LAMINA_INLINE F32x16 block_min(const uint8_t* header, int sub, int num_subs) {
  return load_half(header + (num_subs + sub) * 32);
}

// kSuper and kFold: the integer scale `index` of a superblock.
template <int kType>
LAMINA_INLINE I32x16 super_scale(const uint8_t* header, int index) {
  constexpr Format f = format_of(kType);
  if constexpr (kType == kQ2_K) {
    const I32x16 two = load_u8_i32(header + kOffsetScales + index / 2 * kTileRows);
    return index % 2 == 0 ? field_i32<0, 15>(two) : field_i32<4, 15>(two);
  } else if constexpr (f.has_min) {
    return load_u8_i32(header + kOffsetScales + index * kTileRows);
  } else {
    return load_s8_i32(header + kOffsetScales + index * kTileRows);
  }
}

// Pair `index` of the mins of a superblock with `has_min`.
template <int kType>
LAMINA_INLINE Pairs super_mins(const uint8_t* header, int index) {
  if constexpr (kType == kQ2_K) return load_pairs_u4(header + kOffsetMins + index * kTileRows);
  return load_pairs_u8(header + kOffsetMins + index * 2 * kTileRows);
}

template <int kType>
constexpr int num_min_pairs() {
  return kSuperCols / format_of(kType).scale_group / 2;
}

// The plane of initial accumulator values that centres the codes of a type on this ISA; 0 where none is needed, as where
// strips hold centred codes.
constexpr int block_init_plane(const Format& f) {
  if (kUsesTiles) return 0;
  if (f.is_signed) return kSignedBias == 0 ? 0 : block32::kInit128;
  return f.offset == 8 ? block32::kInit8 : f.offset == 16 ? block32::kInit16 : 0;
}
constexpr int super_init_plane(const Format& f) {
  if (kUsesTiles) return 0;
  if (f.is_signed) return kSignedBias == 0 ? 0 : super256::kInit128;
  return f.offset == 4 ? super256::kInit4 : f.offset == 32 ? super256::kInit32 : 0;
}
// What the blocked kernels of kFold start from: with an offset, scale x code is kept as a signed byte.
constexpr int fold_init_plane(const Format& f) {
  return f.offset != 0 && kSignedBias != 0 ? super256::kInit128Total : 0;
}

// Whether scale x dot is summed in integers over a superblock, by Dot::add_scaled, and made a float once. That is the
// sum which floats make, to the bit, as long as no partial sum exceeds 2^24 (of at most 2^25 for Q4_K, 2^28 for
// Q6_K), which only rows that nearly repeat their activations do; beyond, floats round at every step and integers
// once.
constexpr bool has_integer_scales(const Format& f) { return kIntegerScales && f.kind == Kind::kSuper; }

// The same sum with AMX: in tile registers over products of scale and code in two bytes, dots_amx.h, and for few rows with
// vector instructions, one by one.
#if defined(LAMINA_LINEAR_AMX) || defined(LAMINA_LINEAR_AMX_FEW)
constexpr bool kIntegerSums = true;
#else
constexpr bool kIntegerSums = false;
#endif
constexpr bool has_byte_planes(const Format& f) { return kUsesTiles && f.kind == Kind::kSuper; }

constexpr Codes codes_of(const Format& f) {
  return codes_of((1 << (f.low_bits + f.high_bits)) - 1, f.is_signed);
}

}  // namespace lamina::LAMINA_LINEAR_NS
