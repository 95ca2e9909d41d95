// The threads of one backend with the scratch they compute in. Belongs to one compute thread.
#pragma once
#include <atomic>
#include <cstddef>
#include <memory>

#include "lamina/tape.h"
#include "pool.h"
#include "worker.h"

namespace lamina {

// 64-byte aligned zeroed memory, on huge pages where the system has them. Null if there is none.
void* allocate(size_t num_bytes);
void release(void* memory, size_t num_bytes);

class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { release(memory_, num_bytes_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  // Grows to at least num_bytes; contents are lost. False if there is no memory.
  bool reserve(size_t num_bytes);
  uint8_t* data() const { return static_cast<uint8_t*>(memory_); }
  size_t num_bytes() const { return num_bytes_; }

 private:
  void* memory_ = nullptr;
  size_t num_bytes_ = 0;
};

// What a replay is told about its waiting.
struct ReplayReport {
  int32_t num_threads;
  int32_t num_long_waits;  // waits at barriers or the end that outlasted spinning: a peer was late or not running
};

class Team {
 public:
  Team(Isa isa, int num_threads, bool pin);

  Isa isa() const { return isa_; }
  Pool& pool() { return pool_; }
  // Scratch for ops that need at most these sizes.
  bool reserve(size_t own_bytes, size_t shared_bytes);
  size_t scratch_bytes() const { return own_.num_bytes() + shared_.num_bytes(); }
  // Walks the tape with `num_threads` threads; `report` may be null.
  Status replay(const OpDesc* ops, int num_ops, const StepShape& shape, int num_threads, ReplayReport* report);
  // Packs rows [row_begin, row_end) of one matrix with all threads.
  void pack(const uint8_t* source, int64_t source_row_bytes, int64_t row_begin, int64_t row_end,
            const PackedPart& target);

 private:
  friend struct Worker;
  struct Walk;
  static void walk(void* argument, int thread, int num_threads);

  Isa isa_;
  const OpTable* table_;
  Pool pool_;
  Scratch own_, shared_;
  size_t own_stride_ = 0;
  std::unique_ptr<std::atomic<int32_t>[]> cursors_;  // one per op of the tape: items handed out so far
  int num_cursors_ = 0;
  std::atomic<int32_t> status_{0};
  std::atomic<int32_t> num_long_waits_{0};
};

}  // namespace lamina
