// AMX beyond AVX-512: whether the system lets this process use tile registers, and whether they work. Compiled for any
// x86-64, since it is asked on any.
#if LAMINA_HAVE_AMX
#include <cpuid.h>

#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lamina::isa_amx {

namespace {

constexpr unsigned kTileBit = 1U << 24, kInt8Bit = 1U << 25;  // of EDX in CPUID leaf 7
constexpr unsigned long kRequestPermission = 0x1023;          // ARCH_REQ_XCOMP_PERM
constexpr unsigned long kTileData = 18;                       // XFEATURE_XTILEDATA

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t num_rows[16];
};

}  // namespace

// Asks for the process's threads; it stays granted. Linux gives no process tile registers unasked.
bool is_granted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTileBit) == 0 || (d & kInt8Bit) == 0) return false;
#if defined(__linux__) && defined(SYS_arch_prctl)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// One product of 16 x 64 by 64 x 16.
bool probe() {
  alignas(64) int8_t act[16][64], codes[16][64];
  alignas(64) int32_t sums[16][16];
  std::memset(act, 3, sizeof act);
  std::memset(codes, -2, sizeof codes);
  TileConfig config{};
  config.palette = 1;
  for (int tile = 0; tile < 3; ++tile) config.row_bytes[tile] = 64, config.num_rows[tile] = 16;
  const int64_t stride = 64;
  asm volatile(
      "ldtilecfg %[config]\n\t"
      "tileloadd (%[act],%[stride],1), %%tmm1\n\t"
      "tileloadd (%[codes],%[stride],1), %%tmm2\n\t"
      "tilezero %%tmm0\n\t"
      "tdpbssd %%tmm2, %%tmm1, %%tmm0\n\t"
      "tilestored %%tmm0, (%[sums],%[stride],1)\n\t"
      "tilerelease"
      :
      : [config] "m"(config), [act] "r"(act), [codes] "r"(codes), [sums] "r"(sums), [stride] "r"(stride)
      : "memory");
  for (const auto& row : sums) {
    for (const int32_t sum : row) {
      if (sum != 64 * 3 * -2) return false;
    }
  }
  return true;
}

}  // namespace lamina::isa_amx
#endif
