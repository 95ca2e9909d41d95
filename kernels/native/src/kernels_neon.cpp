// The ops compiled for one instruction set: ARMv8.2.
#define LAMINA_NS isa_neon
#include "simd_neon.h"

#include "experts.h"
#include "half.h"
#include "kv_layout.h"
#include "select.h"
#include "worker.h"

namespace lamina::LAMINA_NS {

constexpr int at_a_time(int) { return 1; }  // 32 registers of a quarter of a V

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
