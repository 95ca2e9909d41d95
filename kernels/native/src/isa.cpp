#include "isa.h"

#include "worker.h"

#if defined(__unix__) || defined(__APPLE__)
#include <csetjmp>
#include <csignal>
#define LAMINA_GUARD_PROBE 1
#endif

namespace lamina {

namespace isa_scalar {
extern const OpTable kTable;
}
namespace isa_avx2 {
extern const OpTable kTable;
}
namespace isa_avx512 {
extern const OpTable kTable;
}
namespace isa_neon {
extern const OpTable kTable;
}
namespace isa_amx {
bool is_granted();
bool probe();
}

const OpTable* op_table(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return &isa_scalar::kTable;
#if LAMINA_HAVE_AVX2
    case Isa::kAvx2: return &isa_avx2::kTable;
#endif
#if LAMINA_HAVE_AVX512
    case Isa::kAvx512Vnni: return &isa_avx512::kTable;
#endif
#if LAMINA_HAVE_AMX
    case Isa::kAmx: return &isa_avx512::kTable;
#endif
#if LAMINA_HAVE_NEON
    case Isa::kNeon: return &isa_neon::kTable;
#endif
    default: return nullptr;
  }
}

namespace {

// What the processor and the system say of themselves.
bool claims(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if LAMINA_HAVE_AMX
  if (isa == Isa::kAmx && !isa_amx::is_granted()) return false;
#endif
  if (isa == Isa::kAvx512Vnni || isa == Isa::kAmx) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
  }
#endif
  (void)isa;
  return true;
}

#if LAMINA_GUARD_PROBE
sigjmp_buf escape;
void leave(int) { siglongjmp(escape, 1); }

bool run_guarded(bool (*probe)()) {
  struct sigaction guard{}, before{};
  guard.sa_handler = leave;
  if (sigaction(SIGILL, &guard, &before) != 0) return false;
  const bool works = sigsetjmp(escape, 1) == 0 && probe();
  sigaction(SIGILL, &before, nullptr);
  return works;
}
#else
bool run_guarded(bool (*probe)()) { return probe(); }
#endif

}  // namespace

bool isa_works(Isa isa) {
  const OpTable* table = op_table(isa);
  if (table == nullptr || !claims(isa) || !run_guarded(table->probe)) return false;
#if LAMINA_HAVE_AMX
  if (isa == Isa::kAmx) return run_guarded(isa_amx::probe);
#endif
  return true;
}

}  // namespace lamina
