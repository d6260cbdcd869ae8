// Element types, arithmetic, faults and reductions of blocks: what all kernels share.
//
// `T` is the element type that a unit is compiled for, and `A` the type that it is computed in.

#ifndef EMULATED
#define DEVICE __device__ __forceinline__
// A function that is called, so that large kernels compile faster.
#define SEPARATE static __device__ __noinline__
// Declares a kernel with one argument, `a`. Threads of a `BLOCK_ENTRY` may wait for each other.
#define ENTRY(name, Args) extern "C" __global__ void kernel_##name(const __grid_constant__ Args a)
#define BLOCK_ENTRY(name, Args) extern "C" __global__ void kernel_##name(const __grid_constant__ Args a)
// Declares `name`, the shared memory whose size is given at the launch.
#define SHARED_BYTES(name) extern __shared__ __align__(16) unsigned char name[]
#endif

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct half_t {
    unsigned short bits;
};
struct bfloat_t {
    unsigned short bits;
};

#ifndef EMULATED
DEVICE float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
DEVICE unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE unsigned short double_to_half(double x) {
    unsigned short bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(x));
    return bits;
}
DEVICE float bits_to_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 float_to_bits(float x) { return __float_as_uint(x); }
DEVICE double bits_to_double(u64 bits) { return __longlong_as_double((i64)bits); }
DEVICE u64 double_to_bits(double x) { return (u64)__double_as_longlong(x); }
#endif

