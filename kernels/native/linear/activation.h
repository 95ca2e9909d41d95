// Where quantised activations stand in scratch. Rows of x are the columns of a matrix product; up to a tile's worth of
// them form a column group. Scratch is [superblock of 256 values][column group]; one such entry takes `num_cols` (of the
// group) times the byte counts below, plane after plane: entry (i, c) of a plane of 4-byte entries stands at
// num_cols * plane + (i * num_cols + c) * 4. Codes are stored as [64][num_cols][4], for tile registers [num_cols][256].
#pragma once
#include "formats.h"

namespace lamina::LAMINA_LINEAR_NS {

// Which planes some part of the stacked weight reads.
struct ActivationNeeds {
  bool block32 = false;
  bool super = false;
  bool block_sums = false;  // block32: scale x sum of codes
  bool init8 = false;       // -8 x sum, and so on: initial values of the integer accumulators
  bool init16 = false;
  bool init128 = false;
  bool pairs32 = false;  // super: sums of 32 or 16 codes as int16
  bool pairs16 = false;
  bool init4 = false;  // super, per 16
  bool init32 = false;
  bool init128_super = false;  // super, per 32
  bool init128_total = false;  // super, per 256
};

// Scale per 32 values.
namespace block32 {
constexpr int kScales = 256;   // float [8]
constexpr int kSums = 288;     // float [8]: scale x sum
constexpr int kInit8 = 320;    // int32 [8]
constexpr int kInit16 = 352;   // int32 [8]
constexpr int kInit128 = 384;  // int32 [8]
constexpr int kBytes = 416;
}  // namespace block32

// Scale per 256 values.
namespace super256 {
constexpr int kScale = 256;         // float
constexpr int kPairs32 = 260;       // int16 [4][2]
constexpr int kPairs16 = 276;       // int16 [8][2]
constexpr int kInit4 = 308;         // int32 [16]
constexpr int kInit32 = 372;        // int32 [16]; under integer scales int16 [16][2], see put_lanes32
constexpr int kInit128 = 436;       // int32 [8]
constexpr int kInit128Total = 468;  // int32
constexpr int kBytes = 472;
}  // namespace super256

// Columns computed from one round of quantised activations; at most this many are in scratch at a time.
#if defined(LAMINA_LINEAR_AMX_FEW)
constexpr int kMaxBlockCols = 8;
#else
constexpr int kMaxBlockCols = 144;
#endif

// Whether the blocked kernels use tile registers (AMX): of activations they want the codes of a column side by side, of
// weights the centred codes, and columns by multiples of kColUnit.
#if defined(LAMINA_LINEAR_AMX)
constexpr bool kUsesTiles = true;
constexpr int kColUnit = 4;
#else
constexpr bool kUsesTiles = false;
constexpr int kColUnit = 1;
#endif

constexpr int64_t num_supers(int64_t cols) { return (cols + kSuperCols - 1) / kSuperCols; }

// One column group: `num_cols` rows of x from `first_col` on.
struct ColGroup {
  int first_col;
  int num_cols;
};

constexpr ColGroup col_group(int num_cols, int num_groups, int index) {
  const int base = num_cols / num_groups;
  const int extra = num_cols % num_groups;
  const int larger = index < extra ? index : extra;
  return {index * base + larger, base + (index < extra ? 1 : 0)};
}

}  // namespace lamina::LAMINA_LINEAR_NS
