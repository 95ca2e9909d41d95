// The ops compiled for one instruction set: AVX2, FMA, F16C.
#define LAMINA_NS isa_avx2
#include "simd_avx2.h"

#include "experts.h"
#include "half.h"
#include "kv_layout.h"
#include "select.h"
#include "worker.h"

namespace lamina::LAMINA_NS {

// 16 registers of half a V.
constexpr int at_a_time(int queries) { return queries == 1 ? 4 : queries == 2 ? 2 : 1; }

#include "elementary.inc"
#include "ops.inc"
#include "sample.inc"
#include "experts.inc"
#include "kv_write.inc"
#include "attention_kernels.inc"
#include "attention_chunk.inc"
#include "attention.inc"
#include "probe.inc"

extern const OpTable kTable;
const OpTable kTable{probe, rms_norm, rope, kv_write, attention, add, softcap, argmax, sample, route, experts};

}  // namespace lamina::LAMINA_NS
