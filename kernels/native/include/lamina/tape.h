// What crosses the C ABI: plain descriptors of buffers, weights, caches and ops, mirrored field by field in
// lamina/kernels/cpu/descriptors.py. Python fills an array of OpDesc once; lamina_replay walks it.
#pragma once
#include <cstdint>

#include "lamina/linear.h"

namespace lamina {

constexpr uint32_t kAbiVersion = 3;
constexpr int kBlockTokens = 16;

// A row-major matrix; `data` already includes the column offset of a view, `stride` is in elements.
struct Matrix {
  void* data;
  int64_t stride;
  int32_t columns;
  int32_t num_rows;  // capacity
};

struct WeightDesc {
  const PackedPart* parts;
  const float* bias;  // or null
  int32_t num_parts;
  int32_t num_rows;  // of all parts
};

enum class KvType : int32_t { kF32 = 0, kF16 = 1, kBf16 = 2, kQ8 = 3 };

struct KvDesc {
  uint8_t* data;
  int64_t num_blocks;
  int32_t num_kv_heads;
  int32_t key_dim;
  int32_t value_dim;
  KvType type;
};

enum class OpKind : int32_t {
  kEmbed = 0,
  kRmsNorm,
  kLinear,
  kRopeTable,
  kRope,
  kKvWrite,
  kAttention,
  kAdd,
  kSoftcap,
  kGatherRows,
  kArgmax,
  kSample,
  kRoute,
  kExperts,
};

// What an op's row count is read from at replay.
enum class Extent : int32_t { kFixed = 0, kRows = 1, kSeqs = 2, kLogitRows = 3 };

struct EmbedArgs {
  Matrix tokens, out;
  const WeightDesc* table;
  float scale;
};

struct RmsNormArgs {
  Matrix x, out;
  const float* weight;
  int32_t group;  // columns that share one norm
  float eps;
};

struct LinearOpArgs {
  Matrix x, out;
  const WeightDesc* weight;
  LinearMode mode;
};

// table [rows][2][pairs]: cos then sin of position * inv_freq, times magnitude.
struct RopeTableArgs {
  Matrix positions;
  const float* inv_freq;
  float* table;
  int32_t pairs;
  float magnitude;
};

struct RopeArgs {
  Matrix x;
  const float* table;
  int32_t pairs;
  int32_t head_dim;
  int32_t neox;  // 1: rotates (x[i], x[i + pairs]), 0: (x[2i], x[2i + 1])
};

struct KvWriteArgs {
  Matrix k, v, slots;
  const KvDesc* cache;
};

struct AttentionArgs {
  Matrix q, out, positions, row_starts, block_table;
  const KvDesc* cache;
  const float* sinks;  // [heads] or null
  float scale;
  float softcap;
  int32_t window;
};

struct AddArgs {
  Matrix x, y, out;
};

struct SoftcapArgs {
  Matrix x;
  float cap;
};

struct GatherRowsArgs {
  Matrix x, indices, out;
};

struct ArgmaxArgs {
  Matrix x, out;
};

// params [rows][6]: temperature, top_k, top_p, min_p, top_n_sigma, uniform; out holds the argmax on entry.
struct SampleArgs {
  Matrix x, params, out;
};

struct RouteArgs {
  Matrix x, experts, shares;
  int32_t of_selected;  // softmax over the selected alone
  int32_t normalise;
  float scale;
};

// Gated modes: two parts an expert, out [rows, k * part], no shares. Others: one part an expert, x [rows, k * in].
struct ExpertArgs {
  Matrix x, experts, shares, out;
  const WeightDesc* weight;
  LinearMode mode;
};

struct OpDesc {
  OpKind kind;
  Extent extent;
  int32_t fixed_rows;
  int32_t barrier;  // 1: what ops since the last barrier wrote or read must be finished first
  union {
    EmbedArgs embed;
    RmsNormArgs rms_norm;
    LinearOpArgs linear;
    RopeTableArgs rope_table;
    RopeArgs rope;
    KvWriteArgs kv_write;
    AttentionArgs attention;
    AddArgs add;
    SoftcapArgs softcap;
    GatherRowsArgs gather_rows;
    ArgmaxArgs argmax;
    SampleArgs sample;
    RouteArgs route;
    ExpertArgs experts;
  };
};

struct StepShape {
  int32_t num_rows;
  int32_t num_seqs;
  int32_t num_logit_rows;
};

// What a replay ends with; a step that names memory it does not own is stopped, not obeyed.
enum class Status : int32_t { kOk = 0, kBadToken, kBadSlot, kBadBlock, kBadRowStarts, kBadIndex, kBadExpert };

}  // namespace lamina
