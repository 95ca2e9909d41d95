// Runs CUDA kernels on a CPU, for tests: stands in for kernels/cuda/src/intrinsics.cuh, then each kernel is plain C++.
//
// The threads of a block are fibers of one OS thread. A fiber gives way only in __syncthreads and in warp-wide operations,
// so results are the same on every run; a warp-wide operation that some lane never reaches is reported, not a hang.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct dim3 { unsigned x, y, z; };

// Switching fibers by hand where we know how: swapcontext asks the kernel twice, and takes most of the time of a test.
#if defined(__x86_64__)
typedef void* Context;
extern "C" void emulator_switch(Context* save, Context load);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
inline void switch_context(Context& from, Context& to) { emulator_switch(&from, to); }
inline void make_context(Context& context, std::vector<char>& stack, void (*entry)()) {
    auto top = reinterpret_cast<uintptr_t>(stack.data() + stack.size()) & ~uintptr_t(15);
    auto* words = reinterpret_cast<void**>(top) - 8;  // six registers, the entry, and a return address that is never used
    for (int i = 0; i < 6; i++) words[i] = nullptr;
    words[6] = reinterpret_cast<void*>(entry);
    words[7] = nullptr;
    context = words;
}
#else
#include <ucontext.h>
typedef ucontext_t Context;
inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
inline void make_context(Context& context, std::vector<char>& stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack.data();
    context.uc_stack.ss_size = stack.size();
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

namespace emulator {

constexpr int MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 64 * 1024;

struct Fiber {
    Context context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool done = false;
};

struct Warp {
    void* payload[32];
    int num_arrived = 0, generation = 0, num_alive = 0;
};

inline Fiber* fibers[MAX_THREADS];
inline Warp warps[MAX_THREADS / 32];
inline Context scheduler;
inline int current = 0, num_threads = 0, num_alive = 0, num_at_barrier = 0, barrier_generation = 0;
inline bool moved = false;
inline dim3 block_index, block_size, grid_size;
inline std::vector<u8> dynamic_shared;
inline void (*entry)(void*);
inline void* entry_argument;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "cuda emulator: %s (block %u %u %u, thread %d)\n", what, block_index.x, block_index.y, block_index.z, current);
    std::abort();
}

inline void give_way() { switch_context(fibers[current]->context, scheduler); }

inline void release_barrier_if_complete() {
    if (num_alive > 0 && num_at_barrier == num_alive) {
        num_at_barrier = 0;
        barrier_generation++;
        moved = true;
    }
}

inline void block_barrier() {
    const int generation = barrier_generation;
    num_at_barrier++;
    release_barrier_if_complete();
    while (generation == barrier_generation) give_way();
}

// All lanes of the warp bring a payload; the last to arrive runs `work` on all 32.
template <class Work>
void warp_operation(void* payload, Work work) {
    Warp& warp = warps[current / 32];
    if (warp.num_alive != 32) fail("a warp-wide operation in a warp that has lost lanes");
    const int generation = warp.generation;
    warp.payload[current % 32] = payload;
    if (++warp.num_arrived == 32) {
        work(warp.payload);
        warp.num_arrived = 0;
        warp.generation++;
        moved = true;
    } else {
        while (generation == warp.generation) give_way();
    }
}

inline void fiber_main() {
    entry(entry_argument);
    fibers[current]->done = true;
    num_alive--;
    warps[current / 32].num_alive--;
    if (warps[current / 32].num_arrived > 0) fail("a lane ended while its warp waits for it");
    moved = true;
    release_barrier_if_complete();
    give_way();
}

inline void run_block() {
    num_alive = num_threads;
    num_at_barrier = 0;
    for (int i = 0; i < num_threads; i++) {
        if (!fibers[i]) fibers[i] = new Fiber;
        Fiber& fiber = *fibers[i];
        fiber.done = false;
        make_context(fiber.context, fiber.stack, fiber_main);
        if (i % 32 == 0) warps[i / 32].num_arrived = 0;
        warps[i / 32].num_alive = 32;
    }
    while (num_alive > 0) {
        moved = false;
        for (current = 0; current < num_threads; current++)
            if (!fibers[current]->done) switch_context(scheduler, fibers[current]->context);
        if (!moved && num_alive > 0) fail("deadlock: lanes wait for each other");
    }
}

