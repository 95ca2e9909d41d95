// Compares one instruction set's matrix kernels with the portable ones, bit for bit: every type, odd shapes, few and many
// rows. For machines that Python tests do not reach (an emulator of another architecture). Prints the mismatches; exits
// with their number.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "lamina/linear.h"

namespace {

using lamina::Isa;

struct Type {
  int id, block_values, block_bytes, scale_at;
};
constexpr Type kTypes[] = {{0, 1, 4, -1},     {1, 1, 2, -1},     {30, 1, 2, -1},    {2, 32, 18, 0},
                           {3, 32, 20, 0},    {6, 32, 22, 0},    {7, 32, 24, 0},    {8, 32, 34, 0},
                           {20, 32, 18, 0},   {39, 32, 17, -2},  {10, 256, 84, 80}, {11, 256, 110, 108},
                           {12, 256, 144, 0}, {13, 256, 176, 0}, {14, 256, 210, 208}, {23, 256, 136, 0}};

std::vector<uint8_t> random_blocks(const Type& t, int rows, int cols, std::mt19937& rng) {
  std::vector<uint8_t> bytes(static_cast<size_t>(rows) * cols / t.block_values * t.block_bytes);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
  for (size_t at = 0; at < bytes.size(); at += t.block_bytes) {
    // Exponents near 1 keep every float finite; codes stay random.
    if (t.scale_at == -1) bytes[at + t.block_bytes - 1] = t.block_bytes == 4 || t.id == 30 ? 0x3E : 0x34;
    if (t.scale_at == -2) bytes[at] = static_cast<uint8_t>(118 + rng() % 8);
    if (t.scale_at >= 0) bytes[at + t.scale_at + 1] = 0x28 + rng() % 4;
    const bool has_min = t.id == 3 || t.id == 7 || t.id == 10 || t.id == 12 || t.id == 13;
    if (has_min) bytes[at + t.scale_at + 3] = 0x30 + rng() % 4;
  }
  return bytes;
}

struct Aligned {
  explicit Aligned(size_t bytes) : data(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64))) {
    std::memset(data, 0, (bytes + 127) / 64 * 64);
  }
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  uint8_t* data;
};

std::vector<float> multiply(Isa isa, const Type& t, const std::vector<uint8_t>& blocks, int rows, int cols,
                            const std::vector<float>& x, int num_rows, bool gated) {
  Aligned packed(lamina::packed_bytes(isa, t.id, rows, cols));
  Aligned scratch(lamina::linear_scratch_bytes(isa, num_rows, cols, rows));
  const lamina::PackedPart part{t.id, rows, cols, packed.data};
  lamina::pack_rows(isa, blocks.data(), static_cast<int64_t>(blocks.size()) / rows, 0, rows, part);
  const lamina::PackedPart parts[2] = {part, part};
  std::vector<float> out(static_cast<size_t>(num_rows) * rows + cols);
  const auto mode = gated ? lamina::LinearMode::kGateSilu : lamina::LinearMode::kStore;
  lamina::linear(isa, {parts, gated ? 2 : 1, nullptr, x.data(), cols, out.data(), rows, num_rows, mode, scratch.data},
                 {0, 1, [](void*) {}, nullptr});
  if (num_rows == 1) lamina::unpack_row(isa, part, rows - 1, 0.5F, out.data() + num_rows * rows);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  const Isa isa = static_cast<Isa>(argc > 1 ? std::atoi(argv[1]) : 0);
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  int bad = 0;
  for (const Type& t : kTypes) {
    for (int cols : {256, t.block_values == 256 ? 512 : 608}) {
      const int rows = 37;
      const auto blocks = random_blocks(t, rows, cols, rng);
      for (int num_rows : {1, 3, 4, 5, 7, 13}) {
        std::vector<float> x(static_cast<size_t>(num_rows) * cols);
        for (float& v : x) v = normal(rng);
        for (bool gated : {false, true}) {
          const auto want = multiply(Isa::kScalar, t, blocks, rows, cols, x, num_rows, gated);
          const auto got = multiply(isa, t, blocks, rows, cols, x, num_rows, gated);
          if (std::memcmp(want.data(), got.data(), want.size() * sizeof(float)) == 0) continue;
          std::printf("type %d, %d columns, %d rows%s: differs\n", t.id, cols, num_rows, gated ? ", gated" : "");
          ++bad;
        }
      }
    }
  }
  std::printf("%d mismatches\n", bad);
  return bad != 0;
}
