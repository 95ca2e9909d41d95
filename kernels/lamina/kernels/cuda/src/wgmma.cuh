// Hopper's asynchronous instructions: products of a warpgroup (four warps) whose B lies in shared memory, and the
// barriers by which producers and consumers of shared memory wait for each other. KV_TYPE (1 f16, 2 bf16).
//
// These exist for compute capability 9.0 alone, in code compiled for sm_90a.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#if KV_TYPE == 2
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif
#define EIGHT_OF(d, i) \
    "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]), \
    "+f"(d[i + 1][0]), "+f"(d[i + 1][1]), "+f"(d[i + 1][2]), "+f"(d[i + 1][3])

DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// -- products: fence, any number of wgmma, commit; their registers are not to be touched before wgmma_wait.
//
//    B has rows of 16-bit numbers along K, cut into columns of SWIZZLE bytes; a column's rows lie one after the other,
//    their eights of numbers in the order of `swizzled`.

template <int SWIZZLE>
DEVICE int swizzled(int offset) {
    return offset ^ (offset >> 7 & (SWIZZLE / 16 - 1)) << 4;
}

// Of a matrix that begins at this address. The same with `low` more by n / 16 begins n bytes later: along a column's
// first rows, or at another column (`swizzled` is applied to addresses: columns begin at multiples of 8 * SWIZZLE).
struct Matrix {
    u32 low, high;
};
template <int SWIZZLE>
DEVICE Matrix matrix_at(u32 address) {
    constexpr u32 MODE = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 3;
    return {1u << 16 | (address & 0x3ffff) >> 4, MODE << 30 | 8 * SWIZZLE / 16};
}
DEVICE Matrix operator+(const Matrix& matrix, int num_bytes) { return {matrix.low + num_bytes / 16, matrix.high}; }

// D[64 x 64] += A[64 x 16] B[64 x 16]^T; D = A B^T if not `adds`.
DEVICE void wgmma(float (&d)[8][4], const u32 (&a)[4], const Matrix& b, bool adds) {
    asm volatile(
        "{ .reg .pred adds; .reg .b64 b; setp.ne.b32 adds, %38, 0; mov.b64 b, {%36, %37}; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_TYPES " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, b, adds, 1, 1, 0; }"
        : EIGHT_OF(d, 0), EIGHT_OF(d, 2), EIGHT_OF(d, 4), EIGHT_OF(d, 6)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high), "r"(static_cast<int>(adds)));
}

// D[64 x 128] += A[64 x 16] B[128 x 16]^T; D = A B^T if not `adds`.
DEVICE void wgmma(float (&d)[16][4], const u32 (&a)[4], const Matrix& b, bool adds) {
    asm volatile(
        "{ .reg .pred adds; .reg .b64 b; setp.ne.b32 adds, %70, 0; mov.b64 b, {%68, %69}; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPES " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, b, adds, 1, 1, 0; }"
        : EIGHT_OF(d, 0), EIGHT_OF(d, 2), EIGHT_OF(d, 4), EIGHT_OF(d, 6), EIGHT_OF(d, 8), EIGHT_OF(d, 10),
          EIGHT_OF(d, 12), EIGHT_OF(d, 14)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high), "r"(static_cast<int>(adds)));
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// Keeps the compiler from moving what it does with accumulators past this point.
template <int COUNT>
DEVICE void pin(float (&d)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]) :: "memory");
}

// -- barriers in shared memory; phases alternate between parity 0 and 1

DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
DEVICE void barrier_wait(u32 barrier, int parity) {
    asm volatile("{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
                 "@!done bra AGAIN; }" :: "r"(barrier), "r"(parity) : "memory");
}
// Makes this thread's writes to shared memory, copies that it has waited for among them, visible to products.
DEVICE void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Eight bytes to shared memory; of the second kind only the first num_bytes are read, and the others are zeros.
DEVICE void copy_async_8(u32 shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(shared), "l"(global) : "memory");
}
DEVICE void copy_async_8(u32 shared, const void* global, int num_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :: "r"(shared), "l"(global), "r"(num_bytes) : "memory");
}
DEVICE void copy_async_16(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(global) : "memory");
}

// -- warpgroups: their registers, and barriers among `threads` of a block that take turns

template <int REGISTERS>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
DEVICE void turn_wait(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
DEVICE void turn_pass(int id, int threads) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory"); }

#endif
