// On which core each thread of a team runs, and moving one off a core that it shares with another of the team. A loaded
// system leaves two spinning threads on one core for seconds, where each barrier costs a time slice.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

namespace lamina {

class Placement {
 public:
  explicit Placement(int max_threads);
  // Binds the calling thread to the index-th allowed core.
  static void pin(int index);
  // Notes where the calling thread runs; a few nanoseconds.
  void note(int thread);
  // Whether a thread of the team was last seen where this one is now. Looks at one other, a different one for each
  // `turn`.
  bool shares_core(int thread, uint32_t turn) const;
  // Moves the calling thread off its core if another thread of the team was last seen there and a core without one is
  // allowed. Its affinity is as before afterwards.
  void part_from_others(int thread);

 private:
  int max_threads_;
  std::unique_ptr<std::atomic<int32_t>[]> core_;
};

}  // namespace lamina
