// Superblocks under integer scales in AMX's tile registers.
#pragma once

namespace lamina::LAMINA_LINEAR_NS {

// Superblocks with byte planes: low and high bytes of scale x code are multiplied with the activations over all 256
// values before anything leaves the registers. kSide: which half of the registers for sums is used.
template <int kSide, int... kRounds>
LAMINA_INLINE void start_planes(const Strip<1>& strip, const BlockedArgs& a, std::integer_sequence<int, kRounds...>) {
  constexpr int kLow = 2 * kSide, kHigh = kLow + 1, kDepth = 16;  // groups of one round
  tile_zero<kLow>();
  tile_zero<kHigh>();
  ((fetch_ahead<1>(a, 2 * kRounds), fetch_ahead<1>(a, 2 * kRounds + 1),
    tile_load<kActTile + kRounds % 2>(a.act + kRounds * kDepth * 4, kSuperCols),
    tile_load<kCodeTile>(strip.codes + kRounds * kDepth * kLine, kLine),
    tile_dot_unsigned<kLow, kActTile + kRounds % 2, kCodeTile>(),
    tile_load<kCodeTile + 1>(strip.codes + kBytePlane + kRounds * kDepth * kLine, kLine),
    tile_dot<kHigh, kActTile + kRounds % 2, kCodeTile + 1>()),
   ...);
}

template <int kType, int kSide, int kNumCols>
LAMINA_INLINE void finish_planes(const Strip<1>& strip, const BlockedArgs& a) {
  constexpr Format f = format_of(kType);
  TileDots<kNumCols> low, high;
  tile_store<2 * kSide>(low.sums, kLine);
  tile_store<2 * kSide + 1>(high.sums, kLine);
  Grid<F32x16, 1, kNumCols> totals;
  LAMINA_UNROLL
  for (int c = 0; c < kNumCols; ++c) {
    totals[c][0] = to_float(_mm512_add_epi32(dot_of(low, c, 0), _mm512_slli_epi32(dot_of(high, c, 0), 8)));
  }
  finish_supers<false, f.has_min ? 4 : 0, super256::kPairs32, 1, kNumCols>(strip, a, totals);
}

// Products of strips with column groups, each finished once the next is under way.
template <int kType>
class PlanePipeline {
 public:
  LAMINA_INLINE_MEMBER void multiply(const Strip<1>& strip, const BlockedArgs& args, int num_cols) {
    constexpr auto kRounds = std::make_integer_sequence<int, 4>{};
    if (side_ == 0) start_planes<0>(strip, args, kRounds);
    else start_planes<1>(strip, args, kRounds);
    finish();
    strip_ = &strip;
    args_ = args;
    num_cols_ = num_cols;
    side_ ^= 1;
  }
  // Finishes what is under way.
  LAMINA_INLINE_MEMBER void finish() {
    if (strip_ == nullptr) return;
    if (side_ == 0) finish_side<1>();
    else finish_side<0>();
    strip_ = nullptr;
  }

 private:
  template <int kSide>
  LAMINA_INLINE_MEMBER void finish_side() {
    if (num_cols_ == kGroupCols) return finish_planes<kType, kSide, kGroupCols>(*strip_, args_);
    if (num_cols_ == kGroupCols - kColUnit) return finish_planes<kType, kSide, kGroupCols - kColUnit>(*strip_, args_);
    finish_planes<kType, kSide, kGroupCols - 2 * kColUnit>(*strip_, args_);
  }

  const Strip<1>* strip_ = nullptr;
  BlockedArgs args_;
  int num_cols_ = 0;
  int side_ = 0;  // of the next product
};

}  // namespace lamina::LAMINA_LINEAR_NS
