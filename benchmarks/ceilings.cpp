// What this machine can do at most: reading memory, and int8 multiply-adds in registers. Compiled for the very machine.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif
#if defined(__AVX512VNNI__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
using Vector = std::int64_t __attribute__((vector_size(64)));

double seconds(Clock::time_point since) { return std::chrono::duration<double>(Clock::now() - since).count(); }

// Runs `work(thread)` on so many threads at once; the time of the slowest, from a common start.
template <typename Work>
double run_together(int num_threads, Work work) {
  std::barrier gate(num_threads);
  std::vector<double> times(num_threads);
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t)
    threads.emplace_back([&, t] {
      gate.arrive_and_wait();
      const auto start = Clock::now();
      work(t);
      times[t] = seconds(start);
    });
  for (auto& thread : threads) thread.join();
  return *std::max_element(times.begin(), times.end());
}

std::int64_t read_all(const Vector* values, std::size_t count) {
  Vector a{}, b{}, c{}, d{};
  for (std::size_t i = 0; i + 4 <= count; i += 4) {
    __builtin_prefetch(values + i + 36, 0, 3);
    __builtin_prefetch(values + i + 37, 0, 3);
    __builtin_prefetch(values + i + 38, 0, 3);
    __builtin_prefetch(values + i + 39, 0, 3);
    a += values[i], b += values[i + 1], c += values[i + 2], d += values[i + 3];
  }
  a += b + c + d;
  return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}

volatile std::int64_t sink;

}  // namespace

// GB/s of the best of `num_runs` passes over `num_bytes`, split over the threads.
extern "C" double ceiling_read_gbps(std::size_t num_bytes, int num_threads, int num_runs) {
  constexpr std::size_t kHuge = std::size_t{1} << 21;
  const std::size_t part = num_bytes / num_threads / kHuge * kHuge;
  auto* memory = static_cast<char*>(std::aligned_alloc(kHuge, part * num_threads));
  if (memory == nullptr) return 0.0;
#ifdef __linux__
  madvise(memory, part * num_threads, MADV_HUGEPAGE);
#endif
  std::fill(memory, memory + part * num_threads, char{1});
  double best = 1e30;
  for (int run = 0; run < num_runs; ++run)
    best = std::min(best, run_together(num_threads, [&](int t) {
      sink = sink + read_all(reinterpret_cast<const Vector*>(memory + t * part), part / sizeof(Vector));
    }));
  std::free(memory);
  return static_cast<double>(part) * num_threads / best / 1e9;
}

// 1e9 multiply-adds of int8 per second, in registers only; 0 where the machine has neither AVX-512 VNNI nor AVX2. With
// AVX2 it is what codes of 4 bits allow: eight vpmaddubsw are added in 16 bits before vpmaddwd widens their sum. Wider
// codes must be widened more often.
extern "C" double ceiling_int8_gmacs(int num_threads, int num_runs) {
#if defined(__AVX512VNNI__)
  constexpr int kChains = 16, kSteps = 2'000'000;
  double best = 1e30;
  for (int run = 0; run < num_runs; ++run)
    best = std::min(best, run_together(num_threads, [](int) {
      __m512i sums[kChains];
      for (auto& sum : sums) sum = _mm512_setzero_si512();
      __m512i x = _mm512_set1_epi8(3), w = _mm512_set1_epi8(5);
      for (int step = 0; step < kSteps; ++step) {
        asm volatile("" : "+v"(x), "+v"(w));  // the products must not be hoisted
#pragma GCC unroll 16
        for (auto& sum : sums) sum = _mm512_dpbusd_epi32(sum, x, w);
      }
      __m512i total = sums[0];
      for (int i = 1; i < kChains; ++i) total = _mm512_add_epi32(total, sums[i]);
      sink = sink + _mm512_reduce_add_epi32(total);
    }));
  return 64.0 * kChains * kSteps * num_threads / best / 1e9;
#elif defined(__AVX2__)
  constexpr int kChains = 6, kProducts = 8, kSteps = 100'000;
  double best = 1e30;
  for (int run = 0; run < num_runs; ++run)
    best = std::min(best, run_together(num_threads, [](int) {
      const __m256i x = _mm256_set1_epi8(3), w = _mm256_set1_epi8(5), one = _mm256_set1_epi16(1);
      __m256i sums[kChains], narrow[kChains];
      for (auto& sum : sums) sum = _mm256_setzero_si256();
      for (int step = 0; step < kSteps; ++step) {
        for (auto& sum : narrow) sum = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int i = 0; i < kProducts; ++i) {
#pragma GCC unroll 6
          for (int c = 0; c < kChains; ++c) {
            __m256i product;
            asm volatile("vpmaddubsw %2, %3, %1\n\tvpaddw %1, %0, %0"
                         : "+x"(narrow[c]), "=&x"(product)
                         : "x"(x), "x"(w));
          }
        }
#pragma GCC unroll 6
        for (int c = 0; c < kChains; ++c) sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(narrow[c], one));
      }
      for (int c = 1; c < kChains; ++c) sums[0] = _mm256_add_epi32(sums[0], sums[c]);
      sink = sink + _mm256_extract_epi32(sums[0], 0);
    }));
  return 32.0 * kProducts * kChains * kSteps * num_threads / best / 1e9;
#else
  (void)num_threads, (void)num_runs;
  return 0.0;
#endif
}
