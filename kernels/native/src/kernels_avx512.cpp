// The ops compiled for one instruction set: AVX-512.
#define LAMINA_NS isa_avx512
#include "simd_avx512.h"

#include "experts.h"
#include "half.h"
#include "kv_layout.h"
#include "select.h"
#include "worker.h"

namespace lamina::LAMINA_NS {

constexpr int at_a_time(int) { return 4; }  // 32 registers of one V

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
