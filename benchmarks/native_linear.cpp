// Times the native matrix kernels alone: reads of packed weights in GB/s and products in GMAC/s, per type and row count,
// beside the machine's read ceiling measured in the same run. Weights are far larger than the caches, in huge pages
// where the system gives them; every figure is the median of several passes.
//
// Build (x86-64):
//   cd kernels/native/linear
//   g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I../include -DLAMINA_HAVE_AVX2=1 -DLAMINA_HAVE_AVX512=1 -c \
//     linear.cpp pack.cpp unpack.cpp isa_scalar.cpp        (isa_avx2.cpp, isa_avx512.cpp: with the flags of CMakeLists.txt)
//   g++ -std=c++20 -O3 -I../include ../../../benchmarks/native_linear.cpp *.o -lpthread -o native_linear
// Run: native_linear [--isa N] [--threads N] [--cols K] [--mib SIZE] [--passes N] [--types A,B] [--rows 1,2,...]
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "lamina/linear.h"

namespace {

using lamina::Isa;

struct TypeRow {
  const char* name;
  int id;
  int block_values;
  int block_bytes;
  int scale_at;  // offset of an fp16 scale, -1 for none
};
constexpr TypeRow kTypes[] = {
    {"F32", 0, 1, 4, -1},       {"F16", 1, 1, 2, 0},         {"BF16", 30, 1, 2, 0},     {"Q4_0", 2, 32, 18, 0},
    {"Q4_1", 3, 32, 20, 0},     {"Q5_0", 6, 32, 22, 0},      {"Q5_1", 7, 32, 24, 0},    {"Q8_0", 8, 32, 34, 0},
    {"IQ4_NL", 20, 32, 18, 0},  {"MXFP4", 39, 32, 17, -1},   {"Q2_K", 10, 256, 84, 80}, {"Q3_K", 11, 256, 110, 108},
    {"Q4_K", 12, 256, 144, 0},  {"Q5_K", 13, 256, 176, 0},   {"Q6_K", 14, 256, 210, 208}, {"IQ4_XS", 23, 256, 136, 0},
};

Isa best_isa() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512vnni") ? Isa::kAvx512Vnni
         : __builtin_cpu_supports("avx2")     ? Isa::kAvx2
                                              : Isa::kScalar;
#else
  return Isa::kNeon;
#endif
}

struct Options {
  Isa isa = best_isa();
  int threads = 1;
  int cols = 2048;
  int64_t mib = 900;
  int passes = 5;
  std::vector<std::string> types;
  std::vector<int> rows = {1, 2, 4, 8, 16, 128, 512};
};

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Processor time of the calling thread: what a busy machine disturbs least.
double thread_cpu_s() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

uint8_t* map_bytes(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) std::perror("mmap"), std::exit(1);
  madvise(p, bytes, MADV_HUGEPAGE);
  return static_cast<uint8_t*>(p);
}

// A spinning barrier, so that what is timed is the kernels.
struct Barrier {
  int count;
  std::atomic<int> waiting{0};
  std::atomic<int> round{0};
};
void wait_at(void* context) {
  auto& barrier = *static_cast<Barrier*>(context);
  const int round = barrier.round.load();
  if (barrier.waiting.fetch_add(1) + 1 == barrier.count) {
    barrier.waiting.store(0);
    barrier.round.store(round + 1);
  } else {
    while (barrier.round.load() == round) std::this_thread::yield();
  }
}

// Seconds that `work(thread)` takes on all threads, started together; for one thread its processor time.
double time_threads(int num_threads, const std::function<void(int, Barrier&)>& work) {
  Barrier barrier{num_threads};
  const double cpu_begin = thread_cpu_s();
  if (num_threads == 1) {
    work(0, barrier);
    return thread_cpu_s() - cpu_begin;
  }
  double begin = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      wait_at(&barrier);
      if (t == 0) begin = now_s();
      work(t, barrier);
      wait_at(&barrier);
    });
  }
  for (auto& thread : threads) thread.join();
  return now_s() - begin;
}