DEVICE float bfloat_to_float(unsigned short bits) { return bits_to_float((u32)bits << 16); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
DEVICE unsigned short float_to_bfloat(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#else
DEVICE unsigned short float_to_bfloat(float x) {
    u32 bits = float_to_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((bits >> 16) | 0x40);
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
#endif

// The type that values of an element type are computed in.
template <class E> struct Acc {
    typedef E type;
};
template <> struct Acc<half_t> {
    typedef float type;
};
template <> struct Acc<bfloat_t> {
    typedef float type;
};
template <> struct Acc<unsigned char> {
    typedef i64 type;
};

// Widens an element.
DEVICE float acc(half_t x) { return half_to_float(x.bits); }
DEVICE float acc(bfloat_t x) { return bfloat_to_float(x.bits); }
DEVICE float acc(float x) { return x; }
DEVICE double acc(double x) { return x; }
DEVICE i64 acc(unsigned char x) { return x; }
DEVICE i64 acc(i64 x) { return x; }

// Narrows a value: floating-point numbers are rounded, integers wrap.
DEVICE void narrow(float x, half_t& y) { y.bits = float_to_half(x); }
DEVICE void narrow(float x, bfloat_t& y) { y.bits = float_to_bfloat(x); }
DEVICE void narrow(float x, float& y) { y = x; }
DEVICE void narrow(double x, double& y) { y = x; }
DEVICE void narrow(i64 x, unsigned char& y) { y = (unsigned char)x; }
DEVICE void narrow(i64 x, i64& y) { y = x; }
template <class E> DEVICE E to(typename Acc<E>::type x) {
    E y;
    narrow(x, y);
    return y;
}

// Integers wrap.
template <class N> DEVICE N add(N x, N y) { return x + y; }
template <class N> DEVICE N subtract(N x, N y) { return x - y; }
template <class N> DEVICE N multiply(N x, N y) { return x * y; }
template <> DEVICE i64 add<i64>(i64 x, i64 y) { return (i64)((u64)x + (u64)y); }
template <> DEVICE i64 subtract<i64>(i64 x, i64 y) { return (i64)((u64)x - (u64)y); }
template <> DEVICE i64 multiply<i64>(i64 x, i64 y) { return (i64)((u64)x * (u64)y); }

// The smallest and the largest value.
template <class N> DEVICE N lowest();
template <class N> DEVICE N highest();
template <> DEVICE float lowest<float>() { return bits_to_float(0xff800000u); }
template <> DEVICE float highest<float>() { return bits_to_float(0x7f800000u); }
template <> DEVICE double lowest<double>() { return bits_to_double(0xfff0000000000000ull); }
template <> DEVICE double highest<double>() { return bits_to_double(0x7ff0000000000000ull); }
template <> DEVICE i64 lowest<i64>() { return (i64)0x8000000000000000ull; }
template <> DEVICE i64 highest<i64>() { return 0x7fffffffffffffffll; }

DEVICE bool is_nan(float x) { return x != x; }
DEVICE bool is_nan(double x) { return x != x; }
DEVICE bool is_nan(i64) { return false; }

DEVICE bool is_negative(float x) { return float_to_bits(x) >> 31; }
DEVICE bool is_negative(double x) { return double_to_bits(x) >> 63; }
DEVICE bool is_negative(i64 x) { return x < 0; }

// The larger and the smaller value; NaN if either is NaN. +0 counts as larger than -0.
template <class N> DEVICE N larger(N x, N y) {
    if (is_nan(x)) return x;
    if (is_nan(y) || y > x) return y;
    return x == y && is_negative(x) ? y : x;
}
template <class N> DEVICE N smaller(N x, N y) {
    if (is_nan(x)) return x;
    if (is_nan(y) || y < x) return y;
    return x == y && is_negative(y) ? y : x;
}

// What formulas are written with.
template <class N> DEVICE N select(bool condition, N x, N y) { return condition ? x : y; }
DEVICE float ln(float x) { return logf(x); }
DEVICE double ln(double x) { return log(x); }
// As on the host (`math.rs`). With the library's function, the absolute error would be smaller than needed and GELU bound by arithmetic.
DEVICE float normal_cdf(float x) {
    float a = fabsf(x) > 5.58f ? 5.58f : fabsf(x), z = a * a;
    float odd = fmaf(fmaf(fmaf(-1.5921178e-7f, z, -3.2478667e-5f), z, 8.2275737e-4f), z, -0.017407667f);
    float even = fmaf(fmaf(fmaf(4.0286427e-6f, z, 1.735798e-5f), z, -3.688617e-4f), z, -0.049867783f);
    float u = a * fmaf(odd, a, even);
    u = fmaf(u, u, u);
    u = fmaf(u * 2.0f, u, u);
    u = fmaf(u * 4.0f, u, u);
    return fmaf(copysignf(u, x), 8.0f, 0.5f);
}
DEVICE double normal_cdf(double x) { return normcdf(x); }
DEVICE float recip(float x) { return 1.0f / x; }
DEVICE double recip(double x) { return 1.0 / x; }

// An array of which several elements are loaded at once.
template <class E, int N> struct alignas(sizeof(E) * N) Pack {
    E values[N];
};

// An invalid value that a kernel has found. Must match `Slot` in `fault.rs`.
struct Fault {
    u32 code, site;
    i64 index;
    u32 dim;
    i64 size;
};
// Where a kernel reports, and as which operator.
struct Site {
    Fault* slot;
    u32 site;
};
#define OUT_OF_BOUNDS 1
#define TWICE 2
#define PROBABILITY 3
// Reports a fault, unless there is one already. All threads of a launch report the same but for the index.
static DEVICE void report(const Site& site, u32 code, i64 index, u32 dim, i64 size) {
    volatile Fault* slot = site.slot;
    if (slot->code != 0) return;
    slot->site = site.site;
    slot->index = index;
    slot->dim = dim;
    slot->size = size;
    __threadfence_system();
    slot->code = code;
}

// The first element of this thread, and the distance to its next one, in loops over elements.
#define FIRST ((u64)blockIdx.x * blockDim.x + threadIdx.x)
#define STEP ((u64)gridDim.x * blockDim.x)

// The quotient. A division of 64 bits takes several times as long as one of 32.
DEVICE u64 quotient(u64 x, u64 y) { return (x | y) >> 32 ? x / y : (u32)x / (u32)y; }

#define WARP 32
#define FULL_WARP 0xffffffffu

template <class V> DEVICE V shuffle_xor(V x, int mask) { return __shfl_xor_sync(FULL_WARP, x, mask); }

// Combines the values of the threads of a warp, in a fixed order. All threads get the result.
template <class V, class F> DEVICE V warp_reduce(V x, F f) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) x = f(x, shuffle_xor(x, mask));
    return x;
}

// Combines the values of the threads of a block, in a fixed order. All threads get the result. `buffer` is shared memory for 32
// values; it may be used again at once. The block must have full warps.
template <class V, class F> DEVICE V block_reduce(V x, V identity, F f, V* buffer) {
    x = warp_reduce(x, f);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    if (warps == 1) return x;
    if (lane == 0) buffer[warp] = x;
    __syncthreads();
    V y = lane < warps ? buffer[lane] : identity;
    y = warp_reduce(y, f);
    __syncthreads();
    return y;
}

struct Sum {
    template <class V> DEVICE V operator()(V x, V y) const { return add(x, y); }
};
struct Largest {
    template <class V> DEVICE V operator()(V x, V y) const { return larger(x, y); }
};
struct Smallest {
    template <class V> DEVICE V operator()(V x, V y) const { return smaller(x, y); }
};
