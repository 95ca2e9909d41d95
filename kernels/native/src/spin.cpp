// Waiting without sleeping, for whoever has something else to do in a microsecond. Mirrored in lamina/kernels/spin.py,
// which does without where this is not there.
#if !defined(_WIN32)
#include <poll.h>
#include <sched.h>

#include <cstdint>
#include <ctime>

namespace {

constexpr int kMaxWatched = 16;

enum Woken { kTime = 0, kBell = 1, kEvent = 2, kSocket = 3 };

struct EventProbe {
  int (*query)(void*);
  void* event;
  int64_t pending;  // what `query` says of an event that is not done
};

struct Watch {
  uint64_t bell;  // written by any thread
  int64_t num_events;
  int64_t num_sockets;
  EventProbe events[kMaxWatched];
  int32_t sockets[kMaxWatched];
};

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

}  // namespace

// Until the bell is not `seen`, an event is done or has failed, or a socket has something to be read or has ended; for
// `for_ns` at most. Anybody else who could run on this core does, in between.
extern "C" __attribute__((visibility("default"))) int lamina_spin(const Watch* watch, uint64_t seen, int64_t for_ns) {
  pollfd sockets[kMaxWatched];
  const int64_t num_sockets = watch->num_sockets;
  for (int64_t i = 0; i < num_sockets; ++i) sockets[i] = {watch->sockets[i], POLLIN, 0};
  const int64_t end_ns = now_ns() + for_ns;
  do {
    if (__atomic_load_n(&watch->bell, __ATOMIC_ACQUIRE) != seen) return kBell;
    for (int64_t i = 0; i < watch->num_events; ++i) {
      const EventProbe& probe = watch->events[i];
      if (probe.query(probe.event) != probe.pending) return kEvent;
    }
    if (num_sockets && poll(sockets, num_sockets, 0) > 0) return kSocket;
    sched_yield();
  } while (now_ns() < end_ns);
  return kTime;
}
#endif
