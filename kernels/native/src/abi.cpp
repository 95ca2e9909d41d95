// The C ABI. Mirrored in lamina/kernels/cpu/library.py; a change here needs a new kAbiVersion.
#include <cstdint>
#include <exception>

#include "experts.h"
#include "isa.h"
#include "kv_layout.h"
#include "select.h"
#include "team.h"

#define LAMINA_API extern "C" __attribute__((visibility("default")))

using namespace lamina;

LAMINA_API uint32_t lamina_abi_version() { return kAbiVersion; }
LAMINA_API size_t lamina_op_desc_bytes() { return sizeof(OpDesc); }
LAMINA_API int lamina_isa_works(int isa) { return isa_works(static_cast<Isa>(isa)); }

LAMINA_API void* lamina_allocate(size_t num_bytes) { return allocate(num_bytes); }
LAMINA_API void lamina_release(void* memory, size_t num_bytes) { release(memory, num_bytes); }

LAMINA_API Team* lamina_team_create(int isa, int num_threads, int pin) {
  try {
    return new Team(static_cast<Isa>(isa), num_threads, pin != 0);
  } catch (const std::exception&) {
    return nullptr;
  }
}
LAMINA_API void lamina_team_destroy(Team* team) { delete team; }
LAMINA_API int lamina_team_num_threads(Team* team) { return team->pool().num_threads(); }
LAMINA_API void lamina_team_pin_caller(Team* team) { team->pool().pin_caller(); }
LAMINA_API int lamina_team_reserve(Team* team, size_t own_bytes, size_t shared_bytes) {
  return team->reserve(own_bytes, shared_bytes);
}
LAMINA_API size_t lamina_team_scratch_bytes(Team* team) { return team->scratch_bytes(); }

LAMINA_API int lamina_replay(Team* team, const OpDesc* ops, int num_ops, int num_rows, int num_seqs, int num_logit_rows,
                             int num_threads, ReplayReport* report) {
  const StepShape shape{num_rows, num_seqs, num_logit_rows};
  return static_cast<int>(team->replay(ops, num_ops, shape, num_threads, report));
}

LAMINA_API int lamina_linear_supports(int isa, int type) { return linear_supports(static_cast<Isa>(isa), type); }
LAMINA_API size_t lamina_packed_bytes(int isa, int type, int64_t rows, int64_t cols) {
  return packed_bytes(static_cast<Isa>(isa), type, rows, cols);
}
LAMINA_API size_t lamina_linear_scratch_bytes(int isa, int max_rows, int max_cols, int max_out) {
  return linear_scratch_bytes(static_cast<Isa>(isa), max_rows, max_cols, max_out);
}
// Packs rows [row_begin, row_end); `source` is where row 0 would lie. Bounds are multiples of kPackRows, or the end.
LAMINA_API void lamina_pack(Team* team, const uint8_t* source, int64_t source_row_bytes, int64_t row_begin,
                            int64_t row_end, const PackedPart* target) {
  team->pack(source, source_row_bytes, row_begin, row_end, *target);
}
LAMINA_API void lamina_unpack_row(int isa, const PackedPart* part, int64_t row, float scale, float* out) {
  unpack_row(static_cast<Isa>(isa), *part, row, scale, out);
}

LAMINA_API size_t lamina_attention_own_bytes(int key_dim, int value_dim) {
  return attention_own_bytes(key_dim, value_dim);
}
LAMINA_API size_t lamina_attention_shared_bytes(int num_threads, int group, int value_dim, int max_blocks) {
  return attention_shared_bytes(num_threads, group, value_dim, max_blocks);
}

LAMINA_API size_t lamina_sample_own_bytes(int columns) { return sample_own_bytes(columns); }
LAMINA_API size_t lamina_experts_own_bytes(int isa, const ExpertArgs* args, int max_rows) {
  return expert_scratch(static_cast<Isa>(isa), *args, max_rows, nullptr).num_bytes;
}

LAMINA_API int lamina_kv_supports(int type, int key_dim, int value_dim) {
  return kv_supports(static_cast<KvType>(type), key_dim, value_dim);
}
LAMINA_API int64_t lamina_kv_block_bytes(int type, int num_kv_heads, int key_dim, int value_dim) {
  return kv_block_bytes(static_cast<KvType>(type), num_kv_heads, key_dim, value_dim);
}
// keys [num_tokens][kv_heads][key_dim] and values [..][value_dim] of the tokens that `blocks` hold, in order.
LAMINA_API void lamina_kv_read(const KvDesc* cache, const int32_t* blocks, int num_tokens, float* keys, float* values) {
  kv_read(*cache, blocks, num_tokens, keys, values);
}
