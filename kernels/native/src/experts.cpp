#include "experts.h"

namespace lamina {
namespace {

const int32_t* ids_of(const ExpertArgs& args, int row) {
  return static_cast<const int32_t*>(args.experts.data) + row * args.experts.stride;
}

}  // namespace

ExpertScratch expert_scratch(Isa isa, const ExpertArgs& args, int num_rows, uint8_t* memory) {
  const PackedPart& part = args.weight->parts[0];
  const int64_t chunk = num_rows < kExpertChunk ? num_rows : kExpertChunk;
  size_t used = 0;
  const auto take = [&](size_t num_bytes) {
    uint8_t* begin = memory + used;
    used += (num_bytes + 63) / 64 * 64;
    return begin;
  };
  ExpertScratch scratch{};
  scratch.starts = reinterpret_cast<int32_t*>(take((args.weight->num_parts / num_parts(args) + 2) * sizeof(int32_t)));
  scratch.pairs = reinterpret_cast<ExpertPair*>(
      take(static_cast<size_t>(num_rows) * args.experts.columns * sizeof(ExpertPair)));
  scratch.x = reinterpret_cast<float*>(take(chunk * part.cols * sizeof(float)));
  scratch.products = reinterpret_cast<float*>(take(chunk * part.rows * sizeof(float)));
  scratch.bias = reinterpret_cast<float*>(take(2 * part.rows * sizeof(float)));
  scratch.linear = take(linear_scratch_bytes(isa, static_cast<int32_t>(chunk), part.cols, part.rows));
  scratch.num_bytes = used;
  return scratch;
}

bool group_by_expert(const ExpertArgs& args, int num_rows, const ExpertScratch& scratch) {
  const int num_experts = args.weight->num_parts / num_parts(args);
  // Counted two places on, so that filling leaves each start where it belongs.
  int32_t* next = scratch.starts + 1;
  for (int expert = 0; expert < num_experts + 2; ++expert) scratch.starts[expert] = 0;
  for (int row = 0; row < num_rows; ++row) {
    for (int rank = 0; rank < args.experts.columns; ++rank) {
      const int32_t expert = ids_of(args, row)[rank];
      if (expert < 0 || expert >= num_experts) return false;
      ++next[expert + 1];
    }
  }
  for (int expert = 0; expert < num_experts; ++expert) next[expert + 1] += next[expert];
  for (int row = 0; row < num_rows; ++row) {
    for (int rank = 0; rank < args.experts.columns; ++rank) {
      scratch.pairs[next[ids_of(args, row)[rank]]++] = {row, rank};
    }
  }
  return true;
}

}  // namespace lamina
