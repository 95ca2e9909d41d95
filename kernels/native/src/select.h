// Exact selection among the candidates of a sampled row. Compiled for the baseline: it is all branches, and standard
// algorithms must not be instantiated per instruction set (see worker.h).
#pragma once
#include <cstddef>
#include <cstdint>

namespace lamina {

constexpr int kSampleBins = 4096;

// Rows are padded so that a block of maxima or sums fits behind every length.
static inline size_t sample_padded(int columns) { return (static_cast<size_t>(columns) + 255) / 256 * 256; }

struct SampleScratch {
  double* bins;     // [kSampleBins]
  double* sums;     // one for each 256 columns; the others one for each column
  float* logits;    // of the candidates
  int32_t* ids;
  float* weights;
  float* spare;
};

// Tokens in order of id; `ids` null: all of them.
struct Candidates {
  const float* logits;
  const int32_t* ids;
  int count;
};

size_t sample_own_bytes(int columns);

// The rank-th largest (1 = the largest); reorders.
float nth_largest(float* values, int count, int rank);

// The standard deviation of the finite logits; `largest` is one of them.
float deviation_of_finite(const float* logits, int count, float largest);

// Leaves the k largest of the candidates, of equal ones the first; c must lie in the scratch if it has more. Returns
// how many there are.
int keep_largest(const Candidates& c, int k, const SampleScratch& s);

// Leaves the fewest largest candidates whose weights reach `mass` together, in order of id, of equal ones the first; c
// must lie in the scratch. Returns how many there are; their logits are not kept up.
int keep_nucleus(const Candidates& c, double mass, float largest, const SampleScratch& s);

}  // namespace lamina