template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<Parameters>*>(arguments[I])...);
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, u32 shared_bytes, void** arguments) {
    static void (*bound)(Parameters...);
    bound = kernel;
    num_threads = static_cast<int>(block.x);
    if (num_threads % 32 != 0) fail("a block that is no whole number of warps");
    entry_argument = arguments;
    entry = [](void* given) { call(bound, static_cast<void**>(given), std::index_sequence_for<Parameters...>{}); };
    grid_size = grid;
    block_size = block;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                block_index = {x, y, z};
                dynamic_shared.assign(shared_bytes + 16, 0xff);
                run_block();
            }
}

template <class T>
T shuffle(T value, int source) {
    struct Lane { T value; int source; T result; } lane{value, source, value};
    warp_operation(&lane, [](void** all) {
        for (int i = 0; i < 32; i++) {
            Lane& to = *static_cast<Lane*>(all[i]);
            to.result = static_cast<Lane*>(all[to.source & 31])->value;
        }
    });
    return lane.result;
}

inline int byte_at(u32 word, int i) { return static_cast<i8>(word >> (8 * i)); }

struct Bytes { int* d; const u32* a; u32 b[2]; int registers; };

// D[16 x 8] += A[16 x 16 n] B for n = registers halves of 16 columns
inline void mma_bytes(Bytes mine) {
    warp_operation(&mine, [](void** all) {
        auto lane = [&](int i) -> Bytes& { return *static_cast<Bytes*>(all[i]); };
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < 8; column++) {
                int sum = 0;
                for (int half = 0; half < lane(0).registers; half++)
                    for (int t = 0; t < 4; t++)
                        for (int j = 0; j < 4; j++)
                            sum += byte_at(lane(row % 8 * 4 + t).a[2 * half + row / 8], j) *
                                   byte_at(lane(column * 4 + t).b[half], j);
                lane(row % 8 * 4 + column / 2).d[row / 8 * 2 + column % 2] += sum;
            }
    });
}

struct Halves { float* d; const u32* a; u32 b[2]; float (*widen)(u32); };

inline void mma_16bit(Halves mine) {
    warp_operation(&mine, [](void** all) {
        auto lane = [&](int i) -> Halves& { return *static_cast<Halves*>(all[i]); };
        auto widen = lane(0).widen;
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < 8; column++) {
                float sum = 0;
                for (int half = 0; half < 2; half++)
                    for (int t = 0; t < 4; t++)
                        for (int j = 0; j < 2; j++)
                            sum += widen(lane(row % 8 * 4 + t).a[2 * half + row / 8] >> (16 * j) & 0xffff) *
                                   widen(lane(column * 4 + t).b[half] >> (16 * j) & 0xffff);
                lane(row % 8 * 4 + column / 2).d[row / 8 * 2 + column % 2] += sum;
            }
    });
}

}  // namespace emulator

#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_BYTE_MMA 1
#define HAS_HALF_MMA 1
#define DEVICE inline
#define KERNEL extern "C" void
#define __shared__ static
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) \
    u8* name = reinterpret_cast<u8*>((reinterpret_cast<uintptr_t>(emulator::dynamic_shared.data()) + 15) & ~uintptr_t(15))

struct ThreadIndex { operator dim3() const { return {static_cast<unsigned>(emulator::current), 0, 0}; } };
#define threadIdx (dim3{static_cast<unsigned>(emulator::current), 0, 0})
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

using std::max;
using std::min;

