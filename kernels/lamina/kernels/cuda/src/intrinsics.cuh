// The instructions that C++ has no name for, and nothing else: the one file that tests replace to run kernels on a CPU.
// No header is included: NVRTC then needs no search path and compiles in a fraction of the time.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]
#define HAS_BYTE_MMA (__CUDA_ARCH__ >= 750)
#define HAS_HALF_MMA (__CUDA_ARCH__ >= 800)

// -- numbers of 16 bits

DEVICE float half_to_float(u32 bits) {
    float value;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
    return value;
}

DEVICE u32 float_to_half(float value) {
    u32 bits;
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(bits) : "f"(value));
    return bits;
}

DEVICE float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

DEVICE u32 float_to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40;  // a NaN must not be rounded away
    return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}

DEVICE u32 pack_halves(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return float_to_half(low) | (float_to_half(high) << 16);
#endif
}

DEVICE u32 pack_bf16s(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return float_to_bf16(low) | (float_to_bf16(high) << 16);
#endif
}

DEVICE u32 multiply_halves(u32 a, u32 b) {
    u32 product;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Four int8 as four f16, exactly: an offset byte in the fraction of 1024 is 1024 + byte.
DEVICE uint2 bytes_to_halves(u32 codes) {
    const u32 offset = codes ^ 0x80808080u;
    const u32 low = __byte_perm(offset, 0x64646464u, 0x4140), high = __byte_perm(offset, 0x64646464u, 0x4342);
    uint2 halves;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(halves.x) : "r"(low), "r"(0x64806480u));
    asm("sub.f16x2 %0, %1, %2;" : "=r"(halves.y) : "r"(high), "r"(0x64806480u));
    return halves;
}

// 2^x; absolute error of the hardware's approximation is far below that of 16-bit probabilities.
DEVICE float fast_exp2(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// 2^x of two f16.
DEVICE u32 exp2_halves(u32 x) {
#if __CUDA_ARCH__ >= 750
    u32 powers;
    asm("ex2.approx.f16x2 %0, %1;" : "=r"(powers) : "r"(x));
    return powers;
#else
    return pack_halves(fast_exp2(half_to_float(x & 0xffff)), fast_exp2(half_to_float(x >> 16)));
#endif
}

// -- loads of weights: read once, through the read-only path, past the L1 cache

DEVICE void stream_load(u32 (&words)[4], const void* address) {
#if __CUDA_ARCH__ >= 700
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(address));
#else
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(address));
#endif
}

DEVICE void stream_load(u32 (&words)[2], const void* address) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(address));
}

DEVICE u32 stream_load4(const void* address) {
    u32 word;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(address));
    return word;
}

DEVICE u32 stream_load2(const void* address) {
    u32 word;
    asm volatile("{ .reg .b16 h; ld.global.nc.u16 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(word) : "l"(address));
    return word;
}

// Starts to bring a line of 128 bytes into the L2 cache; costs no register and waits for nothing.
DEVICE void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];" :: "l"(address)); }

// -- programmatic dependent launch: a kernel may start before its predecessor has ended. Until grid_wait() returns it
//    may touch nothing but weights and what a step is given (counts, positions, slots, row starts, block tables), and
//    it must not write at all. What it reads before costs no time, since the predecessor still runs. Step inputs are
//    complete because copies and set_shape, which release no dependents, end before any kernel after them starts. Every
//    block waits, also one with nothing to do: a kernel that ends before its predecessor would end the wait of others.

DEVICE void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void grid_release_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// -- tensor cores. Fragments as in the PTX manual: lane = 4 g + t holds rows g, g + 8 of A and columns 2t, 2t + 1 of D.

// D[16 x 8] += A[16 x 32] B[32 x 8], int8
DEVICE void mma_bytes_k32(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 750
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 b = half ? b1 : b0;
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(d[0]), "+r"(d[1]) : "r"(a[2 * half]), "r"(b));
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(d[2]), "+r"(d[3]) : "r"(a[2 * half + 1]), "r"(b));
    }
#endif
}

// D[16 x 8] += A[16 x 16] B[16 x 8], int8
DEVICE void mma_bytes_k16(int (&d)[4], u32 a0, u32 a1, u32 b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(b));
#elif __CUDA_ARCH__ >= 750
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(d[0]), "+r"(d[1]) : "r"(a0), "r"(b));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(d[2]), "+r"(d[3]) : "r"(a1), "r"(b));
#endif
}

// D[16 x 8] += A[16 x 16] B[16 x 8], f16 or bf16 in, f32 out
DEVICE void mma_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

DEVICE void mma_bf16s(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// -- copies to shared memory, of 16 bytes or 4, that do not pass through registers, where the card has them

DEVICE void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(static_cast<u32>(__cvta_generic_to_shared(shared))), "l"(global) : "memory");
#else
    *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

// Four bytes; zeros if they are not wanted, then from nowhere.
DEVICE void copy_word_async(void* shared, const void* global, bool wanted) {
#if __CUDA_ARCH__ >= 800
    const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(to), "l"(global), "r"(wanted ? 4 : 0) : "memory");
#else
    *static_cast<u32*>(shared) = wanted ? *static_cast<const u32*>(global) : 0;
#endif
}

DEVICE void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
DEVICE void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
#endif
}
