// A flat C interface to the matrix code alone, for tests and timing: threads are started per call, with a plain barrier.
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "lamina/linear.h"

namespace {

class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const long round = round_;
    if (++waiting_ == count_) {
      waiting_ = 0;
      ++round_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_;
  int waiting_ = 0;
  long round_ = 0;
};

void wait_at(void* barrier) { static_cast<Barrier*>(barrier)->wait(); }

}  // namespace

#if defined(_WIN32)
#define LAMINA_TEST_EXPORT extern "C" __declspec(dllexport)
#else
#define LAMINA_TEST_EXPORT extern "C" __attribute__((visibility("default")))
#endif

LAMINA_TEST_EXPORT int64_t lamina_test_packed_bytes(int isa, int32_t type, int64_t rows, int64_t cols) {
  return static_cast<int64_t>(lamina::packed_bytes(static_cast<lamina::Isa>(isa), type, rows, cols));
}

LAMINA_TEST_EXPORT int64_t lamina_test_scratch_bytes(int isa, int32_t rows, int32_t cols, int32_t out) {
  return static_cast<int64_t>(lamina::linear_scratch_bytes(static_cast<lamina::Isa>(isa), rows, cols, out));
}

LAMINA_TEST_EXPORT void lamina_test_pack(int isa, const uint8_t* source, int64_t row_bytes, int64_t row_begin,
                                         int64_t row_end, int32_t type, int32_t rows, int32_t cols, uint8_t* packed) {
  lamina::pack_rows(static_cast<lamina::Isa>(isa), source, row_bytes, row_begin, row_end, {type, rows, cols, packed});
}

LAMINA_TEST_EXPORT void lamina_test_unpack_row(int isa, int32_t type, int32_t rows, int32_t cols, uint8_t* packed,
                                               int64_t row, float scale, float* out) {
  lamina::unpack_row(static_cast<lamina::Isa>(isa), {type, rows, cols, packed}, row, scale, out);
}

LAMINA_TEST_EXPORT void lamina_test_linear(int isa, int num_threads, const lamina::LinearArgs* args) {
  Barrier barrier(num_threads);
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      lamina::linear(static_cast<lamina::Isa>(isa), *args, {t, num_threads, &wait_at, &barrier});
    });
  }
  for (std::thread& thread : threads) thread.join();
}
