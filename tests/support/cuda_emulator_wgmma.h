// Stands in for kernels/cuda/src/wgmma.cuh, beside cuda_emulator.h: what is asynchronous there is done at once here, but
// barriers are waited for, so that a consumer that comes too early, or a producer, computes with garbage.

namespace emulator {

struct Phase { int expected = 0, arrived = 0, parity = 0; };
inline std::vector<Phase> phases(1 << 15);  // of the barrier at 8 * index in shared memory
inline Phase turns[16];

inline void arrive(Phase& phase) {
    if (++phase.arrived < phase.expected) return;
    phase.arrived = 0;
    phase.parity ^= 1;
    moved = true;
}

struct Product { float (*d)[4]; const u32* a; u64 b; bool adds; };

// Row n, column k of a matrix of rows of 16-bit numbers, by the rules of the PTX manual.
inline u32 element(u64 descriptor, int n, int k) {
    const int mode = static_cast<int>(descriptor >> 62), swizzle = mode == 1 ? 128 : mode == 2 ? 64 : 32;
    const u32 start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    u32 address = start + n / 8 * stride + n % 8 * swizzle + 2 * k;
    if (start % (8 * swizzle) >= static_cast<u32>(swizzle)) fail("a matrix that begins within a swizzled column");
    address ^= (address >> 7 & (swizzle / 16 - 1)) << 4;
    if (address + 2 > dynamic_shared.size()) fail("a matrix beyond shared memory");
    u16 bits;
    std::memcpy(&bits, dynamic_shared.data() + address, 2);
    return bits;
}

inline float widen_16bit(u32 bits) { return KV_TYPE == 2 ? bf16_to_float(bits) : half_to_float(bits); }

// A warp's sixteen rows
template <int COUNT>
void product(Product mine) {
    warp_operation(&mine, [](void** all) {
        auto lane = [&](int i) -> Product& { return *static_cast<Product*>(all[i]); };
        float a[16][16];
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16; k++) {
                const u32 word = lane(row % 8 * 4 + k % 8 / 2).a[k / 8 * 2 + row / 8];
                a[row][k] = widen_16bit(word >> 16 * (k % 2) & 0xffff);
            }
        for (int n = 0; n < 8 * COUNT; n++) {
            float b[16];
            for (int k = 0; k < 16; k++) b[k] = widen_16bit(element(lane(0).b, n, k));
            for (int row = 0; row < 16; row++) {
                Product& to = lane(row % 8 * 4 + n % 8 / 2);
                float& d = to.d[n / 8][row / 8 * 2 + n % 2];
                float sum = to.adds ? d : 0.f;
                for (int k = 0; k < 16; k++) sum += a[row][k] * b[k];
                d = sum;
            }
        }
    });
}

}  // namespace emulator

inline u32 shared_address(const void* at) { return static_cast<u32>(static_cast<const u8*>(at) - emulator::dynamic_shared.data()); }

template <int SWIZZLE>
int swizzled(int offset) {
    return offset ^ (offset >> 7 & (SWIZZLE / 16 - 1)) << 4;
}
struct Matrix { u32 low, high; };
template <int SWIZZLE>
Matrix matrix_at(u32 address) {
    constexpr u32 MODE = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 3;
    return {1u << 16 | (address & 0x3ffff) >> 4, MODE << 30 | 8 * SWIZZLE / 16};
}
inline Matrix operator+(const Matrix& matrix, int num_bytes) { return {matrix.low + num_bytes / 16, matrix.high}; }

template <int COUNT>
void wgmma(float (&d)[COUNT][4], const u32 (&a)[4], const Matrix& b, bool adds) {
    emulator::product<COUNT>({d, a, static_cast<u64>(b.high) << 32 | b.low, adds});
}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING> void wgmma_wait() {}
template <int COUNT> void pin(float (&)[COUNT][4]) {}

inline void barrier_init(u32 barrier, int arrivals) {
    emulator::phases[barrier / 8] = {arrivals, 0, 0};
    for (auto& turn : emulator::turns) turn = {};  // a block begins
}
inline void barrier_arrive(u32 barrier) { emulator::arrive(emulator::phases[barrier / 8]); }
inline void barrier_wait(u32 barrier, int parity) {
    while (emulator::phases[barrier / 8].parity == parity) emulator::give_way();
}
inline void fence_for_wgmma() {}
inline void copy_async_8(u32 shared, const void* global, int num_bytes) {
    require_aligned(global, 8);
    std::memset(emulator::dynamic_shared.data() + shared, 0, 8);
    std::memcpy(emulator::dynamic_shared.data() + shared, global, num_bytes);
}
inline void copy_async_8(u32 shared, const void* global) { copy_async_8(shared, global, 8); }
inline void copy_async_16(u32 shared, const void* global) {
    copy_async(emulator::dynamic_shared.data() + shared, global);
}

template <int REGISTERS> void take_registers() {}
template <int REGISTERS> void leave_registers() {}
inline void turn_pass(int id, int threads) {
    emulator::turns[id].expected = threads;
    emulator::arrive(emulator::turns[id]);
}
inline void turn_wait(int id, int threads) {
    const int parity = emulator::turns[id].parity;
    turn_pass(id, threads);
    while (emulator::turns[id].parity == parity) emulator::give_way();
}
