// The dot products of dots.h in AMX's tile registers. They are integers, so they are the same to the bit.
#pragma once
#include <utility>

namespace lamina::LAMINA_LINEAR_NS {

template <int kNumCols>
struct TileDots {
  alignas(64) int32_t sums[kGroupCols][kTileRows];  // a register may be larger than the group
};

template <int kNumCols>
LAMINA_INLINE I32x16 dot_of(const TileDots<kNumCols>& dots, int col, int) {
  return load_u8(reinterpret_cast<const uint8_t*>(dots.sums[col]));
}

template <int kIndex, int kCount>
LAMINA_INLINE void start_tile(const Strip<1>& strip, const BlockedArgs& a) {
  constexpr int kSums = kIndex % kSumTiles, kAct = kActTile + kIndex % 2, kCodes = kCodeTile + kIndex % 2;
  tile_load<kAct>(a.act + kIndex * kCount * 4, kSuperCols);
  tile_load<kCodes>(strip.codes + kIndex * kCount * kLine, kLine);
  tile_zero<kSums>();
  tile_dot<kSums, kAct, kCodes>();
}

// Starts stretch kStep of kDots, of which there are `count`, and uses the one before, which is done by then.
template <int kStep, int kDots, int kCount, int kNumCols, class Use>
LAMINA_INLINE void step_tiles(const Strip<1>& strip, const BlockedArgs& a, int count,
                              TileDots<kNumCols> (&dots)[kSumTiles], Use& use) {
  constexpr int kPerRound = kGroups / kCount;
  if constexpr (kStep < kDots) {
    if (kStep < count) {
      if constexpr (kStep % kPerRound == 0) fetch_ahead<1>(a, kStep / kPerRound);
      start_tile<kStep, kCount>(strip, a);
    }
  }
  if constexpr (kStep > 0) {
    constexpr int kDone = kStep - 1;
    if (kDone < count) {
      tile_store<kDone % kSumTiles>(dots[kDone % kSumTiles].sums, kLine);
      use(kDone, dots[kDone % kSumTiles]);
    }
  }
}

template <int kDots, int kCount, int kNumCols, class Use, int... kSteps>
LAMINA_INLINE void run_tiles(const Strip<1>& strip, const BlockedArgs& a, int count, Use& use,
                             std::integer_sequence<int, kSteps...>) {
  TileDots<kNumCols> dots[kSumTiles];
  (step_tiles<kSteps, kDots, kCount, kNumCols>(strip, a, count, dots, use), ...);
}

template <int kCount, bool kHasInit, Codes kCodes, int kTiles, int kNumCols, class Use>
LAMINA_INLINE void each_dot(const Strip<kTiles>& strip, const BlockedArgs& a, int count, Use use) {
  static_assert(!kHasInit && kTiles == 1, "strips hold centred codes of one tile");
  constexpr int kDots = kSuperCols / 4 / kCount;
  run_tiles<kDots, kCount, kNumCols>(strip, a, count, use, std::make_integer_sequence<int, kDots + 1>{});
}

template <int kNumCols, int... kRounds>
LAMINA_INLINE void sum_tiles(const Strip<1>& strip, const BlockedArgs& a, std::integer_sequence<int, kRounds...>) {
  tile_zero<0>();
  ((fetch_ahead<1>(a, kRounds), tile_load<kActTile + kRounds % 2>(a.act + kRounds * kSubCols, kSuperCols),
    tile_load<kCodeTile + kRounds % 2>(strip.codes + kRounds * kGroups * kLine, kLine),
    tile_dot<0, kActTile + kRounds % 2, kCodeTile + kRounds % 2>()),
   ...);
}

template <bool kHasInit, Codes kCodes, int kTiles, int kNumCols>
LAMINA_INLINE void whole_dots(const Strip<kTiles>& strip, const BlockedArgs& a,
                              Grid<F32x16, kTiles, kNumCols>& totals) {
  static_assert(!kHasInit && kTiles == 1, "strips hold centred codes of one tile");
  TileDots<kNumCols> dots;
  sum_tiles<kNumCols>(strip, a, std::make_integer_sequence<int, kSubsPerSuper>{});
  tile_store<0>(dots.sums, kLine);
  LAMINA_UNROLL
  for (int c = 0; c < kNumCols; ++c) totals[c][0] = to_float(dot_of(dots, c, 0));
}

// The registers' shapes for a type and the largest column group; a smaller one reads some bytes behind its own
// activations and gets sums that nobody reads.
template <int kType>
LAMINA_INLINE void configure_tiles(int num_cols) {
  constexpr Format f = format_of(kType);
  load_tile_shapes(num_cols, has_byte_planes(f) ? 2 * kGroups : kGroups);
}

}  // namespace lamina::LAMINA_LINEAR_NS
