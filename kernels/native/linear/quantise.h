// Activations to int8. A row's codes depend on that row alone: scale = max|x| / 127 over 32 or 256 values, code = x / scale
// rounded to even. A NaN or an infinity makes the scale, and with it every result of the row, NaN.
#pragma once

namespace lamina::LAMINA_LINEAR_NS {

struct BlockCodes {
  float scale;
  float inverse;
};

// Below this magnitude the inverse would overflow: such blocks count as zero.
constexpr float kTiniest = 1e-35F;

template <int kCount>
LAMINA_INLINE BlockCodes measure_block(const float* x) {
  I32x16 largest = zero_i32();
  LAMINA_UNROLL
  for (int i = 0; i < kCount; i += 16) largest = max_magnitude(largest, load_f32(x + i));
  const int32_t word = reduce_max(largest);
  float magnitude;
  __builtin_memcpy(&magnitude, &word, 4);
  if (magnitude < kTiniest) return {0.0F, 0.0F};
  return {magnitude / 127.0F, 127.0F / magnitude};
}

// 16 codes at a time, with their sum.
LAMINA_INLINE int32_t quantise16(const float* x, float inverse, int8_t* codes) {
  const I32x16 rounded = round_i32(mul(load_f32(x), set_f32(inverse)));
  store_i8(codes, rounded);
  return reduce_add(rounded);
}

template <class Value>
LAMINA_INLINE void put(uint8_t* p, Value value) {
  __builtin_memcpy(p, &value, sizeof value);
}

// Spread the codes of one column over [groups][num_cols][4], or copy them to [num_cols][256].
LAMINA_INLINE void scatter_codes(const int8_t* codes, int count, int num_cols, int col, uint8_t* out) {
  if (kUsesTiles || num_cols == 1) {
    __builtin_memcpy(out + col * kSuperCols, codes, count);
    return;
  }
  for (int g = 0; g < count / 4; ++g) __builtin_memcpy(out + (g * num_cols + col) * 4, codes + 4 * g, 4);
}

// One superblock of one column with a scale per 32 values; `out` is the superblock of the column group.
static inline void quantise_block32(const float* x, int num_subs, int num_cols, int col, const ActivationNeeds& needs,
                                    uint8_t* out) {
  alignas(64) int8_t codes[kSuperCols];
  for (int sub = 0; sub < num_subs; ++sub) {
    const float* values = x + sub * kSubCols;
    const BlockCodes block = measure_block<kSubCols>(values);
    int8_t* at = codes + sub * kSubCols;
    const int32_t sum = quantise16(values, block.inverse, at) + quantise16(values + 16, block.inverse, at + 16);
    uint8_t* entry = out + (sub * num_cols + col) * 4;
    put(entry + block32::kScales * num_cols, block.scale);
    if (needs.block_sums) put(entry + block32::kSums * num_cols, block.scale * static_cast<float>(sum));
    if (needs.init8) put(entry + block32::kInit8 * num_cols, -8 * sum);
    if (needs.init16) put(entry + block32::kInit16 * num_cols, -16 * sum);
    if (needs.init128) put(entry + block32::kInit128 * num_cols, -128 * sum);
  }
  scatter_codes(codes, num_subs * kSubCols, num_cols, col, out);
}

// Entries of 4 bytes: pairs of int16 sums.
LAMINA_INLINE void put_pairs(uint8_t* plane, const int32_t* sums, int num_pairs, int num_cols, int col) {
  for (int i = 0; i < num_pairs; ++i) {
    const int16_t pair[2] = {static_cast<int16_t>(sums[2 * i]), static_cast<int16_t>(sums[2 * i + 1])};
    __builtin_memcpy(plane + (i * num_cols + col) * 4, pair, 4);
  }
}
LAMINA_INLINE void put_scaled(uint8_t* plane, const int32_t* sums, int count, int factor, int num_cols, int col) {
  for (int i = 0; i < count; ++i) put(plane + (i * num_cols + col) * 4, factor * sums[i]);
}

// Per 16 codes what centres unsigned codes by 32 while products are still summed in 16 bits. Codes 4g and 4g + 1 of all
// groups are summed in one lane, 4g + 2 and 4g + 3 in the other: at most 32 x 8 x 127 = 32512 each.
LAMINA_INLINE void put_lanes32(uint8_t* plane, const int8_t* codes, int num_cols, int col) {
  for (int i = 0; i < kSuperCols / 16; ++i, codes += 16) {
    int lanes[2] = {};
    for (int k = 0; k < 16; ++k) lanes[k / 2 % 2] += codes[k];
    const int16_t pair[2] = {static_cast<int16_t>(-32 * lanes[0]), static_cast<int16_t>(-32 * lanes[1])};
    __builtin_memcpy(plane + (i * num_cols + col) * 4, pair, 4);
  }
}

// One superblock of one column with one scale.
static inline void quantise_super(const float* x, int num_cols, int col, const ActivationNeeds& needs, uint8_t* out) {
  alignas(64) int8_t codes[kSuperCols];
  int32_t sums16[kSuperCols / 16];
  int32_t sums32[kSubsPerSuper];
  const BlockCodes block = measure_block<kSuperCols>(x);
  for (int i = 0; i < kSuperCols / 16; ++i) sums16[i] = quantise16(x + 16 * i, block.inverse, codes + 16 * i);
  int32_t total = 0;
  for (int i = 0; i < kSubsPerSuper; ++i) {
    sums32[i] = sums16[2 * i] + sums16[2 * i + 1];
    total += sums32[i];
  }
  const int n = num_cols;
  scatter_codes(codes, kSuperCols, n, col, out);
  put(out + super256::kScale * n + col * 4, block.scale);
  if (needs.pairs32) put_pairs(out + super256::kPairs32 * n, sums32, 4, n, col);
  if (needs.pairs16) put_pairs(out + super256::kPairs16 * n, sums16, 8, n, col);
  if (needs.init4) put_scaled(out + super256::kInit4 * n, sums16, 16, -4, n, col);
  if (needs.init32 && kIntegerScales) put_lanes32(out + super256::kInit32 * n, codes, n, col);
  if (needs.init32 && !kIntegerScales) put_scaled(out + super256::kInit32 * n, sums16, 16, -32, n, col);
  if (needs.init128_super) put_scaled(out + super256::kInit128 * n, sums32, 8, -128, n, col);
  if (needs.init128_total) put(out + super256::kInit128Total * n + col * 4, -128 * total);
}

}  // namespace lamina::LAMINA_LINEAR_NS
