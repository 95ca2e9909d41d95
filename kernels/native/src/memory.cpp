#include <cstdlib>
#include <cstring>
#include <new>

#include "team.h"

#if defined(__linux__) || defined(__APPLE__)
#include <sys/mman.h>
#define LAMINA_MMAP 1
#endif

namespace lamina {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kAlignment = 64;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

#if LAMINA_MMAP
// Maps at a multiple of the huge page, so that every full huge page can be one.
void* map_aligned(size_t num_bytes) {
  const size_t padded = num_bytes + kHugePage;
  void* raw = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t start = round_up(address, kHugePage), end = start + num_bytes;
  if (start > address) munmap(raw, start - address);
  if (address + padded > end) munmap(reinterpret_cast<void*>(end), address + padded - end);
#if defined(MADV_HUGEPAGE)
  madvise(reinterpret_cast<void*>(start), num_bytes, MADV_HUGEPAGE);
#endif
  return reinterpret_cast<void*>(start);
}
#endif

}  // namespace

// Small pieces come from the heap; from one huge page on, memory is mapped and given back to the system when released.
void* allocate(size_t num_bytes) {
#if LAMINA_MMAP
  if (num_bytes >= kHugePage) return map_aligned(round_up(num_bytes, 4096));
#endif
  const size_t size = round_up(num_bytes > 0 ? num_bytes : 1, kAlignment);
  void* memory = ::operator new(size, std::align_val_t{kAlignment}, std::nothrow);
  if (memory != nullptr) std::memset(memory, 0, size);
  return memory;
}

void release(void* memory, size_t num_bytes) {
  if (memory == nullptr) return;
#if LAMINA_MMAP
  if (num_bytes >= kHugePage) {
    munmap(memory, round_up(num_bytes, 4096));
    return;
  }
#endif
  ::operator delete(memory, std::align_val_t{kAlignment});
}

bool Scratch::reserve(size_t num_bytes) {
  if (num_bytes <= num_bytes_) return true;
  void* memory = allocate(num_bytes);
  if (memory == nullptr) return false;
  release(memory_, num_bytes_);
  memory_ = memory;
  num_bytes_ = num_bytes;
  return true;
}

}  // namespace lamina
