// The interpreter: all threads walk the tape together and meet at a barrier where the descriptor says so.
#include <cmath>
#include <cstring>

#include "team.h"

namespace lamina {
namespace {

int32_t count_rows(const OpDesc& op, const StepShape& shape) {
  switch (op.extent) {
    case Extent::kRows: return shape.num_rows;
    case Extent::kSeqs: return shape.num_seqs;
    case Extent::kLogitRows: return shape.num_logit_rows;
    case Extent::kFixed: return op.fixed_rows;
  }
  return 0;
}

template <typename T>
T* row_of(const Matrix& matrix, int64_t row) {
  return static_cast<T*>(matrix.data) + row * matrix.stride;
}

void embed(Isa isa, const EmbedArgs& args, int num_rows, Worker& worker) {
  const Share share = share_of(worker, num_rows);
  for (int64_t row = share.begin; row < share.end; ++row) {
    int64_t token = *row_of<const int32_t>(args.tokens, row);
    if (token < 0 || token >= args.table->num_rows) {
      worker.fail(Status::kBadToken);
      continue;
    }
    const PackedPart* part = args.table->parts;
    for (; token >= part->rows; ++part) token -= part->rows;
    unpack_row(isa, *part, token, args.scale, row_of<float>(args.out, row));
  }
}

void run_linear(Isa isa, const LinearOpArgs& args, int num_rows, Worker& worker) {
  LinearArgs call{};
  call.parts = args.weight->parts;
  call.num_parts = args.weight->num_parts;
  call.bias = args.weight->bias;
  call.x = static_cast<const float*>(args.x.data);
  call.ldx = args.x.stride;
  call.out = static_cast<float*>(args.out.data);
  call.ldo = args.out.stride;
  call.num_rows = num_rows;
  call.mode = args.mode;
  call.scratch = worker.shared_scratch;
  const auto barrier = [](void* context) { static_cast<Worker*>(context)->barrier(); };
  linear(isa, call, Region{worker.thread, worker.num_threads, barrier, &worker});
}

// The angle is the float32 product that models are trained with; it is reduced in double precision, since float would
// lose half the digits at position 100,000.
void rope_table(const RopeTableArgs& args, int num_rows, Worker& worker) {
  const Share share = share_of(worker, static_cast<int64_t>(num_rows) * args.pairs);
  for (int64_t item = share.begin; item < share.end; ++item) {
    const int64_t row = item / args.pairs, pair = item % args.pairs;
    const float angle = static_cast<float>(*row_of<const int32_t>(args.positions, row)) * args.inv_freq[pair];
    float* cosine = args.table + row * 2 * args.pairs + pair;
    cosine[0] = static_cast<float>(std::cos(static_cast<double>(angle)) * args.magnitude);
    cosine[args.pairs] = static_cast<float>(std::sin(static_cast<double>(angle)) * args.magnitude);
  }
}

void gather_rows(const GatherRowsArgs& args, int num_rows, Worker& worker) {
  const Share share = share_of(worker, num_rows);
  for (int64_t row = share.begin; row < share.end; ++row) {
    const int32_t from = *row_of<const int32_t>(args.indices, row);
    if (from < 0 || from >= args.x.num_rows) {
      worker.fail(Status::kBadIndex);
      continue;
    }
    std::memcpy(row_of<float>(args.out, row), row_of<const float>(args.x, from), args.out.columns * sizeof(float));
  }
}

// Every thread checks the same values, so all of them enter the op or none.
bool admits_attention(const AttentionArgs& args, const StepShape& shape, Worker& worker) {
  const auto* starts = static_cast<const int32_t*>(args.row_starts.data);
  bool ascending = shape.num_seqs < args.row_starts.num_rows && starts[0] >= 0;
  for (int seq = 0; ascending && seq < shape.num_seqs; ++seq) ascending = starts[seq] <= starts[seq + 1];
  if (!ascending || starts[shape.num_seqs] > shape.num_rows || shape.num_seqs > args.block_table.num_rows) {
    worker.fail(Status::kBadRowStarts);
    return false;
  }
  const int64_t limit = static_cast<int64_t>(args.block_table.columns) * kBlockTokens;
  for (int row = starts[0]; row < starts[shape.num_seqs]; ++row) {
    const int32_t position = *row_of<const int32_t>(args.positions, row);
    if (position < 0 || position >= limit) {
      worker.fail(Status::kBadBlock);
      return false;
    }
  }
  return true;
}

void run_op(const OpDesc& op, const StepShape& shape, Isa isa, const OpTable& table, Worker& worker) {
  const int num_rows = count_rows(op, shape);
  if (num_rows <= 0) return;
  switch (op.kind) {
    case OpKind::kEmbed: return embed(isa, op.embed, num_rows, worker);
    case OpKind::kRmsNorm: return table.rms_norm(op.rms_norm, num_rows, worker);
    case OpKind::kLinear: return run_linear(isa, op.linear, num_rows, worker);
    case OpKind::kRopeTable: return rope_table(op.rope_table, num_rows, worker);
    case OpKind::kRope: return table.rope(op.rope, num_rows, worker);
    case OpKind::kKvWrite: return table.kv_write(op.kv_write, num_rows, worker);
    case OpKind::kAttention:
      if (shape.num_seqs > 0 && admits_attention(op.attention, shape, worker)) {
        table.attention(op.attention, num_rows, shape.num_seqs, worker);
      }
      return;
    case OpKind::kAdd: return table.add(op.add, num_rows, worker);
    case OpKind::kSoftcap: return table.softcap(op.softcap, num_rows, worker);
    case OpKind::kGatherRows: return gather_rows(op.gather_rows, num_rows, worker);
    case OpKind::kArgmax: return table.argmax(op.argmax, num_rows, worker);
    case OpKind::kSample: return table.sample(op.sample, num_rows, worker);
    case OpKind::kRoute: return table.route(op.route, num_rows, worker);
    case OpKind::kExperts: return table.experts(isa, op.experts, num_rows, worker);
  }
}

}  // namespace

struct Team::Walk {
  Team* team;
  const OpDesc* ops;
  int num_ops;
  StepShape shape;
};

void Worker::barrier() {
  if (num_threads == 1) return;
  if (team->pool_.barrier(thread) != Wait::kSpun) team->num_long_waits_.fetch_add(1, std::memory_order_relaxed);
}

int Worker::next_item() { return team->cursors_[op].fetch_add(1, std::memory_order_relaxed); }

void Worker::fail(Status status) {
  int32_t expected = static_cast<int32_t>(Status::kOk);
  team->status_.compare_exchange_strong(expected, static_cast<int32_t>(status));
}

Team::Team(Isa isa, int num_threads, bool pin) : isa_(isa), table_(op_table(isa)), pool_(num_threads, pin) {}

bool Team::reserve(size_t own_bytes, size_t shared_bytes) {
  const size_t stride = (own_bytes + 4095) / 4096 * 4096;
  if (stride > own_stride_) {
    if (!own_.reserve(stride * pool_.num_threads())) return false;
    own_stride_ = stride;
  }
  return shared_.reserve(shared_bytes);
}

void Team::walk(void* argument, int thread, int num_threads) {
  const Walk& walk = *static_cast<const Walk*>(argument);
  Team& team = *walk.team;
  Worker worker{thread, num_threads, 0, &team, team.own_.data() + thread * team.own_stride_, team.shared_.data()};
  for (int i = 0; i < walk.num_ops; ++i) {
    if (walk.ops[i].barrier != 0) worker.barrier();
    worker.op = i;
    run_op(walk.ops[i], walk.shape, team.isa_, *team.table_, worker);
  }
}

Status Team::replay(const OpDesc* ops, int num_ops, const StepShape& shape, int num_threads, ReplayReport* report) {
  if (num_ops > num_cursors_) {
    cursors_ = std::make_unique<std::atomic<int32_t>[]>(num_ops);
    num_cursors_ = num_ops;
  }
  for (int i = 0; i < num_ops; ++i) cursors_[i].store(0, std::memory_order_relaxed);
  status_.store(static_cast<int32_t>(Status::kOk), std::memory_order_relaxed);
  num_long_waits_.store(0, std::memory_order_relaxed);
  Walk walk{this, ops, num_ops, shape};
  const int threads = num_threads < 1 ? 1 : num_threads > pool_.num_threads() ? pool_.num_threads() : num_threads;
  if (pool_.run(threads, &Team::walk, &walk) != Wait::kSpun) num_long_waits_.fetch_add(1, std::memory_order_relaxed);
  if (report != nullptr) *report = {threads, num_long_waits_.load(std::memory_order_relaxed)};
  return static_cast<Status>(status_.load(std::memory_order_relaxed));
}

void Team::pack(const uint8_t* source, int64_t source_row_bytes, int64_t row_begin, int64_t row_end,
                const PackedPart& target) {
  struct Job {
    Isa isa;
    const uint8_t* source;
    int64_t source_row_bytes, row_begin, row_end;
    const PackedPart& target;
  } job{isa_, source, source_row_bytes, row_begin, row_end, target};
  const auto task = [](void* argument, int thread, int num_threads) {
    const Job& j = *static_cast<const Job*>(argument);
    const int64_t groups = (j.row_end - j.row_begin + kPackRows - 1) / kPackRows;
    const int64_t begin = j.row_begin + groups * thread / num_threads * kPackRows;
    const int64_t end = j.row_begin + groups * (thread + 1) / num_threads * kPackRows;
    const int64_t last = end < j.row_end ? end : j.row_end;
    if (begin < last) pack_rows(j.isa, j.source, j.source_row_bytes, begin, last, j.target);
  };
  pool_.run(pool_.num_threads(), task, &job);
}

}  // namespace lamina