inline void __syncthreads() { emulator::block_barrier(); }
inline void __threadfence() {}
inline void __syncwarp() { emulator::warp_operation(nullptr, [](void**) {}); }
template <class T> T __shfl_xor_sync(u32, T value, int mask) { return emulator::shuffle(value, (emulator::current % 32) ^ mask); }
template <class T> T __shfl_sync(u32, T value, int source) { return emulator::shuffle(value, source); }
inline int __any_sync(u32, bool value) {
    struct Lane { bool value; int result; } lane{value, 0};
    emulator::warp_operation(&lane, [](void** all) {
        int result = 0;
        for (int i = 0; i < 32; i++) result |= static_cast<Lane*>(all[i])->value;
        for (int i = 0; i < 32; i++) static_cast<Lane*>(all[i])->result = result;
    });
    return lane.result;
}
template <class T> T atomicAdd(T* at, T value) { T old = *at; *at += value; return old; }
template <class T> T atomicMax(T* at, T value) { T old = *at; *at = max(old, value); return old; }
template <class T> T atomicOr(T* at, T value) { T old = *at; *at |= value; return old; }
template <class T> T atomicExch(T* at, T value) { T old = *at; *at = value; return old; }

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __uint_as_float(u32 bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline u32 __float_as_uint(float value) { u32 bits; std::memcpy(&bits, &value, 4); return bits; }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1.f / std::sqrt(value); }
inline float fast_exp2(float value) { return std::exp2(value); }

inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; i++) sum += emulator::byte_at(a, i) * emulator::byte_at(b, i);
    return sum;
}

inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    const u64 bytes = static_cast<u64>(y) << 32 | x;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= static_cast<u32>(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return result;
}

inline float half_to_float(u32 bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value;
    if (exponent == 31) value = fraction ? NAN : INFINITY;
    else if (exponent == 0) value = std::ldexp(static_cast<float>(fraction), -24);
    else value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    return bits & 0x8000 ? -value : value;
}

inline u32 float_to_half(float value) {
    const u32 sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (std::isnan(value)) return 0x7fff;
    if (magnitude == 0) return sign;
    if (magnitude >= 65520.0) return sign | 0x7c00;
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    const int scale = std::max(exponent - 11, -24);  // unit in the last place: 2^scale
    const u32 units = static_cast<u32>(std::nearbyint(std::ldexp(magnitude, -scale)));
    return sign | (scale == -24 ? units : ((scale + 24) << 10) + units);
}

inline float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 float_to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_halves(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }
inline u32 exp2_halves(u32 x) {
    return pack_halves(std::exp2(half_to_float(x & 0xffff)), std::exp2(half_to_float(x >> 16)));
}
inline u32 pack_bf16s(float low, float high) { return float_to_bf16(low) | float_to_bf16(high) << 16; }

inline u32 multiply_halves(u32 a, u32 b) {
    return pack_halves(half_to_float(a & 0xffff) * half_to_float(b & 0xffff), half_to_float(a >> 16) * half_to_float(b >> 16));
}
inline uint2 bytes_to_halves(u32 codes) {
    auto code = [&](int i) { return static_cast<float>(emulator::byte_at(codes, i)); };
    return {pack_halves(code(0), code(1)), pack_halves(code(2), code(3))};
}

inline void require_aligned(const void* address, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(address) % bytes) emulator::fail("misaligned vector load");
}
inline void stream_load(u32 (&words)[4], const void* address) { require_aligned(address, 16); std::memcpy(words, address, 16); }
inline void stream_load(u32 (&words)[2], const void* address) { require_aligned(address, 8); std::memcpy(words, address, 8); }
inline u32 stream_load4(const void* address) { require_aligned(address, 4); u32 word; std::memcpy(&word, address, 4); return word; }
inline u32 stream_load2(const void* address) { require_aligned(address, 2); u16 word; std::memcpy(&word, address, 2); return word; }

inline void prefetch_line(const void*) {}
inline void grid_wait() {}
inline void grid_release_dependents() {}
inline void mma_bytes_k32(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulator::mma_bytes({d, a, {b0, b1}, 2}); }
inline void mma_bytes_k16(int (&d)[4], u32 a0, u32 a1, u32 b) { const u32 a[2] = {a0, a1}; emulator::mma_bytes({d, a, {b, 0}, 1}); }
inline void mma_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulator::mma_16bit({d, a, {b0, b1}, half_to_float}); }
inline void mma_bf16s(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulator::mma_16bit({d, a, {b0, b1}, bf16_to_float}); }
inline void copy_async(void* shared, const void* global) { require_aligned(global, 16); std::memcpy(shared, global, 16); }
inline void copy_word_async(void* shared, const void* global, bool wanted) {
    u32 word = 0;
    if (wanted) std::memcpy(&word, global, 4);
    std::memcpy(shared, &word, 4);
}
inline void copy_async_commit() {}
template <int PENDING> void copy_async_wait() {}
