// The direct kernels: one tile of 16 rows against a few columns, decoded in registers and used at once. They are bound
// by reading the weights, so they prefetch ahead of themselves, a little in each sub-block.
#pragma once

namespace lamina::LAMINA_LINEAR_NS {

struct DirectArgs {
  const uint8_t* tile;
  const uint8_t* tile_end;
  const uint8_t* next;  // what is read after tile_end
  int cols;
  const uint8_t* act;  // the column group's activations; float types: x itself
  int64_t ldx;         // float types: row stride of x in elements
  float* result;       // [num_cols][16]
};

constexpr int64_t kPrefetchAhead = 2304;

// Prefetches kLines lines of the stream from `p` + kPrefetchAhead on; past the tile's end the stream goes on at `next`.
template <int kLines>
LAMINA_INLINE void prefetch_ahead(const DirectArgs& a, const uint8_t* p) {
  const uint8_t* ahead = p + kPrefetchAhead;
  if (ahead >= a.tile_end) ahead = a.next + (ahead - a.tile_end);
  LAMINA_UNROLL
  for (int i = 0; i < kLines; ++i) prefetch(ahead + i * kLine);
}

template <int kNumCols>
LAMINA_INLINE void store_result(const DirectArgs& a, const F32x16 (&acc)[kNumCols]) {
  LAMINA_UNROLL
  for (int c = 0; c < kNumCols; ++c) store_f32(a.result + c * kTileRows, acc[c]);
}

// How a group is added to the dot product of column `c`: as it is, or under integer scales (`lanes`: null or those of
// the columns).
struct PlainGroups {
  template <int kCount, class Dots>
  LAMINA_INLINE_MEMBER void add(Dots& dot, int g, int, U8x64 codes, Act4 act) const {
    dot.add(g, kCount, codes, act);
  }
};
template <bool kCentred>
struct ScaledGroups {
  Pairs scale;
  const int8_t* lanes;
  template <int kCount, class Dots>
  LAMINA_INLINE_MEMBER void add(Dots& dot, int g, int c, U8x64 codes, Act4 act) const {
    dot.template add_scaled<kCentred>(g, kCount, codes, act, scale, load_act(lanes + c * 4));
  }
};

// The dot products of kCount groups with column `c`; `act` and `init` are those of the sub-block.
template <Codes kCodes, int kCount, int kNumCols, class Groups>
LAMINA_INLINE I32x16 dot_groups(const U8x64* codes, const uint8_t* act, int c, I32x16 init, const Groups& groups) {
  Dot<kCodes> dot;
  dot.start(init);
  LAMINA_UNROLL
  for (int g = 0; g < kCount; ++g) {
    const Act4 values = load_act(reinterpret_cast<const int8_t*>(act) + (g * kNumCols + c) * 4);
    groups.template add<kCount>(dot, g, c, codes[g], values);
  }
  return dot.finish();
}

// The same for columns kBegin and on, up to kDotCols of them side by side, so that each group is loaded once for all.
// kStore: decoded groups go to memory first, since registers cannot hold them beside the sums: it pays where they are used
// twice or dear to decode.
template <Codes kCodes, int kCount, int kNumCols, bool kStore, int kBegin, class Groups, class Start, class Use>
LAMINA_INLINE void dot_side_by_side(U8x64* codes, const uint8_t* act, const Groups& groups, Start start, Use use) {
  constexpr int kRounds = (kNumCols + kDotCols - 1) / kDotCols;
  constexpr int kWidth = (kNumCols + kRounds - 1) / kRounds;
  constexpr int kEnd = kBegin + kWidth < kNumCols ? kBegin + kWidth : kNumCols;
  if constexpr (kStore) asm volatile("" : "+m"(*reinterpret_cast<U8x64(*)[kCount]>(codes)));
  Dot<kCodes> dots[kEnd - kBegin];
  LAMINA_UNROLL
  for (int c = kBegin; c < kEnd; ++c) dots[c - kBegin].start(start(c));
  LAMINA_UNROLL
  for (int g = 0; g < kCount; ++g) {
    LAMINA_UNROLL
    for (int c = kBegin; c < kEnd; ++c) {
      const Act4 values = load_act(reinterpret_cast<const int8_t*>(act) + (g * kNumCols + c) * 4);
      groups.template add<kCount>(dots[c - kBegin], g, c, codes[g], values);
    }
  }
  LAMINA_UNROLL
  for (int c = kBegin; c < kEnd; ++c) use(c, dots[c - kBegin].finish());
  if constexpr (kEnd < kNumCols) {
    dot_side_by_side<kCodes, kCount, kNumCols, kStore, kEnd>(codes, act, groups, start, use);
  }
}

// Calls use(c, dot) with the dot product of kCount groups and each column, started at start(c).
template <Codes kCodes, int kCount, int kNumCols, bool kStore, class Groups, class Start, class Use>
LAMINA_INLINE void dot_columns(U8x64* codes, const uint8_t* act, const Groups& groups, Start start, Use use) {
  if constexpr (kDotCols > 1 && kNumCols > 1) {
    dot_side_by_side<kCodes, kCount, kNumCols, kStore, 0>(codes, act, groups, start, use);
  } else {
    LAMINA_UNROLL
    for (int c = 0; c < kNumCols; ++c) use(c, dot_groups<kCodes, kCount, kNumCols>(codes, act, c, start(c), groups));
  }
}

constexpr bool stores_codes(const Format& f, int num_cols) { return f.high_bits != 0 || num_cols > kDotCols; }

template <int kPlane>
LAMINA_INLINE I32x16 initial(const uint8_t* act, int num_cols, int entry) {
  if constexpr (kPlane == 0) return zero_i32();
  return broadcast_i32(act + kPlane * num_cols + entry * 4);
}

template <int kType, int kNumCols>
static void direct_block32(const DirectArgs& a) {
  constexpr Format f = format_of(kType);
  constexpr int n = kNumCols;
  F32x16 acc[n];
  LAMINA_UNROLL
  for (int c = 0; c < n; ++c) acc[c] = zero_f32();
  const uint8_t* super = a.tile;
  const uint8_t* act = a.act;
  for (int subs_left = a.cols / kSubCols; subs_left > 0; subs_left -= kSubsPerSuper) {
    const int num_subs = subs_left < kSubsPerSuper ? subs_left : kSubsPerSuper;
    const uint8_t* data = super + header_bytes(f, num_subs);
    for (int sub = 0; sub < num_subs; ++sub, data += sub_bytes(f)) {
      constexpr int kStep = super_bytes(f, kSubsPerSuper) / kSubsPerSuper;
      prefetch_ahead<(kStep + kLine - 1) / kLine>(a, super + sub * kStep);
      U8x64 codes[kGroups];
      decode_sub<kType>(data, codes);
      const F32x16 scale = block_scale<kType>(super, sub);
      const auto start = [&](int c) LAMINA_LAMBDA { return initial<block_init_plane(f)>(act, n, sub * n + c); };
      const auto use = [&](int c, I32x16 dot) LAMINA_LAMBDA {
        const F32x16 both = mul(scale, broadcast_f32(act + block32::kScales * n + (sub * n + c) * 4));
        acc[c] = fma(to_float(dot), both, acc[c]);
        if constexpr (f.has_min) {
          const F32x16 sum = broadcast_f32(act + block32::kSums * n + (sub * n + c) * 4);
          acc[c] = fma(block_min(super, sub, num_subs), sum, acc[c]);
        }
      };
      const uint8_t* values = act + sub * kSubCols * n;
      dot_columns<codes_of(f), kGroups, n, stores_codes(f, n)>(codes, values, PlainGroups{}, start, use);
    }
    super = data;
    act += n * block32::kBytes;
  }
  store_result<n>(a, acc);
}

// acc + scale x (dots under d) - scale x (sums under dmin): the end of a superblock, the same in every kernel.
template <int kType>
LAMINA_INLINE F32x16 finish_super(const uint8_t* header, F32x16 dots, I32x16 mins, F32x16 act_scale, F32x16 acc) {
  acc = fma(dots, mul(load_half(header + kOffsetD), act_scale), acc);
  if constexpr (format_of(kType).has_min) {
    acc = fnma(to_float(mins), mul(load_half(header + kOffsetDmin), act_scale), acc);
  }
  return acc;
}

template <int kType, int kNumCols>
LAMINA_INLINE I32x16 sum_mins(const uint8_t* header, const uint8_t* act, int c) {
  constexpr int kPlane = format_of(kType).scale_group == 16 ? super256::kPairs16 : super256::kPairs32;
  constexpr int kPairs = num_min_pairs<kType>();
  I32x16 sum = zero_i32();
  if constexpr (format_of(kType).has_min) {
    LAMINA_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      sum = dot_pairs(sum, super_mins<kType>(header, i), act + kPlane * kNumCols + (i * kNumCols + c) * 4);
    }
  }
  return sum;
}