std::atomic<uint64_t> sink;

void read_all(const uint8_t* p, size_t bytes) {
  uint64_t sums[8] = {};
  const auto* words = reinterpret_cast<const uint64_t*>(p);
  for (size_t i = 0; i < bytes / 8; i += 8) {
    __builtin_prefetch(words + i + 320);
    for (int j = 0; j < 8; ++j) sums[j] += words[i + j];
  }
  for (uint64_t s : sums) sink += s;
}

double ceiling_gb_s(const uint8_t* p, size_t bytes, int num_threads) {
  const size_t share = bytes / num_threads / 64 * 64;
  return share * num_threads / time_threads(num_threads, [&](int t, Barrier&) { read_all(p + t * share, share); }) / 1e9;
}

#if defined(__x86_64__)
// int8 products per second that one core's registers allow: what bounds many rows. Twelve chains hide the latency.
double vnni_gmac_s() {
  constexpr int64_t kRounds = 1 << 21;
  const double begin = thread_cpu_s();
  asm volatile(
      "mov %0, %%rcx\n"
      "1:\n"
      ".irp r, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11\n"
      "vpdpbusd %%zmm30, %%zmm31, %%zmm\\r\n"
      ".endr\n"
      "dec %%rcx\n"
      "jnz 1b\n"
      "vzeroupper\n" ::"r"(kRounds)
      : "rcx", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11");
  return 12.0 * 64 * kRounds / (thread_cpu_s() - begin) / 1e9;
}
#endif

// Random blocks of `rows` rows with small scales.
std::vector<uint8_t> random_source(const TypeRow& type, int rows, int cols) {
  std::mt19937_64 rng(1);
  std::vector<uint8_t> bytes(static_cast<size_t>(rows) * cols / type.block_values * type.block_bytes);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
  for (size_t at = 0; at < bytes.size(); at += type.block_bytes) {
    if (type.block_values == 1) bytes[at + type.block_bytes - 1] = 0x3C;  // of ordinary size: subnormals are slow
    else if (type.scale_at < 0) bytes[at] = 120;
    else bytes[at + type.scale_at] = 0, bytes[at + type.scale_at + 1] = 0x10;
  }
  return bytes;
}

// A matrix of about `bytes` packed bytes: random rows, repeated.
lamina::PackedPart make_matrix(const Options& o, const TypeRow& type, uint8_t* data, int64_t bytes) {
  constexpr int kUnique = 256;
  const int64_t unit = lamina::packed_bytes(o.isa, type.id, kUnique, o.cols);
  const int64_t copies = std::max<int64_t>(1, bytes / unit);
  const auto source = random_source(type, kUnique, o.cols);
  lamina::pack_rows(o.isa, source.data(), source.size() / kUnique, 0, kUnique, {type.id, kUnique, o.cols, data});
  for (int64_t i = 1; i < copies; ++i) std::memcpy(data + i * unit, data, unit);
  return {type.id, static_cast<int32_t>(copies * kUnique), o.cols, data};
}

double product_ceiling(const Options& o) {
#if defined(__x86_64__)
  if (o.isa == Isa::kAvx512Vnni) return o.threads * vnni_gmac_s();
#endif
  return 0;
}

// One layer after another, as a model has them: each of kLayerRows rows, all into the same output.
constexpr int kLayerRows = 8192;

double time_linear(const Options& o, const lamina::PackedPart& part, int num_rows, float* x, float* out,
                   uint8_t* scratch) {
  const int64_t layer_bytes = lamina::packed_bytes(o.isa, part.type, kLayerRows, part.cols);
  return time_threads(o.threads, [&](int t, Barrier& barrier) {
    for (int row = 0; row < part.rows; row += kLayerRows) {
      const int rows = std::min(kLayerRows, part.rows - row);
      const lamina::PackedPart layer{part.type, rows, part.cols, part.data + row / kLayerRows * layer_bytes};
      const lamina::LinearArgs args{&layer, 1,          nullptr,  x, o.cols, out, kLayerRows,
                                    num_rows, lamina::LinearMode::kStore, scratch};
      lamina::linear(o.isa, args, {t, o.threads, &wait_at, &barrier});
      if (o.threads > 1) wait_at(&barrier);
    }
  });
}

void report(const Options& o, const TypeRow& type, uint8_t* data, float* x, float* out, uint8_t* scratch) {
  for (int num_rows : o.rows) {
    // Many rows need fewer weights to be timed well; they still come from DRAM once per block of rows.
    const int64_t bytes = (o.mib << 20) / (num_rows <= 8 ? 1 : num_rows <= 16 ? 2 : num_rows <= 128 ? 16 : 48);
    const lamina::PackedPart part = make_matrix(o, type, data, bytes);
    const double weight_bytes = lamina::packed_bytes(o.isa, type.id, part.rows, part.cols);
    std::vector<double> ratios, seconds, ceilings, products;
    for (int pass = 0; pass < o.passes; ++pass) {
      products.push_back(product_ceiling(o));
      ceilings.push_back(ceiling_gb_s(data, o.mib << 19, o.threads));
      seconds.push_back(time_linear(o, part, num_rows, x, out, scratch));
      ratios.push_back(weight_bytes / seconds.back() / 1e9 / ceilings.back());
    }
    const double s = median(seconds);
    const double macs = static_cast<double>(part.rows) * part.cols * num_rows;
    std::printf("%-7s rows %4d  %7.2f GB/s  %5.1f %% of %5.2f  %7.1f GMAC/s, best %5.1f", type.name, num_rows,
                weight_bytes / s / 1e9, 100 * median(ratios), median(ceilings), macs / s / 1e9,
                macs / *std::min_element(seconds.begin(), seconds.end()) / 1e9);
    const double products_s = median(products);  // 0: not measured for this instruction set
    if (products_s > 0) std::printf("  %5.1f %% of %5.1f", 100 * macs / s / 1e9 / products_s, products_s);
    std::printf("\n");
    std::fflush(stdout);
  }
}

template <class Item>
std::vector<Item> split_list(const char* text) {
  std::vector<Item> items;
  std::stringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) {
    if constexpr (std::is_same_v<Item, int>) items.push_back(std::stoi(item));
    else items.push_back(item);
  }
  return items;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const char* value = argv[i + 1];
    if (name == "--isa") o.isa = static_cast<Isa>(std::atoi(value));
    else if (name == "--threads") o.threads = std::atoi(value);
    else if (name == "--cols") o.cols = std::atoi(value);
    else if (name == "--mib") o.mib = std::atoi(value);
    else if (name == "--passes") o.passes = std::atoi(value);
    else if (name == "--types") o.types = split_list<std::string>(value);
    else if (name == "--rows") o.rows = split_list<int>(value);
    else std::fprintf(stderr, "unknown option %s\n", argv[i]), std::exit(2);
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  const int max_rows = *std::max_element(o.rows.begin(), o.rows.end());
  uint8_t* data = map_bytes((o.mib << 20) + (64 << 20));
  std::memset(data, 1, (o.mib << 20) + (64 << 20));
  uint8_t* scratch = map_bytes(lamina::linear_scratch_bytes(o.isa, max_rows, o.cols, 1 << 20) + 64);
  auto* x = reinterpret_cast<float*>(map_bytes(sizeof(float) * o.cols * max_rows));
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < static_cast<int64_t>(o.cols) * max_rows; ++i) x[i] = normal(rng);
  auto* out = reinterpret_cast<float*>(map_bytes(sizeof(float) * kLayerRows * max_rows));
  for (const TypeRow& type : kTypes) {
    const bool chosen = o.types.empty() || std::find(o.types.begin(), o.types.end(), type.name) != o.types.end();
    if (chosen) report(o, type, data, x, out, scratch);
  }
}
