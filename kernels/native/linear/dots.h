// Integer dot products of a strip with a column group, for the blocked kernels: in vector registers here, in tile
// registers in dots_amx.h.
#pragma once

namespace lamina::LAMINA_LINEAR_NS {

struct BlockedArgs {
  const uint8_t* act;  // the column group's superblock; float types: x of its first column and the chunk
  int64_t ldx;         // float types only
  int count;           // sub-blocks; float types: columns
  int init_plane;      // of initial accumulator values, 0 for none
  float* sums;         // [kNumCols][kTiles][16]
  bool is_first;       // whether sums are still to be started from zero
  // A share of the weights to be unpacked next, fetched into L2 meanwhile: so many lines per tile in each of 8 rounds. In
  // a burst they would exceed what the core can have under way. (Fetching the next activations into L1 as well costs
  // more instructions than it saves.)
  const uint8_t* weights;
  int64_t tile_stride;
  int weight_lines;
  const float* out;  // in the last step, where the sums will go: its lines are fetched as well; else null
  int64_t ldo;
};

constexpr int kFetchRounds = 8;

template <int kTiles>
LAMINA_INLINE void fetch_ahead(const BlockedArgs& a, int round) {
  for (int i = round * a.weight_lines; i < (round + 1) * a.weight_lines; ++i) {
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) prefetch_l2(a.weights + t * a.tile_stride + i * kLine);
  }
}

template <int kTiles, int kNumCols>
LAMINA_INLINE void fetch_outputs(const BlockedArgs& a) {
  if (a.out == nullptr) return;
  for (int c = 0; c < kNumCols; ++c) {
    for (int t = 0; t < kTiles; ++t) prefetch_write(a.out + c * a.ldo + t * kTileRows);
  }
}

// A register tile of kNumCols x kTiles vectors.
template <class Vector, int kTiles, int kNumCols>
using Grid = Vector[kNumCols][kTiles];

// Starts every dot product at entry `index` of the plane, or at zero.
template <bool kHasInit, Codes kCodes, int kTiles, int kNumCols>
LAMINA_INLINE void start_dots(const BlockedArgs& a, int index, Grid<Dot<kCodes>, kTiles, kNumCols>& dots) {
  LAMINA_UNROLL
  for (int c = 0; c < kNumCols; ++c) {
    I32x16 init = zero_i32();
    if constexpr (kHasInit) init = broadcast_i32(a.act + a.init_plane * kNumCols + (index * kNumCols + c) * 4);
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) dots[c][t].start(init);
  }
}

template <Codes kCodes, int kTiles, int kNumCols>
LAMINA_INLINE void convert_dots(const Grid<Dot<kCodes>, kTiles, kNumCols>& dots,
                                Grid<F32x16, kTiles, kNumCols>& totals) {
  LAMINA_UNROLL
  for (int c = 0; c < kNumCols; ++c) {
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) totals[c][t] = to_float(dots[c][t].finish());
  }
}

// kCount groups from `first` on.
template <int kCount, Codes kCodes, int kTiles, int kNumCols>
LAMINA_INLINE void add_groups(const Strip<kTiles>& strip, const uint8_t* act, int first,
                              Grid<Dot<kCodes>, kTiles, kNumCols>& dots) {
  LAMINA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    U8x64 codes[kTiles];
    LAMINA_UNROLL
    for (int t = 0; t < kTiles; ++t) codes[t] = load_u8(entry<kTiles>(strip.codes, first + i, t));
    LAMINA_UNROLL
    for (int c = 0; c < kNumCols; ++c) {
      const Act4 values = load_act(reinterpret_cast<const int8_t*>(act) + ((first + i) * kNumCols + c) * 4);
      LAMINA_UNROLL
      for (int t = 0; t < kTiles; ++t) dots[c][t].add(i, kCount, codes[t], values);
    }
  }
}

#if !defined(LAMINA_LINEAR_AMX)
template <class Dots>
LAMINA_INLINE I32x16 dot_of(const Dots& dots, int col, int tile) {
  return dots[col][tile].finish();
}

// Calls use(index, dots) for the first `count` stretches of kCount groups; dot_of(dots, column, tile) is a product.
template <int kCount, bool kHasInit, Codes kCodes, int kTiles, int kNumCols, class Use>
LAMINA_INLINE void each_dot(const Strip<kTiles>& strip, const BlockedArgs& a, int count, Use use) {
  constexpr int kPerRound = kGroups / kCount;
  for (int index = 0; index < count; ++index) {
    Grid<Dot<kCodes>, kTiles, kNumCols> dots;
    if (index % kPerRound == 0) fetch_ahead<kTiles>(a, index / kPerRound);
    start_dots<kHasInit, kCodes, kTiles, kNumCols>(a, index, dots);
    add_groups<kCount, kCodes, kTiles, kNumCols>(strip, a.act, index * kCount, dots);
    use(index, dots);
  }
}

// The dot products of the whole superblock.
template <bool kHasInit, Codes kCodes, int kTiles, int kNumCols>
LAMINA_INLINE void whole_dots(const Strip<kTiles>& strip, const BlockedArgs& a,
                              Grid<F32x16, kTiles, kNumCols>& totals) {
  Grid<Dot<kCodes>, kTiles, kNumCols> dots;
  start_dots<kHasInit, kCodes, kTiles, kNumCols>(a, 0, dots);
  for (int group = 0; group < kSuperCols / 4; group += kGroups) {
    fetch_ahead<kTiles>(a, group / kGroups);
    add_groups<kGroups, kCodes, kTiles, kNumCols>(strip, a.act, group, dots);
  }
  convert_dots<kCodes, kTiles, kNumCols>(dots, totals);
}

template <int kType>
LAMINA_INLINE void configure_tiles(int) {}
LAMINA_INLINE void release_tiles() {}
template <int kType>
class PlanePipeline {};
#endif

}  // namespace lamina::LAMINA_LINEAR_NS
