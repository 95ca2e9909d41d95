#include "placement.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace lamina {

Placement::Placement(int max_threads) : max_threads_(max_threads), core_(new std::atomic<int32_t>[max_threads]) {
  for (int thread = 0; thread < max_threads; ++thread) core_[thread].store(-1, std::memory_order_relaxed);
}

bool Placement::shares_core(int thread, uint32_t turn) const {
  const int other = static_cast<int>(turn % static_cast<uint32_t>(max_threads_));
  const int core = core_[thread].load(std::memory_order_relaxed);
  return other != thread && core >= 0 && core_[other].load(std::memory_order_relaxed) == core;
}

#if defined(__linux__)

void Placement::pin(int index) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  const int num_cores = CPU_COUNT(&allowed);
  int to_skip = index % (num_cores > 0 ? num_cores : 1);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || to_skip-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof(one), &one);
    return;
  }
}

void Placement::note(int thread) { core_[thread].store(sched_getcpu(), std::memory_order_relaxed); }

void Placement::part_from_others(int thread) {
  note(thread);
  const int mine = core_[thread].load(std::memory_order_relaxed);
  cpu_set_t allowed, elsewhere;
  if (mine < 0 || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  elsewhere = allowed;
  bool shared = false;
  for (int other = 0; other < max_threads_; ++other) {
    const int core = core_[other].load(std::memory_order_relaxed);
    if (other == thread || core < 0 || core >= CPU_SETSIZE) continue;
    shared = shared || core == mine;
    CPU_CLR(core, &elsewhere);
  }
  if (!shared || CPU_COUNT(&elsewhere) == 0) return;
  if (sched_setaffinity(0, sizeof(elsewhere), &elsewhere) == 0) sched_setaffinity(0, sizeof(allowed), &allowed);
  note(thread);
}

#else

void Placement::pin(int) {}
void Placement::note(int) {}
void Placement::part_from_others(int) {}

#endif

}  // namespace lamina
