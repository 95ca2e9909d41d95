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
  int num_cols;
  int num_groups;
};

// Where a group's activations begin, and how far apart its superblocks (chunks of a float type) are.
struct GroupActivations {
  const uint8_t* begin;
  int64_t stride_bytes;
};

LAMINA_INLINE GroupActivations group_activations(const Activations& acts, Kind kind, ColGroup group) {
  const int64_t before = group.first_col * num_supers(acts.cols);
  switch (kind) {
    case Kind::kBlock32:
      return {acts.block32 + before * block32::kBytes, group.num_cols * block32::kBytes};
    case Kind::kSuper:
    case Kind::kFold:
      return {acts.super + before * super256::kBytes, group.num_cols * super256::kBytes};
    default:
      return {reinterpret_cast<const uint8_t*>(acts.x + group.first_col * acts.ldx), kDenseChunk * 4};
  }
}

struct PanelArgs {
  const uint8_t* tiles;  // the first tile
  int64_t tile_bytes;
  int num_tiles;
  const Activations* acts;
  float* sums;  // [group][strip][column][tile of the strip][16]
};

// Where the sums of (group, strip) begin in a panel's buffer.
LAMINA_INLINE int64_t sums_offset(const PanelArgs& a, ColGroup group, int first_tile) {
  return (static_cast<int64_t>(group.first_col) * a.num_tiles + group.num_cols * first_tile) * kTileRows;
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

template <int kType, int kTiles>
LAMINA_INLINE void unpack_strip(const PanelArgs& a, int first_tile, int64_t offset, int count, uint8_t* storage) {
  auto& strip = *reinterpret_cast<Strip<kTiles>*>(storage);
  for (int t = 0; t < kTiles; ++t) {
    const uint8_t* super = a.tiles + (first_tile + t) * a.tile_bytes + offset;
    for (int i = 0; i < Step<kType>::kBytes; i += kLine) prefetch(super + Step<kType>::kBytes + i);
    unpack_tile<kType, kTiles>(super, count, t, strip);
  }
}

template <int kType, int kTiles>
LAMINA_INLINE void multiply_strip(const uint8_t* storage, int num_cols, const BlockedArgs& args) {
  const auto& strip = *reinterpret_cast<const Strip<kTiles>*>(storage);
  if (num_cols == kGroupCols) return blocked_tile<kType, kTiles, kGroupCols>(strip, args);
  if (num_cols == kGroupCols - 1) return blocked_tile<kType, kTiles, kGroupCols - 1>(strip, args);
  blocked_tile<kType, kTiles, kGroupCols - 2>(strip, args);
}

template <int kType>
constexpr int init_plane_of() {
  constexpr Format f = format_of(kType);
  if (f.kind == Kind::kBlock32) return block_init_plane(f);
  return f.kind == Kind::kSuper ? super_init_plane(f) : f.kind == Kind::kFold ? fold_init_plane(f) : 0;
}

template <int kType>
static void multiply_panel(const PanelArgs& a) {
  alignas(64) uint8_t storage[kPanelStrips][sizeof(Strip<kStripTiles>)];
  const Activations& acts = *a.acts;
  __builtin_memset(a.sums, 0, sizeof(float) * kTileRows * a.num_tiles * acts.num_cols);
  int64_t offset = 0;
  int step = 0;
  for (int cols_left = acts.cols; cols_left > 0; cols_left -= Step<kType>::kCols, ++step) {
    const int count = Step<kType>::count(cols_left);
    for (int tile = 0; tile < a.num_tiles; tile += kStripTiles) {
      uint8_t* strip = storage[tile / kStripTiles];
      if (a.num_tiles - tile >= kStripTiles) unpack_strip<kType, kStripTiles>(a, tile, offset, count, strip);
      else unpack_strip<kType, 1>(a, tile, offset, count, strip);
    }
    for (int g = 0; g < acts.num_groups; ++g) {
      const ColGroup group = col_group(acts.num_cols, acts.num_groups, g);
      const GroupActivations act = group_activations(acts, format_of(kType).kind, group);
      for (int tile = 0; tile < a.num_tiles; tile += kStripTiles) {
        const BlockedArgs args{act.begin + step * act.stride_bytes, acts.ldx, count, init_plane_of<kType>(),
                               a.sums + sums_offset(a, group, tile)};
        const uint8_t* strip = storage[tile / kStripTiles];
        if (a.num_tiles - tile >= kStripTiles) multiply_strip<kType, kStripTiles>(strip, group.num_cols, args);
        else multiply_strip<kType, 1>(strip, group.num_cols, args);
      }
    }
    offset += Step<kType>::kBytes;
  }
}

}  // namespace lamina::LAMINA_LINEAR_NS
