// One panel of up to kPanelTiles tiles against all columns of a block: superblock by superblock it is unpacked once into
// L1 and multiplied with every column group.
#pragma once

namespace lamina::LAMINA_LINEAR_NS {

constexpr int kPanelTiles = 4;
constexpr int kPanelStrips = kPanelTiles / kStripTiles;

// A block of rows of x, quantised as far as the parts need it.
struct Activations {
  const uint8_t* block32;
  const uint8_t* super;
  const float* x;  // first row of the block
  int64_t ldx;
  int cols;  // in_features
  int num_rows;
  int num_cols;  // the rows, and repetitions of the last up to a multiple of kColUnit
  int num_groups;
};

LAMINA_INLINE ColGroup column_group(const Activations& acts, int index) {
  const ColGroup units = col_group(acts.num_cols / kColUnit, acts.num_groups, index);
  return {units.first_col * kColUnit, units.num_cols * kColUnit};
}

// Where a group's activations begin, and how far apart its superblocks (chunks of a float type) are.
struct GroupActivations {
  const uint8_t* begin;
  int64_t stride_bytes;
};

// In scratch the groups of one superblock are neighbours: the kernels read them one after another.
LAMINA_INLINE GroupActivations group_activations(const Activations& acts, Kind kind, ColGroup group) {
  const int64_t first = group.first_col;
  switch (kind) {
    case Kind::kBlock32:
      return {acts.block32 + first * block32::kBytes, static_cast<int64_t>(acts.num_cols) * block32::kBytes};
    case Kind::kSuper:
    case Kind::kFold:
      return {acts.super + first * super256::kBytes, static_cast<int64_t>(acts.num_cols) * super256::kBytes};
    default:
      return {reinterpret_cast<const uint8_t*>(acts.x + first * acts.ldx), kDenseChunk * 4};
  }
}

struct PanelArgs {
  const uint8_t* tiles;  // the first tile
  int64_t tile_bytes;
  int num_tiles;
  const Activations* acts;
  float* sums;  // [group][strip][column][tile of the strip][16]
  const float* out;  // where the panel's results will go, or null
  int64_t ldo;
};

// Where the sums of a strip begin in a panel's buffer.
LAMINA_INLINE int64_t strip_offset(const PanelArgs& a, ColGroup group, int first_tile) {
  return (static_cast<int64_t>(group.first_col) * a.num_tiles + group.num_cols * first_tile) * kTileRows;
}

// Where those of one column and tile are. A strip of fewer tiles than kStripTiles is done tile by tile.
LAMINA_INLINE int64_t sums_offset(const PanelArgs& a, ColGroup group, int col, int tile) {
  const int in_strip = tile % kStripTiles;
  const int width = a.num_tiles - (tile - in_strip) < kStripTiles ? 1 : kStripTiles;
  return strip_offset(a, group, tile - tile % width) + (col * width + tile % width) * kTileRows;
}

// Bytes and columns of one step along a tile.
template <int kType>
struct Step {
  static constexpr Format f = format_of(kType);
  static constexpr bool kDense = f.kind == Kind::kDense;
  static constexpr int kCols = kDense ? kDenseChunk : kSuperCols;
  static constexpr int kBytes =
      kDense ? kDenseChunk * kTileRows * f.element_bytes : super_bytes(f, kSubsPerSuper);
  // What kernels count: columns of a float type, sub-blocks of the others.
  static constexpr int count(int cols_left) {
    const int cols = cols_left < kCols ? cols_left : kCols;
    return kDense ? cols : cols / kSubCols;
  }
};

using PanelStorage = uint8_t[kPanelStrips][sizeof(Strip<kStripTiles>)];

template <int kType, int kTiles>
LAMINA_INLINE void unpack_strip(const PanelArgs& a, int first_tile, int64_t offset, int count, uint8_t* storage) {
  auto& strip = *reinterpret_cast<Strip<kTiles>*>(storage);
  for (int t = 0; t < kTiles; ++t) {
    const uint8_t* super = a.tiles + (first_tile + t) * a.tile_bytes + offset;
    unpack_tile<kType, kTiles>(super, count, t, strip);
  }
}

template <int kType>
constexpr int init_plane_of() {
  constexpr Format f = format_of(kType);
  if (f.kind == Kind::kBlock32) return block_init_plane(f);
  return f.kind == Kind::kSuper ? super_init_plane(f) : f.kind == Kind::kFold ? fold_init_plane(f) : 0;
}

// Lines of each round, if `num_calls` kernel calls share the fetching of `bytes`.
constexpr int lines_per_round(int bytes, int num_calls) {
  const int round_bytes = kFetchRounds * kLine * num_calls;
  return (bytes + round_bytes - 1) / round_bytes;
}

// The strip at `first_tile` against column group `index`, over step `step`. `next` is what will be unpacked next.
template <int kType>
LAMINA_INLINE BlockedArgs strip_args(const PanelArgs& a, int first_tile, int step, int count, int index,
                                     const uint8_t* next) {
  constexpr Kind kind = format_of(kType).kind;
  const Activations& acts = *a.acts;
  const bool is_last_step = (step + 1) * Step<kType>::kCols >= acts.cols;
  const ColGroup group = column_group(acts, index);
  const GroupActivations act = group_activations(acts, kind, group);
  const int64_t weight_share = Step<kType>::kBytes * static_cast<int64_t>(index) / acts.num_groups / kLine * kLine;
  return {
      act.begin + step * act.stride_bytes,
      acts.ldx,
      count,
      init_plane_of<kType>(),
      a.sums + strip_offset(a, group, first_tile),
      step == 0,
      next + first_tile * a.tile_bytes + weight_share,
      a.tile_bytes,
      lines_per_round(Step<kType>::kBytes, acts.num_groups),
      is_last_step && a.out != nullptr ? a.out + group.first_col * a.ldo + first_tile * kTileRows : nullptr,
      a.ldo,
  };
}

template <int kType, int kTiles>
LAMINA_INLINE void multiply_strip(const BlockedArgs& args, ColGroup group, const uint8_t* storage) {
  const auto& strip = *reinterpret_cast<const Strip<kTiles>*>(storage);
  if (group.num_cols == kGroupCols) return blocked_tile<kType, kTiles, kGroupCols>(strip, args);
  if (group.num_cols == kGroupCols - kColUnit) return blocked_tile<kType, kTiles, kGroupCols - kColUnit>(strip, args);
  blocked_tile<kType, kTiles, kGroupCols - 2 * kColUnit>(strip, args);
}

// All strips of a step against all column groups.
template <int kType>
LAMINA_INLINE void multiply_step(const PanelArgs& a, int step, int count, const uint8_t* next,
                                 const PanelStorage& storage) {
  PlanePipeline<kType> pipeline;
  for (int g = 0; g < a.acts->num_groups; ++g) {
    const ColGroup group = column_group(*a.acts, g);
    for (int tile = 0; tile < a.num_tiles; tile += kStripTiles) {
      const uint8_t* strip = storage[tile / kStripTiles];
      const BlockedArgs args = strip_args<kType>(a, tile, step, count, g, next);
      if constexpr (has_byte_planes(format_of(kType))) {
        pipeline.multiply(*reinterpret_cast<const Strip<1>*>(strip), args, group.num_cols);
      } else if (a.num_tiles - tile >= kStripTiles) {
        multiply_strip<kType, kStripTiles>(args, group, strip);
      } else {
        multiply_strip<kType, 1>(args, group, strip);
      }
    }
  }
  if constexpr (has_byte_planes(format_of(kType))) pipeline.finish();
}

template <int kType>
static void multiply_panel(const PanelArgs& a) {
  alignas(64) PanelStorage storage;
  configure_tiles<kType>(column_group(*a.acts, 0).num_cols);
  int64_t offset = 0;
  int step = 0;
  for (int cols_left = a.acts->cols; cols_left > 0; cols_left -= Step<kType>::kCols, ++step) {
    const int count = Step<kType>::count(cols_left);
    for (int tile = 0; tile < a.num_tiles; tile += kStripTiles) {
      uint8_t* strip = storage[tile / kStripTiles];
      if (a.num_tiles - tile >= kStripTiles) unpack_strip<kType, kStripTiles>(a, tile, offset, count, strip);
      else unpack_strip<kType, 1>(a, tile, offset, count, strip);
    }
    offset += Step<kType>::kBytes;
    // After the last step comes the next panel.
    const uint8_t* next = a.tiles + (cols_left > Step<kType>::kCols ? offset : a.num_tiles * a.tile_bytes);
    multiply_step<kType>(a, step, count, next, storage);
  }
}

}  // namespace lamina::LAMINA_LINEAR_NS
