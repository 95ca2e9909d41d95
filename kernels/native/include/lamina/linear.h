// The boundary between the quantised matrix code (linear/) and the rest of the native library: the interpreter, the
// thread pool and the other ops see only this. All row counts are run-time values; nothing here allocates or throws.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lamina {

// Instruction sets that kernels are compiled for, each in its own translation unit with its own flags.
// kAmx is kAvx512Vnni with tile registers for products of many rows.
enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512Vnni = 2, kNeon = 3, kAmx = 4 };

// The calling thread's place in a parallel region. Every thread of the region calls the same function with the same
// arguments; work is divided by `thread` of `num_threads`, and `barrier` waits for all of them.
struct Region {
  int thread;
  int num_threads;
  void (*barrier)(void* context);
  void* context;
};

// One matrix of a stacked weight in its packed layout. `type` is the GGUF tensor type id; the layout depends on
// (isa, type) only. `data` is 64-byte aligned and holds packed_bytes(isa, type, rows, cols).
struct PackedPart {
  int32_t type;
  int32_t rows;  // out_features
  int32_t cols;  // in_features
  uint8_t* data;
};

enum class LinearMode : int { kStore = 0, kAccumulate = 1, kGateSilu = 2, kGateGeluTanh = 3, kGateSwigluClamped = 4 };

struct LinearArgs {
  const PackedPart* parts;  // stacked by rows; for the gated modes exactly two of equal shape (gate, up)
  int32_t num_parts;
  const float* bias;  // [sum of rows] or null
  const float* x;     // [num_rows, cols], row stride ldx elements
  int64_t ldx;
  float* out;  // [num_rows, sum of rows] (gated: [num_rows, rows of one part]), row stride ldo elements
  int64_t ldo;
  int32_t num_rows;
  LinearMode mode;
  uint8_t* scratch;  // 64-byte aligned, shared by the region, linear_scratch_bytes(...) for the worst case
};

// Whether (isa, type) has a kernel; types without one are packed as float32.
bool linear_supports(Isa isa, int32_t type);
size_t packed_bytes(Isa isa, int32_t type, int64_t rows, int64_t cols);
// Repack GGUF blocks `source` (row_bytes per row, as in the file) for rows [row_begin, row_end); any partition of rows
// whose bounds are multiples of kPackRows (or the end) may be packed by different threads.
constexpr int kPackRows = 16;
void pack_rows(Isa isa, const uint8_t* source, int64_t source_row_bytes, int64_t row_begin, int64_t row_end,
               const PackedPart& target);
size_t linear_scratch_bytes(Isa isa, int32_t max_rows, int32_t max_cols, int32_t max_out);
// One fixed order of accumulation for every row count, chunking and thread count: a row's result is bit-identical in any
// company. Called by every thread of the region; on return the calling thread's part is done (the caller puts a barrier
// before anything that reads `out` or uses the same scratch again; `linear` itself uses the barrier between its phases).
// `cols` is any number for float types, else a multiple of 32 (of 256 for types with blocks of 256). Quantised types round
// each row of x to int8, per 32 or 256 values; a NaN or infinity there makes the row's results non-finite.
void linear(Isa isa, const LinearArgs& args, const Region& region);
// The exact dequantised row `row` of a packed part, times `scale`: out[cols].
void unpack_row(Isa isa, const PackedPart& part, int64_t row, float scale, float* out);

}  // namespace lamina