// kSuper sums scale x dot in floats unless it has integer scales or sums, kFold in integers. Where integer sums are
// wanted, floats do as well for a type whose sums over half a superblock are exact: the sum of two is rounded once.
template <int kType>
struct SuperSum {
  static constexpr bool kHalves = kIntegerSums && kType == kQ4_K;  // 4 x 32 x 15 x 63 x 127 < 2^24
  static constexpr bool kIntegers =
      (kIntegerSums && !kHalves) || format_of(kType).kind == Kind::kFold || has_integer_scales(format_of(kType));
  I32x16 integers;
  F32x16 floats;
  F32x16 first_half;
  LAMINA_INLINE_MEMBER void start() { integers = zero_i32(), floats = zero_f32(); }
  LAMINA_INLINE_MEMBER void turn() { first_half = floats, floats = zero_f32(); }
  LAMINA_INLINE_MEMBER void add(I32x16 scale, F32x16 float_scale, I32x16 dot) {
    if constexpr (kIntegers) integers = mul_add_i32(integers, scale, dot);
    if constexpr (!kIntegers) floats = fma(to_float(dot), float_scale, floats);
  }
  LAMINA_INLINE_MEMBER F32x16 total() const {
    if constexpr (kIntegers) return to_float(integers);
    if constexpr (kHalves) return LAMINA_LINEAR_NS::add(first_half, floats);
    return floats;
  }
};

