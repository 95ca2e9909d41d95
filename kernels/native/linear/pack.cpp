// GGUF blocks to the packed layout of formats.h, one row of one superblock at a time.
#include <cstring>

#include "formats.h"
#include "half.h"
#include "lamina/linear.h"
#include "gguf_blocks.h"
#include "planes.h"

namespace lamina {
namespace LAMINA_LINEAR_NS {
namespace {

void copy_half(const uint8_t* from, uint8_t* to) { std::memcpy(to, from, 2); }

// `source` is the row's first block of the superblock.
template <int kType>
void pack_block32(const uint8_t* source, int num_subs, int row, uint8_t bias, uint8_t* super) {
  constexpr Format f = format_of(kType);
  uint8_t* data = super + header_bytes(f, num_subs);
  for (int sub = 0; sub < num_subs; ++sub, source += block_size(kType).bytes, data += sub_bytes(f)) {
    if constexpr (kType == kMXFP4) super[sub * kTileRows + row] = source[0];
    else copy_half(source, super + sub * 32 + row * 2);
    if constexpr (f.has_min) copy_half(source + 2, super + (num_subs + sub) * 32 + row * 2);
    uint32_t codes[kWords];
    read_codes<kType>(source, 0, codes);
    for (uint32_t& word : codes) word ^= bias * kEachByte;
    put_planes<kType>(codes, row, data);
  }
}

template <int kType>
void pack_super(const uint8_t* source, int row, uint8_t* super) {
  constexpr Format f = format_of(kType);
  constexpr int kScales = kSuperCols / f.scale_group;
  copy_half(source + super_scale_at(kType), super + kOffsetD + row * 2);
  if constexpr (f.has_min) copy_half(source + super_scale_at(kType) + 2, super + kOffsetDmin + row * 2);
  for (int i = 0; i < kScales; ++i) {
    const uint8_t scale = read_scale<kType>(source, i);
    if constexpr (kType == kQ2_K) {
      const uint8_t min = read_min<kType>(source, i);
      super[kOffsetScales + i / 2 * kTileRows + row] |= static_cast<uint8_t>(scale << (4 * (i % 2)));
      super[kOffsetMins + i / 2 * kTileRows + row] |= static_cast<uint8_t>(min << (4 * (i % 2)));
    } else {
      super[kOffsetScales + i * kTileRows + row] = scale;
      if constexpr (f.has_min) {
        super[kOffsetMins + i / 2 * 2 * kTileRows + row * 2 + i % 2] = read_min<kType>(source, i);
      }
    }
  }
  uint8_t* data = super + header_bytes(f, kSubsPerSuper);
  for (int sub = 0; sub < kSubsPerSuper; ++sub, data += sub_bytes(f)) {
    uint32_t codes[kWords];
    read_codes<kType>(source, sub, codes);
    put_planes<kType>(codes, row, data);
  }
}

// Elements of kBytes bytes, transposed a few columns at a time so that the lines written stay in L1.
template <int kBytes>
void pack_dense(const uint8_t* source, int64_t source_row_bytes, int num_rows, int cols, uint8_t* tile) {
  constexpr int kChunk = 64;
  for (int begin = 0; begin < cols; begin += kChunk) {
    const int end = begin + kChunk < cols ? begin + kChunk : cols;
    for (int row = 0; row < num_rows; ++row) {
      const uint8_t* from = source + row * source_row_bytes;
      for (int k = begin; k < end; ++k) {
        std::memcpy(tile + (static_cast<int64_t>(k) * kTileRows + row) * kBytes, from + k * kBytes, kBytes);
      }
    }
  }
}

struct TileSource {
  const uint8_t* rows;
  int64_t row_bytes;
  int num_rows;
};

template <int kType>
void pack_tile(const TileSource& source, int cols, uint8_t bias, uint8_t* tile) {
  constexpr Format f = format_of(kType);
  if constexpr (f.kind == Kind::kDense) {
    pack_dense<f.element_bytes>(source.rows, source.row_bytes, source.num_rows, cols, tile);
  } else {
    constexpr int kSourceBytes = kSuperCols / block_size(kType).values * block_size(kType).bytes;
    for (int super = 0; super * kSuperCols < cols; ++super) {
      const int left = cols - super * kSuperCols;
      const int num_subs = (left < kSuperCols ? left : kSuperCols) / kSubCols;
      uint8_t* target = tile + static_cast<int64_t>(super) * super_bytes(f, kSubsPerSuper);
      for (int row = 0; row < source.num_rows; ++row) {
        const uint8_t* from = source.rows + row * source.row_bytes + static_cast<int64_t>(super) * kSourceBytes;
        if constexpr (f.kind == Kind::kBlock32) pack_block32<kType>(from, num_subs, row, bias, target);
        else pack_super<kType>(from, row, target);
      }
    }
  }
}

}  // namespace
}  // namespace LAMINA_LINEAR_NS

using namespace LAMINA_LINEAR_NS;

void pack_rows(Isa isa, const uint8_t* source, int64_t source_row_bytes, int64_t row_begin, int64_t row_end,
               const PackedPart& target) {
  const Format f = format_of(target.type);
  const int64_t bytes = tile_bytes(f, target.cols);
  const uint8_t bias = stored_bias(isa, f);
  for (int64_t row = row_begin; row < row_end; row += kTileRows) {
    const int64_t left = row_end - row;
    const int num_rows = static_cast<int>(left < kTileRows ? left : kTileRows);
    const TileSource rows{source + row * source_row_bytes, source_row_bytes, num_rows};
    uint8_t* tile = target.data + row / kTileRows * bytes;
    std::memset(tile, 0, static_cast<size_t>(bytes));
    with_type(target.type, [&]<int kType>() { pack_tile<kType>(rows, target.cols, bias, tile); });
  }
}

}  // namespace lamina
