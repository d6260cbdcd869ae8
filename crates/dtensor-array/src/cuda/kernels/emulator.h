// Runs kernels on the CPU: the words of CUDA C++ that our kernels use. Blocks run one after another. The threads of a block that
// wait for each other are fibers.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#define EMULATED 1
#define DEVICE inline
#define SEPARATE static
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __shared__ static
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define SHARED_BYTES(name) unsigned char* name = emulator::shared_bytes

struct dim3_t {
    unsigned x, y, z;
};
static dim3_t threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
struct Launch {
    unsigned grid[3];
    unsigned block;
    unsigned shared_bytes;
};

static unsigned char* shared_bytes;
static std::mutex one_launch;

#if defined(__x86_64__)
// Saves the registers that a call keeps on the stack, and continues on another stack.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.local emulator_switch
.type emulator_switch, @function
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
.size emulator_switch, .-emulator_switch
)");
typedef void* Context;
#else
#include <ucontext.h>
typedef ucontext_t Context;
#endif

struct Barrier {
    unsigned arrived = 0, generation = 0;
};
struct Fiber {
    Context context;
    unsigned char* stack = nullptr;
    bool done = false;
};
static const size_t STACK = 64 << 10;
static std::vector<Fiber> fibers;
static Context scheduler;
static unsigned running, alive;
static Barrier block_barrier;
static std::vector<Barrier> warp_barriers;
static std::vector<unsigned> warp_alive;
static void (*body)(const void*);
static const void* argument;
// What the threads of each warp exchange: a value of up to 8 bytes from each.
static std::vector<uint64_t> exchanged;

inline void yield() {
    unsigned me = running;
#if defined(__x86_64__)
    emulator_switch(&fibers[me].context, scheduler);
#else
    swapcontext(&fibers[me].context, &scheduler);
#endif
    running = me;
    threadIdx.x = me;
}

// Waits until as many threads as are alive have arrived.
inline void wait(Barrier& barrier, const unsigned& expected) {
    unsigned generation = barrier.generation;
    if (++barrier.arrived >= expected) {
        barrier.arrived = 0;
        barrier.generation++;
        return;
    }
    while (barrier.generation == generation) {
        // A thread that ended meanwhile may have been the last one missing.
        if (barrier.arrived >= expected) {
            barrier.arrived = 0;
            barrier.generation++;
            return;
        }
        yield();
    }
}

static void start() {
    unsigned me = running;
    body(argument);
    fibers[me].done = true;
    alive--;
    warp_alive[me / 32]--;
#if defined(__x86_64__)
    void* unused;
    emulator_switch(&unused, scheduler);
    abort();
#else
    swapcontext(&fibers[me].context, &scheduler);
#endif
}

inline void run_block(unsigned threads) {
    if (fibers.size() < threads) fibers.resize(threads);
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        if (!fiber.stack) fiber.stack = (unsigned char*)aligned_alloc(64, STACK);
        fiber.done = false;
#if defined(__x86_64__)
        // A function starts with its return address 8 bytes from an aligned address.
        void** top = (void**)(fiber.stack + STACK - 64) + 1;
        *top = nullptr;
        *--top = (void*)start;
        for (int k = 0; k < 6; k++) *--top = nullptr;
        fiber.context = top;
#else
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, start, 0);
#endif
    }
    unsigned warps = (threads + 31) / 32;
    alive = threads;
    block_barrier = Barrier();
    warp_barriers.assign(warps, Barrier());
    warp_alive.assign(warps, 32);
    if (threads % 32) warp_alive[warps - 1] = threads % 32;
    exchanged.assign(warps * 32, 0);
    while (alive > 0) {
        for (unsigned i = 0; i < threads; i++) {
            if (fibers[i].done) continue;
            running = i;
            threadIdx.x = i;
#if defined(__x86_64__)
            emulator_switch(&scheduler, fibers[i].context);
#else
            swapcontext(&scheduler, &fibers[i].context);
#endif
        }
    }
}

inline void run(const Launch* launch, const void* args, void (*kernel)(const void*), bool waits) {
    std::lock_guard<std::mutex> guard(one_launch);
    std::vector<unsigned char> memory(launch->shared_bytes + 16);
    shared_bytes = (unsigned char*)(((uintptr_t)memory.data() + 15) & ~(uintptr_t)15);
    gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    blockDim = {launch->block, 1, 1};
    body = kernel;
    argument = args;
    for (unsigned z = 0; z < gridDim.z; z++)
        for (unsigned y = 0; y < gridDim.y; y++)
            for (unsigned x = 0; x < gridDim.x; x++) {
                blockIdx = {x, y, z};
                // Shared memory is not initialised.
                memset(shared_bytes, 0xa5, launch->shared_bytes);
                if (waits) {
                    run_block(launch->block);
                } else {
                    for (unsigned i = 0; i < launch->block; i++) {
                        threadIdx = {i, 0, 0};
                        kernel(args);
                    }
                }
            }
}
}  // namespace emulator

