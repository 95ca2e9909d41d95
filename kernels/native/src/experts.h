// The scratch of a mixture of experts, and the grouping of rows by the expert that they chose.
#pragma once
#include <cstddef>
#include <cstdint>

#include "lamina/tape.h"

namespace lamina {

constexpr int kExpertChunk = 128;                  // rows gathered at a time
constexpr float kLeastShareSum = 1.0f / (1 << 14);  // LEAST_SHARE_SUM of lamina.kernels.ops

// A row and which of its k experts is meant.
struct ExpertPair {
  int32_t row;
  int32_t rank;
};

// One thread's scratch. The pairs of expert e are pairs[starts[e]] .. pairs[starts[e + 1] - 1], by row.
struct ExpertScratch {
  int32_t* starts;
  ExpertPair* pairs;
  float* x;         // [chunk][in]
  float* products;  // [chunk][rows of a part]
  float* bias;      // of a gate and an up part
  uint8_t* linear;
  size_t num_bytes;
};

// Parts of an expert: gate and up, or one.
inline int num_parts(const ExpertArgs& args) {
  return args.mode == LinearMode::kStore || args.mode == LinearMode::kAccumulate ? 1 : 2;
}

// Where everything stands in `memory` (null to ask for num_bytes alone) for a step of up to `num_rows` rows.
ExpertScratch expert_scratch(Isa isa, const ExpertArgs& args, int num_rows, uint8_t* memory);
// Fills starts and pairs. False if an id names no expert.
bool group_by_expert(const ExpertArgs& args, int num_rows, const ExpertScratch& scratch);

}  // namespace lamina
