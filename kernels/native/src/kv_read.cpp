// The cache back as float32, for tests and migration, and the sizes of attention's scratch.
#include "half.h"
#include "kv_layout.h"
#include "worker.h"

namespace lamina {
namespace {

float element(const KvDesc& cache, const uint8_t* base, int64_t index) {
  switch (cache.type) {
    case KvType::kF32: return reinterpret_cast<const float*>(base)[index];
    case KvType::kF16: return half_to_float(reinterpret_cast<const uint16_t*>(base)[index]);
    case KvType::kBf16: return bf16_to_float(reinterpret_cast<const uint16_t*>(base)[index]);
    case KvType::kQ8: return static_cast<float>(reinterpret_cast<const int8_t*>(base)[index]);
  }
  return 0.0f;
}

float scale(const KvDesc& cache, const uint8_t* scales, int64_t index) {
  return cache.type == KvType::kQ8 ? half_to_float(reinterpret_cast<const uint16_t*>(scales)[index]) : 1.0f;
}

}  // namespace

void kv_read(const KvDesc& cache, const int32_t* blocks, int num_tokens, float* keys, float* values) {
  const KvLayout layout = kv_layout(cache.type, cache.key_dim, cache.value_dim);
  for (int token = 0; token < num_tokens; ++token) {
    const int t = token % kBlockTokens;
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      const uint8_t* page =
          cache.data + (blocks[token / kBlockTokens] * int64_t{cache.num_kv_heads} + head) * layout.head_bytes;
      const uint8_t *key_scales = page + layout.key_scale_offset, *value_scales = page + layout.value_scale_offset;
      for (int d = 0; d < cache.key_dim; ++d) {
        *keys++ =
            element(cache, page, d * kBlockTokens + t) * scale(cache, key_scales, d / kQ8Group * kBlockTokens + t);
      }
      for (int d = 0; d < cache.value_dim; ++d) {
        *values++ = element(cache, page + layout.value_offset, t * layout.value_stride + d) *
                    scale(cache, value_scales, t * (cache.value_dim / kQ8Group) + d / kQ8Group);
      }
    }
  }
}

size_t attention_own_bytes(int key_dim, int value_dim) {
  const size_t value_stride = (value_dim + 15) / 16 * 16;
  const size_t per_query = kChunkTokens + key_dim + 2 * (2 + value_stride);
  return (kTileQueries * per_query + kChunkTokens * (key_dim + value_stride)) * sizeof(float);
}

size_t attention_shared_bytes(int num_threads, int group, int value_dim, int max_blocks) {
  const size_t value_stride = (value_dim + 15) / 16 * 16;
  const size_t num_splits = static_cast<size_t>(max_blocks) * kBlockTokens / kSplitTokens + 1;
  const size_t num_queries = group < kTileQueries ? group : kTileQueries;
  return kItemsPerThread * num_threads * num_splits * num_queries * (2 + value_stride) * sizeof(float);
}

}  // namespace lamina