#define EMULATED_ENTRY(name, Args, waits)                                                             \
    static void name##_thread(const Args& a);                                                         \
    static void name##_erased(const void* args) { name##_thread(*(const Args*)args); }                \
    extern "C" __attribute__((visibility("default"))) void kernel_##name(                             \
        const emulator::Launch* launch, const void* args) {                                           \
        emulator::run(launch, args, name##_erased, waits);                                            \
    }                                                                                                 \
    static void name##_thread(const Args& a)
#define ENTRY(name, Args) EMULATED_ENTRY(name, Args, false)
#define BLOCK_ENTRY(name, Args) EMULATED_ENTRY(name, Args, true)

inline void __syncthreads() { emulator::wait(emulator::block_barrier, emulator::alive); }
inline void __syncwarp(unsigned = 0xffffffffu) {
    unsigned warp = emulator::running / 32;
    emulator::wait(emulator::warp_barriers[warp], emulator::warp_alive[warp]);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

// Each thread of a warp gives a value and gets that of another one.
template <class V> inline V emulated_shuffle(V x, unsigned from_lane) {
    static_assert(sizeof(V) <= 8, "values of a shuffle have at most 8 bytes");
    unsigned me = emulator::running, base = me / 32 * 32;
    memcpy(&emulator::exchanged[me], &x, sizeof(V));
    __syncwarp();
    V y;
    memcpy(&y, &emulator::exchanged[base + from_lane % 32], sizeof(V));
    __syncwarp();
    return y;
}
template <class V> inline V __shfl_sync(unsigned, V x, int lane) { return emulated_shuffle(x, lane); }
template <class V> inline V __shfl_xor_sync(unsigned, V x, int mask) {
    return emulated_shuffle(x, (emulator::running % 32) ^ mask);
}
template <class V> inline V __shfl_up_sync(unsigned, V x, unsigned delta) {
    unsigned lane = emulator::running % 32;
    return emulated_shuffle(x, lane >= delta ? lane - delta : lane);
}
template <class V> inline V __shfl_down_sync(unsigned, V x, unsigned delta) {
    unsigned lane = emulator::running % 32;
    return emulated_shuffle(x, lane + delta < 32 ? lane + delta : lane);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    unsigned bits = 0, me = emulator::running, base = me / 32 * 32;
    emulator::exchanged[me] = predicate != 0;
    __syncwarp();
    for (unsigned i = 0; i < 32 && base + i < blockDim.x; i++)
        if (!emulator::fibers[base + i].done && emulator::exchanged[base + i]) bits |= 1u << i;
    __syncwarp();
    return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline int __syncthreads_or(int predicate) {
    static int any;
    __syncthreads();
    any = 0;
    __syncthreads();
    if (predicate) any = 1;
    __syncthreads();
    int result = any;
    __syncthreads();
    return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <class V, class W> inline V atomicAdd(V* at, W x) {
    V before = *at;
    *at = before + (V)x;
    return before;
}
template <class V, class W> inline V atomicMax(V* at, W x) {
    V before = *at;
    if ((V)x > before) *at = (V)x;
    return before;
}
template <class V, class W> inline V atomicMin(V* at, W x) {
    V before = *at;
    if ((V)x < before) *at = (V)x;
    return before;
}
template <class V, class W> inline V atomicOr(V* at, W x) {
    V before = *at;
    *at = before | (V)x;
    return before;
}
template <class V, class W> inline V atomicExch(V* at, W x) {
    V before = *at;
    *at = (V)x;
    return before;
}
template <class V, class W, class X> inline V atomicCAS(V* at, W expected, X x) {
    V before = *at;
    if (before == (V)expected) *at = (V)x;
    return before;
}

inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)(((unsigned long long)x * y) >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)(((unsigned __int128)x * y) >> 64);
}
template <class V> inline V __ldg(const V* at) { return *at; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }
inline void sincospif(float x, float* s, float* c) {
    *s = (float)std::sin(3.14159265358979323846 * (double)x);
    *c = (float)std::cos(3.14159265358979323846 * (double)x);
}
using std::abs;
using std::cos;
using std::erf;
using std::exp;
using std::fma;
using std::log;
using std::pow;
using std::sin;
using std::sqrt;
using std::tanh;
using std::trunc;
using std::floor;

inline float bits_to_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline unsigned float_to_bits(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline double bits_to_double(unsigned long long bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}
inline unsigned long long double_to_bits(double x) {
    unsigned long long bits;
    memcpy(&bits, &x, 8);
    return bits;
}
inline float half_to_float(unsigned short bits) {
    unsigned sign = (unsigned)(bits >> 15) << 31, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
    float x = (float)fraction * bits_to_float(0x33800000u);  // 2^-24
    return sign ? -x : x;
}
// Rounds to the nearest half, ties to even.
inline unsigned short double_to_half(double x) {
    unsigned short sign = (unsigned short)((double_to_bits(x) >> 63) << 15);
    double y = std::fabs(x);
    if (y != y) return sign | 0x7e00;
    if (y >= 65520.0) return sign | 0x7c00;
    int exponent = y < 6.103515625e-05 ? -14 : (int)std::floor(std::log2(y));
    if (y >= 6.103515625e-05) {
        if (std::ldexp(1.0, exponent) > y) exponent--;
        if (std::ldexp(1.0, exponent + 1) <= y) exponent++;
    }
    double units = std::nearbyint(std::ldexp(y, 10 - exponent));
    unsigned fraction = (unsigned)units;
    if (y < 6.103515625e-05) return sign | (unsigned short)fraction;
    return sign | (unsigned short)(((unsigned)(exponent + 15) << 10) + (fraction - 1024));
}
inline unsigned short float_to_half(float x) { return double_to_half(x); }
