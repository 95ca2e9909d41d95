#include "select.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

namespace lamina {

size_t sample_own_bytes(int columns) {
  const size_t padded = sample_padded(columns);
  return (kSampleBins + padded / 256) * sizeof(double) + 4 * padded * sizeof(float);
}

float nth_largest(float* values, int count, int rank) {
  std::nth_element(values, values + rank - 1, values + count, std::greater<float>());
  return values[rank - 1];
}

float deviation_of_finite(const float* logits, int count, float largest) {
  double sums[4] = {}, squares[4] = {};
  int num_finite = 0;
  for (int i = 0; i < count; ++i) {
    const double below = static_cast<double>(logits[i]) - largest;
    if (!std::isfinite(below)) continue;
    ++num_finite;
    sums[i % 4] += below;  // four sums, so that an addition need not wait for the one before
    squares[i % 4] += below * below;
  }
  const double mean = (sums[0] + sums[1] + sums[2] + sums[3]) / num_finite;
  const double square = (squares[0] + squares[1] + squares[2] + squares[3]) / num_finite;
  return static_cast<float>(std::sqrt(std::max(0.0, square - mean * mean)));
}

int keep_largest(const Candidates& c, int k, const SampleScratch& s) {
  if (c.count <= k) return c.count;
  std::memcpy(s.spare, s.logits, c.count * sizeof(float));
  const float last = nth_largest(s.spare, c.count, k);
  int ties = k;  // how many of those equal to the last are kept
  for (int i = 0; i < c.count; ++i) ties -= s.logits[i] > last;
  int kept = 0;
  for (int i = 0; i < c.count; ++i) {
    const float logit = s.logits[i];
    if (logit < last || (logit == last && --ties < 0)) continue;
    s.logits[kept] = logit;
    s.ids[kept++] = s.ids[i];
  }
  return kept;
}

namespace {

// The place of the last token of the nucleus among the candidates that fall into `bin`; `missing` is the mass that the
// bins before it leave to be reached.
int last_of_nucleus(const Candidates& c, int bin, float largest, float scale, double missing, const SampleScratch& s) {
  auto* places = reinterpret_cast<int32_t*>(s.spare);
  int count = 0;
  for (int i = 0; i < c.count; ++i) {
    if (static_cast<int>((largest - s.logits[i]) * scale) == bin) places[count++] = i;
  }
  const auto comes_first = [&](int32_t a, int32_t b) {
    return s.logits[a] > s.logits[b] || (s.logits[a] == s.logits[b] && a < b);
  };
  if (!std::is_sorted(places, places + count, comes_first)) std::sort(places, places + count, comes_first);
  int i = 0;
  while (i + 1 < count && (missing -= s.weights[places[i]]) > 0) ++i;
  return places[i];
}

}  // namespace

int keep_nucleus(const Candidates& c, double mass, float largest, const SampleScratch& s) {
  const float range = largest - *std::min_element(s.logits, s.logits + c.count);
  if (!std::isfinite(range)) return c.count;  // no width to cut it into
  const float scale = range > 0 ? (kSampleBins - 1) / range : 0.0f;
  std::memset(s.bins, 0, kSampleBins * sizeof(double));
  for (int i = 0; i < c.count; ++i) s.bins[static_cast<int>((largest - s.logits[i]) * scale)] += s.weights[i];
  int bin = 0;
  for (; bin < kSampleBins && mass > s.bins[bin]; ++bin) mass -= s.bins[bin];
  if (bin == kSampleBins) return c.count;  // rounding: all of them are needed
  const int last = last_of_nucleus(c, bin, largest, scale, mass, s);
  const float limit = s.logits[last];
  int kept = 0;
  for (int i = 0; i < c.count; ++i) {
    if (s.logits[i] < limit || (s.logits[i] == limit && i > last)) continue;
    s.ids[kept] = s.ids[i];
    s.weights[kept++] = s.weights[i];
  }
  return kept;
}

}  // namespace lamina
