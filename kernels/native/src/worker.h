// What an op sees of the region it runs in. Members are defined in worker.cpp, compiled for the baseline, so that no
// inline function of the standard library is instantiated with the flags of one instruction set and linked for all.
#pragma once
#include <cstddef>
#include <cstdint>

#include "lamina/tape.h"

namespace lamina {

class Team;

struct Worker {
  int thread;
  int num_threads;
  int op;  // index in the tape
  Team* team;
  uint8_t* own_scratch;     // this thread's, 64-byte aligned
  uint8_t* shared_scratch;  // the region's

  void barrier();
  int next_item();           // 0, 1, 2, ... over all threads of this op
  void fail(Status status);  // the first failure of a step is kept
};

// The contiguous part of [0, count) that falls to a thread.
struct Share {
  int64_t begin, end;
};
static inline Share share_of(const Worker& worker, int64_t count) {
  return {count * worker.thread / worker.num_threads, count * (worker.thread + 1) / worker.num_threads};
}

// How attention cuts its work; see attention.inc.
constexpr int kChunkTokens = 128;   // softmax is rescaled once per chunk
constexpr int kTileQueries = 32;    // queries that walk the keys together
constexpr int kSplitTokens = 512;   // partial sums are merged at multiples of this
constexpr int kItemsPerThread = 4;  // below this, the context of one item is shared out

template <int n>
struct IntConstant {
  static constexpr int value = n;
};

// Scratch of one attention op: per thread, and for partial results that threads share.
size_t attention_own_bytes(int key_dim, int value_dim);
size_t attention_shared_bytes(int num_threads, int group, int value_dim, int max_blocks);

void kv_read(const KvDesc& cache, const int32_t* blocks, int num_tokens, float* keys, float* values);

// The ops that have one version per instruction set.
struct OpTable {
  bool (*probe)();
  void (*rms_norm)(const RmsNormArgs&, int num_rows, Worker&);
  void (*rope)(const RopeArgs&, int num_rows, Worker&);
  void (*kv_write)(const KvWriteArgs&, int num_rows, Worker&);
  void (*attention)(const AttentionArgs&, int num_rows, int num_seqs, Worker&);
  void (*add)(const AddArgs&, int num_rows, Worker&);
  void (*softcap)(const SoftcapArgs&, int num_rows, Worker&);
  void (*argmax)(const ArgmaxArgs&, int num_rows, Worker&);
  void (*sample)(const SampleArgs&, int num_rows, Worker&);
  void (*route)(const RouteArgs&, int num_rows, Worker&);
  void (*experts)(Isa, const ExpertArgs&, int num_rows, Worker&);
};

// The table of an instruction set, or null if this build lacks it.
const OpTable* op_table(Isa isa);

}  // namespace lamina
