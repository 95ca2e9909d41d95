// The blocked kernels: a strip of kTiles tiles against kNumCols columns, over one superblock. Each adds its superblock
// to the sums of the ones before it, with the same operations in the same order as the direct kernels.
#pragma once

namespace lamina::LAMINA_LINEAR_NS {

template <int kTiles, int kNumCols>
LAMINA_INLINE void load_sums(const BlockedArgs& a, Grid<F32x16, kTiles, kNumCols>& acc) {
  LAMINA_UNROLL
  for (int c = 0; c < kNumCols; ++c) {
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      acc[c][t] = a.is_first ? zero_f32() : load_f32(a.sums + (c * kTiles + t) * kTileRows);
    }
  }
}
template <int kTiles, int kNumCols>
LAMINA_INLINE void store_sums(float* sums, const Grid<F32x16, kTiles, kNumCols>& acc) {
  LAMINA_UNROLL
  for (int c = 0; c < kNumCols; ++c) {
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) store_f32(sums + (c * kTiles + t) * kTileRows, acc[c][t]);
  }
}

template <bool kHasMin, bool kHasInit, Codes kCodes, int kTiles, int kNumCols>
static void blocked_block32(const Strip<kTiles>& strip, const BlockedArgs& a) {
  Grid<F32x16, kTiles, kNumCols> acc;
  load_sums<kTiles, kNumCols>(a, acc);
  const float* mins = reinterpret_cast<const float*>(strip.mins);
  each_dot<kGroups, kHasInit, kCodes, kTiles, kNumCols>(strip, a, a.count, [&](int sub, auto& dots) LAMINA_LAMBDA {
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      const F32x16 scale = load_f32(entry<kTiles>(strip.scales, sub, t));
      LAMINA_UNROLL
      for (int c = 0; c < kNumCols; ++c) {
        const uint8_t* at = a.act + (sub * kNumCols + c) * 4;
        const F32x16 both = mul(scale, broadcast_f32(at + block32::kScales * kNumCols));
        acc[c][t] = fma(to_float(dot_of(dots, c, t)), both, acc[c][t]);
        if constexpr (kHasMin) {
          const F32x16 sum = broadcast_f32(at + block32::kSums * kNumCols);
          acc[c][t] = fma(load_f32(entry<kTiles>(mins, sub, t)), sum, acc[c][t]);
        }
      }
    }
  });
  store_sums<kTiles, kNumCols>(a.sums, acc);
}

// The end of a superblock: sums += dots x d x scale - mins x dmin x scale. kNegative: the dots have the wrong sign.
template <bool kNegative, int kMinPairs, int kPairsPlane, int kTiles, int kNumCols>
LAMINA_INLINE void finish_supers(const Strip<kTiles>& strip, const BlockedArgs& a,
                                 const Grid<F32x16, kTiles, kNumCols>& dots) {
  LAMINA_UNROLL
  for (int c = 0; c < kNumCols; ++c) {
    const F32x16 act_scale = broadcast_f32(a.act + super256::kScale * kNumCols + c * 4);
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      float* at = a.sums + (c * kTiles + t) * kTileRows;
      const F32x16 both = mul(load_f32(entry<kTiles>(strip.d, 0, t)), act_scale);
      F32x16 acc = a.is_first ? zero_f32() : load_f32(at);
      acc = kNegative ? fnma(dots[c][t], both, acc) : fma(dots[c][t], both, acc);
      if constexpr (kMinPairs != 0) {
        I32x16 mins = zero_i32();
        LAMINA_UNROLL
        for (int i = 0; i < kMinPairs; ++i) {
          const uint8_t* sums = a.act + kPairsPlane * kNumCols + (i * kNumCols + c) * 4;
          mins = dot_pairs(mins, load_pairs(entry<kTiles>(strip.mins, i, t)), sums);
        }
        acc = fnma(to_float(mins), mul(load_f32(entry<kTiles>(strip.dmin, 0, t)), act_scale), acc);
      }
      store_f32(at, acc);
    }
  }
}

template <int kScaleGroup, bool kHasMin, bool kHasInit, Codes kCodes, int kTiles, int kNumCols>
static void blocked_super(const Strip<kTiles>& strip, const BlockedArgs& a) {
  constexpr int kCount = kScaleGroup / 4;
  Grid<F32x16, kTiles, kNumCols> dots_scaled;
  LAMINA_UNROLL
  for (int c = 0; c < kNumCols; ++c) {
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) dots_scaled[c][t] = zero_f32();
  }
  constexpr int kDots = kSuperCols / kScaleGroup;
  each_dot<kCount, kHasInit, kCodes, kTiles, kNumCols>(strip, a, kDots, [&](int index, auto& dots) LAMINA_LAMBDA {
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      const F32x16 scale = load_f32(entry<kTiles>(strip.scales, index, t));
      LAMINA_UNROLL
      for (int c = 0; c < kNumCols; ++c) {
        dots_scaled[c][t] = fma(to_float(dot_of(dots, c, t)), scale, dots_scaled[c][t]);
      }
    }
  });
  finish_supers<false, kHasMin ? 4 : 0, super256::kPairs32, kTiles, kNumCols>(strip, a, dots_scaled);
}

