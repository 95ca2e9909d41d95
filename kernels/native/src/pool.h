// A persistent team of threads: the caller is thread 0, the others wait, spinning first and then parked. A region is
// one fork and join; inside it the threads meet at barriers. Owned and entered by one thread at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "placement.h"

namespace lamina {

// What a wait cost: kSpun is the quiet case, kYielded means that a peer was probably not running.
enum class Wait : int { kSpun = 0, kYielded = 1, kParked = 2 };

// Waits until `word` differs from `old`: spins, then calls `on_long_wait` (if any), yields the core, and parks.
// `parked` counts sleepers for whoever changes the word.
struct LongWait {
  Placement* placement;
  int thread;
};
Wait wait_for_change(const std::atomic<uint32_t>& word, uint32_t old, std::atomic<uint32_t>& parked,
                     const LongWait* on_long_wait);

// A reusable barrier: the last to arrive advances the phase that the others watch.
class Barrier {
 public:
  // Only while no thread is inside.
  void reset(int num_threads) { num_threads_.store(static_cast<uint32_t>(num_threads), std::memory_order_relaxed); }
  Wait wait(const LongWait* on_long_wait);

 private:
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<uint32_t> parked_{0};
  std::atomic<uint32_t> num_threads_{1};
};

class Pool {
 public:
  using Task = void (*)(void* argument, int thread, int num_threads);

  // Starts num_threads - 1 threads, fewer if the system refuses; `pin` binds thread i to the i-th allowed core.
  Pool(int num_threads, bool pin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }
  // Runs task(argument, t, n) on n threads, 0 < n <= num_threads(), and returns when all are done, with what that wait
  // cost.
  Wait run(int num_threads, Task task, void* argument);
  // For the threads of the present region.
  Wait barrier(int thread);
  // Binds the calling thread to the first allowed core, if the pool pins.
  void pin_caller();

 private:
  void work(int thread);

  // Low 8 bits: threads that take part; the rest counts regions, so that a thread that sat one out cannot mistake it.
  alignas(64) std::atomic<uint32_t> region_{0};
  std::atomic<uint32_t> parked_{0};
  Task task_ = nullptr;
  void* argument_ = nullptr;
  Barrier barrier_;
  Placement placement_;
  bool pin_;
  std::vector<std::thread> threads_;
};

}  // namespace lamina
