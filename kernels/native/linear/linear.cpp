// The public functions of linear.h: sizes, and the choice of the ISA's kernels.
#include "lamina/linear.h"

#include "activation.h"
#include "formats.h"

namespace lamina {

namespace linear_avx2 { void run(const LinearArgs& args, const Region& region); }
namespace linear_avx512 { void run(const LinearArgs& args, const Region& region); }
namespace linear_amx { void run(const LinearArgs& args, const Region& region); }
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

// Whether AMX's tile registers pay: from so many rows on, if every dot product is long enough.
constexpr int kLeastTileRows = 12;
bool suits_tiles(const LinearArgs& args) {
  bool suits = args.num_rows >= kLeastTileRows;
  for (int p = 0; p < args.num_parts; ++p) {
    const Format f = format_of(args.parts[p].type);
    suits = suits && (f.kind == Kind::kBlock32 || f.kind == Kind::kFold || (f.kind == Kind::kSuper && f.scale_group == 32));
  }
  return suits;
}

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
    case Isa::kAmx: return suits_tiles(args) ? linear_amx::run(args, region) : linear_avx512::run(args, region);
#endif
#if LAMINA_HAVE_NEON
    case Isa::kNeon: return linear_neon::run(args, region);
#endif
    default: return linear_scalar::run(args, region);
  }
}

}  // namespace lamina