// The same with scale x dot summed in integers; kCentred: codes are centred by the plane of lanes.
template <int kScaleGroup, bool kHasMin, bool kCentred, Codes kCodes, int kTiles, int kNumCols>
static void blocked_super_integers(const Strip<kTiles>& strip, const BlockedArgs& a) {
  constexpr int kCount = kScaleGroup / 4;
  Grid<Dot<kCodes>, kTiles, kNumCols> dots;
  start_dots<false, kCodes, kTiles, kNumCols>(a, 0, dots);
  for (int index = 0; index < kSuperCols / kScaleGroup; ++index) {
    if (kScaleGroup == 32 || index % 2 == 0) fetch_ahead<kTiles>(a, index * kScaleGroup / 32);
    const int8_t* lanes = reinterpret_cast<const int8_t*>(a.act) + a.init_plane * kNumCols + index * kNumCols * 4;
    const int8_t* act = reinterpret_cast<const int8_t*>(a.act) + index * kScaleGroup * kNumCols;
    LAMINA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      LAMINA_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        const auto scale = load_pairs(reinterpret_cast<const uint8_t*>(entry<kTiles>(strip.scales, index, t)));
        const U8x64 codes = load_u8(entry<kTiles>(strip.codes, index * kCount + i, t));
        LAMINA_UNROLL
        for (int c = 0; c < kNumCols; ++c) {
          const Act4 values = load_act(act + (i * kNumCols + c) * 4);
          dots[c][t].template add_scaled<kCentred>(i, kCount, codes, values, scale, load_act(lanes + c * 4));
        }
      }
    }
  }
  Grid<F32x16, kTiles, kNumCols> totals;
  convert_dots<kCodes, kTiles, kNumCols>(dots, totals);
  finish_supers<false, kHasMin ? 4 : 0, super256::kPairs32, kTiles, kNumCols>(strip, a, totals);
}

template <bool kHasMin, bool kHasInit, bool kNegative, Codes kCodes, int kTiles, int kNumCols>
static void blocked_fold(const Strip<kTiles>& strip, const BlockedArgs& a) {
  Grid<F32x16, kTiles, kNumCols> totals;
  whole_dots<kHasInit, kCodes, kTiles, kNumCols>(strip, a, totals);
  finish_supers<kNegative, kHasMin ? 8 : 0, super256::kPairs16, kTiles, kNumCols>(strip, a, totals);
}

template <int kTiles, int kNumCols>
static void blocked_dense(const Strip<kTiles>& strip, const BlockedArgs& a) {
  const float* x = reinterpret_cast<const float*>(a.act);
  const float* weights = reinterpret_cast<const float*>(strip.codes);
  Grid<F32x16, kTiles, kNumCols> acc;
  load_sums<kTiles, kNumCols>(a, acc);
  for (int k = 0; k < a.count; ++k) {
    if (k % (kDenseChunk / kFetchRounds) == 0) fetch_ahead<kTiles>(a, k / (kDenseChunk / kFetchRounds));
    F32x16 w[kTiles];
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) w[t] = load_f32(entry<kTiles>(weights, k, t));
    LAMINA_UNROLL
    for (int c = 0; c < kNumCols; ++c) {
      const F32x16 value = set_f32(x[c * a.ldx + k]);
      LAMINA_UNROLL
      for (int t = 0; t < kTiles; ++t) acc[c][t] = fma(w[t], value, acc[c][t]);
    }
  }
  store_sums<kTiles, kNumCols>(a.sums, acc);
}

// The blocked kernel of a type. Types that differ only in how they are unpacked share one.
template <int kType, int kTiles, int kNumCols>
LAMINA_INLINE void blocked_tile(const Strip<kTiles>& strip, const BlockedArgs& a) {
  constexpr Format f = format_of(kType);
  fetch_outputs<kTiles, kNumCols>(a);
  if constexpr (f.kind == Kind::kBlock32) {
    constexpr bool has_init = block_init_plane(f) != 0;
    blocked_block32<f.has_min, has_init, codes_of(f), kTiles, kNumCols>(strip, a);
  } else if constexpr (f.kind == Kind::kSuper) {
    constexpr bool has_init = super_init_plane(f) != 0;
    if constexpr (has_integer_scales(f)) {
      blocked_super_integers<f.scale_group, f.has_min, has_init, codes_of(f), kTiles, kNumCols>(strip, a);
    } else {
      blocked_super<f.scale_group, f.has_min, has_init, codes_of(f), kTiles, kNumCols>(strip, a);
    }
  } else if constexpr (f.kind == Kind::kFold) {
    constexpr bool has_offset = f.offset != 0;
    blocked_fold<f.has_min, fold_init_plane(f) != 0, has_offset, codes_of(127, has_offset), kTiles, kNumCols>(strip, a);
  } else {
    blocked_dense<kTiles, kNumCols>(strip, a);
  }
}

}  // namespace lamina::LAMINA_LINEAR_NS
