// The public functions of linear.h: sizes, and the choice of the ISA's kernels.
#include "lamina/linear.h"

#include "activation.h"
#include "formats.h"

namespace lamina {

namespace linear_avx2 { void run(const LinearArgs& args, const Region& region); }
namespace linear_avx512 { void run(const LinearArgs& args, const Region& region); }
namespace linear_amx { void run(const LinearArgs& args, const Region& region); }
namespace linear_amx_few { void run(const LinearArgs& args, const Region& region); }
namespace linear_neon { void run(const LinearArgs& args, const Region& region); }
namespace linear_scalar { void run(const LinearArgs& args, const Region& region); }

using namespace linear_common;

bool linear_supports(Isa, int32_t type) { return format_of(type).kind != Kind::kNone; }

size_t packed_bytes(Isa, int32_t type, int64_t rows, int64_t cols) {
  return static_cast<size_t>((rows + kTileRows - 1) / kTileRows * tile_bytes(format_of(type), cols));
}

size_t linear_scratch_bytes(Isa isa, int32_t max_rows, int32_t max_cols, int32_t) {
  int64_t rows = max_rows < kMaxBlockCols ? max_rows : kMaxBlockCols;
  if (isa == Isa::kAmx) rows += 8;  // up to 3 fill a column unit, and a tile register may be loaded from 4 more
  return static_cast<size_t>(align_line(rows * num_supers(max_cols) * block32::kBytes) +
                             align_line(rows * num_supers(max_cols) * super256::kBytes));
}

namespace {

#if LAMINA_HAVE_AMX
// Tile registers pay from so many rows on; for superblocks they may be used for more than what the kernels of few rows
// take. Types with integer sums must not go to AVX-512's own kernels, which sum in floats.
constexpr int kLeastTileRows = 12;
constexpr int kMostFewRows = 8;
void linear_with_tiles(const LinearArgs& args, const Region& region) {
  bool has_super = false, has_dense = false;
  for (int p = 0; p < args.num_parts; ++p) {
    const Kind kind = format_of(args.parts[p].type).kind;
    has_super |= kind == Kind::kSuper;
    has_dense |= kind == Kind::kDense;
  }
  const bool suits = args.num_rows >= (has_super ? kMostFewRows + 1 : kLeastTileRows);
  if (suits && !has_dense) return linear_amx::run(args, region);
  return has_super ? linear_amx_few::run(args, region) : linear_avx512::run(args, region);
}
#endif

}  // namespace

void linear(Isa isa, const LinearArgs& args, const Region& region) {
  switch (isa) {
#if LAMINA_HAVE_AVX2
    case Isa::kAvx2: return linear_avx2::run(args, region);
#endif
#if LAMINA_HAVE_AVX512
    case Isa::kAvx512Vnni: return linear_avx512::run(args, region);
#endif
#if LAMINA_HAVE_AMX
    case Isa::kAmx: return linear_with_tiles(args, region);
#endif
#if LAMINA_HAVE_NEON
    case Isa::kNeon: return linear_neon::run(args, region);
#endif
    default: return linear_scalar::run(args, region);
  }
}

}  // namespace lamina