// Adds sub-block `sub` (its planes at `data`) of a superblock to the sums of every column.
template <int kType, int kNumCols>
LAMINA_INLINE void add_sub(const uint8_t* super, const uint8_t* data, const uint8_t* act, int sub,
                           SuperSum<kType> (&sums)[kNumCols]) {
  constexpr Format f = format_of(kType);
  constexpr int n = kNumCols;
  constexpr int kPerSub = kSubCols / f.scale_group;
  constexpr int kCount = kGroups / kPerSub;
  U8x64 codes[kGroups];
  decode_sub<kType>(data, codes);
  LAMINA_UNROLL
  for (int part = 0; part < kPerSub; ++part) {
    const int index = sub * kPerSub + part;
    const I32x16 scale = super_scale<kType>(super, index);
    const uint8_t* values = act + index * f.scale_group * n;
    constexpr int kPlane = super_init_plane(f);
    if constexpr (has_integer_scales(f)) {
      const int8_t* lanes = reinterpret_cast<const int8_t*>(act) + kPlane * n + index * n * 4;
      const ScaledGroups<kPlane != 0> groups{Dot<codes_of(f)>::spread(scale), lanes};
      const auto start = [&](int c) LAMINA_LAMBDA { return sums[c].integers; };
      const auto use = [&](int c, I32x16 dot) LAMINA_LAMBDA { sums[c].integers = dot; };
      dot_columns<codes_of(f), kCount, n, stores_codes(f, n)>(codes + part * kCount, values, groups, start, use);
    } else {
      const F32x16 float_scale = to_float(scale);
      const auto start = [&](int c) LAMINA_LAMBDA { return initial<kPlane>(act, n, index * n + c); };
      const auto use = [&](int c, I32x16 dot) LAMINA_LAMBDA { sums[c].add(scale, float_scale, dot); };
      dot_columns<codes_of(f), kCount, n, stores_codes(f, n)>(codes + part * kCount, values, PlainGroups{}, start, use);
    }
  }
}

template <int kType, int kNumCols>
static void direct_super(const DirectArgs& a) {
  constexpr Format f = format_of(kType);
  constexpr int n = kNumCols;
  constexpr int kStep = super_bytes(f, kSubsPerSuper) / kSubsPerSuper;
  F32x16 acc[n];
  LAMINA_UNROLL
  for (int c = 0; c < n; ++c) acc[c] = zero_f32();
  const uint8_t* super = a.tile;
  const uint8_t* act = a.act;
  for (int left = a.cols / kSuperCols; left > 0; --left, act += n * super256::kBytes) {
    const uint8_t* data = super + header_bytes(f, kSubsPerSuper);
    SuperSum<kType> sums[n];
    LAMINA_UNROLL
    for (int c = 0; c < n; ++c) sums[c].start();
    for (int sub = 0; sub < kSubsPerSuper; ++sub, data += sub_bytes(f)) {
      prefetch_ahead<(kStep + kLine - 1) / kLine>(a, super + sub * kStep);
      if (SuperSum<kType>::kHalves && sub == kSubsPerSuper / 2) {
        LAMINA_UNROLL
        for (int c = 0; c < n; ++c) sums[c].turn();
      }
      add_sub<kType, n>(super, data, act, sub, sums);
    }
    LAMINA_UNROLL
    for (int c = 0; c < n; ++c) {
      const F32x16 act_scale = broadcast_f32(act + super256::kScale * n + c * 4);
      acc[c] = finish_super<kType>(super, sums[c].total(), sum_mins<kType, n>(super, act, c), act_scale, acc[c]);
    }
    super = data;
  }
  store_result<n>(a, acc);
}

template <int kType>
LAMINA_INLINE F32x16 load_dense(const uint8_t* p) {
  if constexpr (kType == kF32) return load_f32(reinterpret_cast<const float*>(p));
  if constexpr (kType == kF16) return load_half(p);
  return load_bf16(p);
}

template <int kType, int kNumCols>
static void direct_dense(const DirectArgs& a) {
  constexpr int kBytes = format_of(kType).element_bytes * kTileRows;
  constexpr int n = kNumCols;
  const float* x = reinterpret_cast<const float*>(a.act);
  F32x16 acc[n];
  LAMINA_UNROLL
  for (int c = 0; c < n; ++c) acc[c] = zero_f32();
  for (int k = 0; k < a.cols; ++k) {
    if (k * kBytes % kLine == 0) prefetch_ahead<1>(a, a.tile + k * kBytes);
    const F32x16 weights = load_dense<kType>(a.tile + k * kBytes);
    LAMINA_UNROLL
    for (int c = 0; c < n; ++c) acc[c] = fma(weights, set_f32(x[c * a.ldx + k]), acc[c]);
  }
  store_result<n>(a, acc);
}

}  // namespace lamina::LAMINA_LINEAR_NS
