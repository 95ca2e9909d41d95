// Compares one instruction set's ops with the portable ones: norm, rotation, softcap, argmax, sampling, and attention
// over every KV dtype with odd head counts, windows, caps and sinks. For machines that Python tests do not reach (an
// emulator of another architecture). Argument: the instruction set's number. Prints each error; exits with the number
// of those too large.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "isa.h"
#include "kv_layout.h"
#include "select.h"
#include "team.h"

namespace {

using namespace lamina;

constexpr double kTolerance = 2e-6;
constexpr int kRows = 21, kHeads = 6, kKvHeads = 2, kKeyDim = 64, kValueDim = 96, kBlocks = 80, kFirstPosition = 1200;

std::vector<float> normal(size_t count, std::mt19937& rng) {
  std::normal_distribution<float> draw;
  std::vector<float> values(count);
  for (float& value : values) value = draw(rng);
  return values;
}

template <typename T>
Matrix matrix(std::vector<T>& values, int columns) {
  return {values.data(), columns, columns, static_cast<int32_t>(values.size()) / columns};
}

OpDesc op(OpKind kind) {
  OpDesc desc{};
  desc.kind = kind;
  desc.extent = Extent::kRows;
  desc.barrier = 1;
  return desc;
}

struct Rule {
  float softcap;
  int window;
  bool sinks;
};

// Everything from random K and V to the output of attention, softcapped, as one instruction set computes it.
std::vector<float> run(Isa isa, KvType type, const Rule& rule, std::vector<float>* normed, std::vector<int>* best) {
  std::mt19937 rng(7);
  constexpr int kTokens = kBlocks * kBlockTokens;
  auto k = normal(kTokens * kKvHeads * kKeyDim, rng), v = normal(kTokens * kKvHeads * kValueDim, rng);
  auto q = normal(kRows * kHeads * kKeyDim, rng), gain = normal(kKeyDim, rng), sinks = normal(kHeads, rng);
  std::vector<float> out(kRows * kHeads * kValueDim), inv_freq(20), table(kRows * 2 * 20);
  for (int i = 0; i < 20; ++i) inv_freq[i] = std::pow(10000.0f, -i / 20.0f);
  std::vector<int32_t> slots(kTokens), positions(kRows), starts{0, kRows}, blocks(kBlocks);
  best->assign(kRows, 0);
  for (int i = 0; i < kTokens; ++i) slots[i] = i;
  for (int i = 0; i < kRows; ++i) positions[i] = kFirstPosition + i;
  for (int i = 0; i < kBlocks; ++i) blocks[i] = i;
  void* pages = allocate(kBlocks * kv_block_bytes(type, kKvHeads, kKeyDim, kValueDim));
  const KvDesc cache{static_cast<uint8_t*>(pages), kBlocks, kKvHeads, kKeyDim, kValueDim, type};

  OpDesc write = op(OpKind::kKvWrite), norm = op(OpKind::kRmsNorm), angles = op(OpKind::kRopeTable),
         rope = op(OpKind::kRope);
  OpDesc attention = op(OpKind::kAttention), cap = op(OpKind::kSoftcap), argmax = op(OpKind::kArgmax);
  OpDesc sample = op(OpKind::kSample);
  write.kv_write = {matrix(k, kKvHeads * kKeyDim), matrix(v, kKvHeads * kValueDim), matrix(slots, 1), &cache};
  norm.rms_norm = {matrix(q, kHeads * kKeyDim), matrix(q, kHeads * kKeyDim), gain.data(), kKeyDim, 1e-5f};
  angles.rope_table = {matrix(positions, 1), inv_freq.data(), table.data(), 20, 1.1f};
  rope.rope = {matrix(q, kHeads * kKeyDim), table.data(), 20, kKeyDim, 1};
  attention.attention = {matrix(q, kHeads * kKeyDim),
                         matrix(out, kHeads * kValueDim),
                         matrix(positions, 1),
                         matrix(starts, 1),
                         matrix(blocks, kBlocks),
                         &cache,
                         rule.sinks ? sinks.data() : nullptr,
                         0.125f,
                         rule.softcap,
                         rule.window};
  cap.softcap = {matrix(out, kHeads * kValueDim), 0.7f};
  argmax.argmax = {matrix(out, kHeads * kValueDim), matrix(*best, 1)};
  std::vector<float> params;  // every filter, over the rows
  for (int i = 0; i < kRows; ++i) {
    const float row[] = {i % 5 == 0 ? 0.0f : 0.2f, i % 3 == 0 ? 20.0f : 0.0f, i % 2 == 0 ? 0.8f : 1.0f,
                         i % 4 == 1 ? 0.1f : 0.0f, i % 7 == 2 ? 1.5f : 0.0f,  (i + 0.37f) / kRows};
    params.insert(params.end(), row, row + 6);
  }
  sample.sample = {matrix(out, kHeads * kValueDim), matrix(params, 6), matrix(*best, 1)};
  Team team(isa, 2, false);
  team.reserve(std::max(attention_own_bytes(kKeyDim, kValueDim), sample_own_bytes(kHeads * kValueDim)),
               attention_shared_bytes(2, kHeads / kKvHeads, kValueDim, kBlocks));
  const OpDesc ops[] = {norm, angles, rope, attention, cap, argmax, sample};
  if (team.replay(&write, 1, {kTokens, 1, 0}, 2, nullptr) != Status::kOk ||
      team.replay(ops, 7, {kRows, 1, 0}, 2, nullptr) != Status::kOk) {
    std::printf("a replay failed\n");
  }
  release(pages, kBlocks * kv_block_bytes(type, kKvHeads, kKeyDim, kValueDim));
  *normed = q;
  return out;
}

double relative_error(const std::vector<float>& found, const std::vector<float>& wanted) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    difference += std::pow(static_cast<double>(found[i]) - wanted[i], 2);
    size += std::pow(static_cast<double>(wanted[i]), 2);
  }
  return std::sqrt(difference / size);
}

}  // namespace

int main(int argc, char** argv) {
  const Isa isa = static_cast<Isa>(argc > 1 ? std::atoi(argv[1]) : 3);
  if (!isa_works(isa)) {
    std::printf("instruction set %d does not run here\n", static_cast<int>(isa));
    return 1;
  }
  int failures = 0;
  for (const KvType type : {KvType::kF32, KvType::kF16, KvType::kBf16, KvType::kQ8}) {
    for (const Rule& rule : {Rule{0, 0, false}, Rule{5, 0, true}, Rule{0, 37, false}}) {
      std::vector<float> q, wanted_q;
      std::vector<int> best, wanted_best;
      const auto found = run(isa, type, rule, &q, &best),
                 wanted = run(Isa::kScalar, type, rule, &wanted_q, &wanted_best);
      const double error = relative_error(found, wanted), q_error = relative_error(q, wanted_q);
      const bool good = error < kTolerance && q_error < kTolerance && best == wanted_best;
      std::printf("kv type %d, window %d: attention %.1e, norm and rope %.1e%s\n", static_cast<int>(type), rule.window,
                  error, q_error, good ? "" : "  TOO LARGE");
      failures += !good;
    }
  }
  return failures;
}
