// The linear op on one ISA: quantises a block of rows of x, divides the tiles of 16 output rows among the threads, and
// runs the direct kernels (few rows) or the blocked ones (more) on them.
#pragma once
#include <utility>

namespace lamina::LAMINA_LINEAR_NS {

struct TypeKernels {
  void (*direct[kDirectCols])(const DirectArgs&);
  void (*panel)(const PanelArgs&);
};

template <int kType, int kNumCols>
constexpr auto direct_kernel() {
  constexpr Kind kind = format_of(kType).kind;
  if constexpr (kind == Kind::kBlock32) return &direct_block32<kType, kNumCols>;
  else if constexpr (kind == Kind::kDense) return &direct_dense<kType, kNumCols>;
  else return &direct_super<kType, kNumCols>;
}

template <int kType, int... kIndex>
constexpr TypeKernels make_kernels(std::integer_sequence<int, kIndex...>) {
  constexpr Kind kind = format_of(kType).kind;
  if constexpr (kind == Kind::kNone || (kUsesTiles && kind == Kind::kDense)) return {};
  else if constexpr (kUsesTiles) return {{}, &multiply_panel<kType>};
  else if constexpr (kMaxBlockCols <= kDirectCols) return {{direct_kernel<kType, kIndex + 1>()...}, nullptr};
  else return {{direct_kernel<kType, kIndex + 1>()...}, &multiply_panel<kType>};
}

struct KernelTable {
  TypeKernels of_type[kNumTypeIds];
};
template <int... kTypes>
constexpr KernelTable make_table(std::integer_sequence<int, kTypes...>) {
  return {{make_kernels<kTypes>(std::make_integer_sequence<int, kDirectCols>{})...}};
}
static constexpr KernelTable kTable = make_table(std::make_integer_sequence<int, kNumTypeIds>{});

LAMINA_INLINE bool is_gated(const LinearArgs& a) {
  return a.mode != LinearMode::kStore && a.mode != LinearMode::kAccumulate;
}
LAMINA_INLINE int num_tiles(const PackedPart& part) { return (part.rows + kTileRows - 1) / kTileRows; }
LAMINA_INLINE int64_t tile_bytes(const PackedPart& part) { return tile_bytes(format_of(part.type), part.cols); }

static void note_needs(const PackedPart& part, ActivationNeeds& needs) {
  const Format f = format_of(part.type);
  if (f.kind == Kind::kBlock32) {
    needs.block32 = true;
    needs.block_sums |= f.has_min;
    const int plane = block_init_plane(f);
    needs.init8 |= plane == block32::kInit8;
    needs.init16 |= plane == block32::kInit16;
    needs.init128 |= plane == block32::kInit128;
  } else if (f.kind != Kind::kDense) {
    needs.super = true;
    needs.pairs32 |= f.has_min && f.scale_group == 32;
    needs.pairs16 |= f.has_min && f.scale_group == 16;
    const int plane = super_init_plane(f);
    needs.init4 |= plane == super256::kInit4;
    needs.init32 |= plane == super256::kInit32;
    needs.init128_super |= plane == super256::kInit128;
    needs.init128_total |= f.kind == Kind::kFold && fold_init_plane(f) != 0;
  }
}

// The calling thread's share of quantising a block of rows: whole superblocks of column groups.
static void quantise_share(const Activations& acts, const ActivationNeeds& needs, const Region& region) {
  const int supers = static_cast<int>(num_supers(acts.cols));
  const int64_t units = static_cast<int64_t>(acts.num_groups) * supers;
  const int64_t end = units * (region.thread + 1) / region.num_threads;
  for (int64_t unit = units * region.thread / region.num_threads; unit < end; ++unit) {
    const ColGroup group = column_group(acts, static_cast<int>(unit / supers));
    const int super = static_cast<int>(unit % supers);
    const int left = acts.cols - super * kSuperCols;
    const int num_subs = (left < kSuperCols ? left : kSuperCols) / kSubCols;
    const GroupActivations block = group_activations(acts, Kind::kBlock32, group);
    const GroupActivations whole = group_activations(acts, Kind::kSuper, group);
    for (int c = 0; c < group.num_cols; ++c) {
      const int row = group.first_col + c < acts.num_rows ? group.first_col + c : acts.num_rows - 1;
      const float* x = acts.x + row * acts.ldx + super * kSuperCols;
      if (needs.block32) {
        quantise_block32(x, num_subs, group.num_cols, c, needs,
                         const_cast<uint8_t*>(block.begin) + super * block.stride_bytes);
      }
      if (needs.super) {
        quantise_super(x, group.num_cols, c, needs, const_cast<uint8_t*>(whole.begin) + super * whole.stride_bytes);
      }
    }
  }
}

// The first tile of `thread`, counted over all parts (over the gate alone in the gated modes), so that every thread
// reads about the same number of bytes.
static int first_tile(const LinearArgs& a, int num_threads, int thread) {
  const int num_parts = is_gated(a) ? 1 : a.num_parts;
  int64_t total = 0;
  int tiles_before = 0;
  for (int p = 0; p < num_parts; ++p) total += num_tiles(a.parts[p]) * tile_bytes(a.parts[p]);
  int64_t target = total * thread / num_threads;
  for (int p = 0; p < num_parts; ++p) {
    const int64_t bytes = tile_bytes(a.parts[p]);
    if (target < num_tiles(a.parts[p]) * bytes) {
      return tiles_before + static_cast<int>(target / bytes) / kStripTiles * kStripTiles;
    }
    target -= num_tiles(a.parts[p]) * bytes;
    tiles_before += num_tiles(a.parts[p]);
  }
  return tiles_before;
}

// A run of tiles of one part (or of a gated pair), and where its outputs and biases begin.
struct TileRun {
  const PackedPart* part;
  const PackedPart* up;  // gated modes
  int first;
  int count;
  int out_begin;  // output of the part's first row
};

// One tile's place in `out` for row `col` of the block that begins at row `first_row`.
LAMINA_INLINE OutTile out_tile(const LinearArgs& a, const TileRun& run, int tile, int64_t row) {
  const int begin = tile * kTileRows;
  const int count = run.part->rows - begin < kTileRows ? run.part->rows - begin : kTileRows;
  const float* bias = a.bias == nullptr ? nullptr : a.bias + run.out_begin + begin;
  return {a.out + row * a.ldo + run.out_begin + begin, bias, count};
}

LAMINA_INLINE void finish_tile(const LinearArgs& a, const TileRun& run, int tile, int64_t row, const float* sums,
                               const float* up_sums) {
  const OutTile out = out_tile(a, run, tile, row);
  if (run.up == nullptr) {
    store_plain(out, sums, a.mode == LinearMode::kAccumulate);
  } else {
    store_gated(out, sums, up_sums, out.bias == nullptr ? nullptr : out.bias + run.part->rows, a.mode);
  }
}

static void direct_tile(const PackedPart& part, int tile, const uint8_t* next, const Activations& acts, float* sums) {
  const int64_t bytes = tile_bytes(part);
  const uint8_t* data = part.data + tile * bytes;
  const GroupActivations act = group_activations(acts, format_of(part.type).kind, {0, acts.num_cols});
  const DirectArgs args{data, data + bytes, next == nullptr ? data + bytes : next, acts.cols, act.begin, acts.ldx, sums};
  kTable.of_type[part.type].direct[acts.num_cols - 1](args);
}

static void run_direct(const LinearArgs& a, const TileRun& run, const Activations& acts, int first_row) {
  alignas(64) float sums[2][kDirectCols * kTileRows];
  for (int tile = run.first; tile < run.first + run.count; ++tile) {
    if (run.up == nullptr) {
      direct_tile(*run.part, tile, nullptr, acts, sums[0]);
    } else {
      direct_tile(*run.part, tile, run.up->data + tile * tile_bytes(*run.up), acts, sums[0]);
      direct_tile(*run.up, tile, run.part->data + (tile + 1) * tile_bytes(*run.part), acts, sums[1]);
    }
    for (int c = 0; c < acts.num_cols; ++c) {
      finish_tile(a, run, tile, first_row + c, sums[0] + c * kTileRows, sums[1] + c * kTileRows);
    }
  }
}

static void run_blocked(const LinearArgs& a, const TileRun& run, const Activations& acts, int first_row) {
  alignas(64) float sums[2][kMaxBlockCols * kPanelTiles * kTileRows];
  for (int tile = run.first; tile < run.first + run.count; tile += kPanelTiles) {
    const int left = run.first + run.count - tile;
    const int count = left < kPanelTiles ? left : kPanelTiles;
    const PackedPart* pair[2] = {run.part, run.up};
    PanelArgs panel{};
    const int num_panels = run.up == nullptr ? 1 : 2;
    const float* out = out_tile(a, run, tile, first_row).out;
    for (int i = 0; i < num_panels; ++i) {
      const int64_t bytes = tile_bytes(*pair[i]);
      panel = {pair[i]->data + tile * bytes, bytes, count, &acts, sums[i], i + 1 == num_panels ? out : nullptr, a.ldo};
      kTable.of_type[pair[i]->type].panel(panel);
    }
    for (int g = 0; g < acts.num_groups; ++g) {
      const ColGroup group = column_group(acts, g);
      // Column by column: a column's tiles are neighbours in `out`, its next column lies on another page.
      const int rows_left = acts.num_rows - group.first_col;
      for (int c = 0; c < group.num_cols && c < rows_left; ++c) {
        for (int t = 0; t < count; ++t) {
          const int64_t at = sums_offset(panel, group, c, t);
          finish_tile(a, run, tile + t, first_row + group.first_col + c, sums[0] + at, sums[1] + at);
        }
      }
    }
  }
}

// All tiles of the calling thread, against one block of rows.
static void multiply_share(const LinearArgs& a, const Activations& acts, int first_row, const Region& region) {
  const int begin = first_tile(a, region.num_threads, region.thread);
  const int end = first_tile(a, region.num_threads, region.thread + 1);
  const bool gated = is_gated(a);
  int tiles_before = 0;
  int out_begin = 0;
  for (int p = 0; p < (gated ? 1 : a.num_parts); ++p) {
    const int tiles = num_tiles(a.parts[p]);
    const int low = begin > tiles_before ? begin - tiles_before : 0;
    const int high = end - tiles_before < tiles ? end - tiles_before : tiles;
    if (low < high) {
      const TileRun run{&a.parts[p], gated ? &a.parts[1] : nullptr, low, high - low, out_begin};
      if (!kUsesTiles && acts.num_groups == 1 && acts.num_cols <= kDirectCols) run_direct(a, run, acts, first_row);
      else run_blocked(a, run, acts, first_row);
    }
    tiles_before += tiles;
    out_begin += a.parts[p].rows;
  }
}

void run(const LinearArgs& a, const Region& region) {
  const int cols = a.parts[0].cols;
  ActivationNeeds needs;
  for (int p = 0; p < a.num_parts; ++p) note_needs(a.parts[p], needs);
  const int num_blocks = (a.num_rows + kMaxBlockCols - 1) / kMaxBlockCols;
  for (int block = 0; block < num_blocks; ++block) {
    const ColGroup rows = col_group(a.num_rows, num_blocks, block);
    const int num_cols = (rows.num_cols + kColUnit - 1) / kColUnit * kColUnit;
    const int num_groups = num_cols <= kDirectCols ? 1 : (num_cols + kGroupCols - 1) / kGroupCols;
    const int64_t block32_bytes = align_line(num_cols * num_supers(cols) * block32::kBytes);
    const Activations acts{a.scratch,
                           a.scratch + (needs.block32 ? block32_bytes : 0),
                           a.x + rows.first_col * a.ldx,
                           a.ldx,
                           cols,
                           rows.num_cols,
                           num_cols,
                           num_groups};
    if (needs.block32 || needs.super) {
      if (block != 0) region.barrier(region.context);  // the block before still reads the scratch
      quantise_share(acts, needs, region);
      region.barrier(region.context);
    }
    multiply_share(a, acts, rows.first_col, region);
  }
  release_tiles();
}

}  // namespace lamina::LAMINA_LINEAR_NS
