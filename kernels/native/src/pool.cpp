#include "pool.h"

#include <chrono>
#include <system_error>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lamina {
namespace {

constexpr uint32_t kNone = 0;       // no region yet
constexpr uint32_t kStop = 0x100;   // a region of no threads tells the team to end
constexpr int kBusyPolls = 200;     // without a pause: answers within a few ns when peers are close
constexpr int kPausedPolls = 1000;  // some 20-70 us, depending on what a pause costs here
constexpr int kYieldedPolls = 400;  // some 200 us more on a quiet machine; gives the core away on a busy one

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("isb");
#endif
}

// What std::atomic::wait and notify_all are in C++20; this library asks for C++17 only.
inline void park(const std::atomic<uint32_t>& word, uint32_t old) {
#if defined(__linux__)
  static_assert(sizeof(word) == sizeof(uint32_t), "a futex is a plain word");
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
  if (word.load() == old) std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

inline void wake_all(const std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  static_cast<void>(word);  // who is parked there polls
#endif
}

}  // namespace

Wait wait_for_change(const std::atomic<uint32_t>& word, uint32_t old, std::atomic<uint32_t>& parked,
                     const LongWait* on_long_wait) {
  for (int poll = 0; poll < kBusyPolls; ++poll) {
    if (word.load(std::memory_order_acquire) != old) return Wait::kSpun;
  }
  for (int poll = 0; poll < kPausedPolls; ++poll) {
    if (word.load(std::memory_order_acquire) != old) return Wait::kSpun;
    pause_briefly();
  }
  if (on_long_wait != nullptr) on_long_wait->placement->part_from_others(on_long_wait->thread);
  for (int poll = 0; poll < kYieldedPolls; ++poll) {
    if (word.load(std::memory_order_acquire) != old) return Wait::kYielded;
    std::this_thread::yield();
  }
  // The changer stores the word and then reads `parked`; both sequentially consistent, so one of the two sees the
  // other.
  parked.fetch_add(1);
  while (word.load() == old) park(word, old);
  parked.fetch_sub(1);
  return Wait::kParked;
}

Wait Barrier::wait(const LongWait* on_long_wait) {
  // Both are read before arriving: afterwards the others may already be in the next region.
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  const uint32_t num_threads = num_threads_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1);
    if (parked_.load() != 0) wake_all(phase_);
    return Wait::kSpun;
  }
  return wait_for_change(phase_, phase, parked_, on_long_wait);
}

Pool::Pool(int num_threads, bool pin) : placement_(num_threads), pin_(pin) {
  threads_.reserve(num_threads > 1 ? num_threads - 1 : 0);
  for (int thread = 1; thread < num_threads; ++thread) {
    try {
      threads_.emplace_back([this, thread] { work(thread); });
    } catch (const std::system_error&) {
      return;  // the caller asks num_threads() for what it got
    }
  }
}

Pool::~Pool() {
  region_.store(kStop);
  wake_all(region_);
  for (std::thread& thread : threads_) thread.join();
}

void Pool::pin_caller() {
  if (pin_) Placement::pin(0);
}

Wait Pool::run(int num_threads, Task task, void* argument) {
  if (num_threads <= 1) {
    task(argument, 0, 1);
    return Wait::kSpun;
  }
  task_ = task;
  argument_ = argument;
  barrier_.reset(num_threads);
  const uint32_t count = (region_.load(std::memory_order_relaxed) >> 8) + 1;
  region_.store(((count == 0x1000000 ? 1 : count) << 8) | static_cast<uint32_t>(num_threads));
  if (parked_.load() != 0) wake_all(region_);
  placement_.note(0);
  task(argument, 0, num_threads);
  return barrier(0);
}

// The caller stays where it is: its affinity is not ours to touch.
Wait Pool::barrier(int thread) {
  const LongWait part{&placement_, thread};
  return barrier_.wait(thread > 0 && !pin_ ? &part : nullptr);
}

void Pool::work(int thread) {
  if (pin_) Placement::pin(thread);
  uint32_t seen = kNone;
  for (;;) {
    wait_for_change(region_, seen, parked_, nullptr);
    seen = region_.load(std::memory_order_acquire);
    if (seen == kStop) return;
    const int num_threads = static_cast<int>(seen & 0xff);
    if (thread >= num_threads) continue;
    placement_.note(thread);
    if (!pin_ && placement_.shares_core(thread, seen >> 8)) placement_.part_from_others(thread);
    task_(argument_, thread, num_threads);
    barrier(thread);
  }
}

}  // namespace lamina
