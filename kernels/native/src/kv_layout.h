// Where a token's K and V lie inside a block. Of each KV head a block holds, one after the other:
//   K  [key_dim][16 tokens]       so that 16 scores come from one broadcast of q and one load per dimension
//   V  [16 tokens][value_stride]  value_dim rounded up to 16
//   Q8 only: f16 scales of K [key_dim / 32][16 tokens], of V [16 tokens][value_dim / 32]
#pragma once
#include <cstdint>

#include "lamina/tape.h"

namespace lamina {

constexpr int kQ8Group = 32;
constexpr int kMostKvDim = 1024;

struct KvLayout {
  int64_t value_offset;
  int64_t key_scale_offset;
  int64_t value_scale_offset;
  int64_t head_bytes;
  int value_stride;
};

static inline int64_t kv_element_bytes(KvType type) { return type == KvType::kF32 ? 4 : type == KvType::kQ8 ? 1 : 2; }

static inline bool kv_supports(KvType type, int key_dim, int value_dim) {
  if (key_dim <= 0 || value_dim <= 0 || key_dim > kMostKvDim || value_dim > kMostKvDim) return false;
  return type != KvType::kQ8 || (key_dim % kQ8Group == 0 && value_dim % kQ8Group == 0);
}

static inline KvLayout kv_layout(KvType type, int key_dim, int value_dim) {
  KvLayout layout{};
  const int64_t element = kv_element_bytes(type);
  const int64_t scale = type == KvType::kQ8 ? 2 : 0;
  layout.value_stride = (value_dim + 15) / 16 * 16;
  layout.value_offset = key_dim * kBlockTokens * element;
  layout.key_scale_offset = layout.value_offset + kBlockTokens * layout.value_stride * element;
  layout.value_scale_offset = layout.key_scale_offset + key_dim / kQ8Group * kBlockTokens * scale;
  layout.head_bytes = layout.value_scale_offset + value_dim / kQ8Group * kBlockTokens * scale;
  return layout;
}

static inline int64_t kv_block_bytes(KvType type, int num_kv_heads, int key_dim, int value_dim) {
  return kv_layout(type, key_dim, value_dim).head_bytes * num_kv_heads;
}

}  // namespace lamina
