// Products of a group of 4 warps on the tensor cores of Hopper GPUs, which run beside the warps' other work. The right operand is in
// shared memory, and the left one there or in registers.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WARPGROUPS
#endif

#ifdef HAS_WARPGROUPS

#if DTYPE == 2
#define TYPES ".f32.f16.f16 "
#else
#define TYPES ".f32.bf16.bf16 "
#endif

// Orders the writes to registers before the products that follow.
DEVICE void start_products() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
// Ends a batch of products.
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
// Waits until at most `batches` are running.
template <int batches> DEVICE void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(batches) : "memory");
}
// Orders what other instructions wrote to shared memory before the products that read it.
DEVICE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

// Keeps the compiler from moving uses of registers across this place.
template <int count> DEVICE void pin(float (&x)[count][4]) {
#pragma unroll
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+f"(x[i][j]) : : "memory");
}
template <int count> DEVICE void pin(u32 (&x)[count][4]) {
#pragma unroll
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+r"(x[i][j]) : : "memory");
}

// Keeps the assembler from moving the computation of `x` behind the wait that follows, so that it runs beside the products: a store if
// any of these bits is set. They must not be.
DEVICE void compute_before_wait(u32 bits) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.volatile.shared.b32 [%1], %0; }" : : "r"(bits), "r"(0) : "memory");
}
// Describes a matrix in panels of rows of 128 bytes, whose 16-byte parts are permuted within each 8 rows. `panel` is the distance of
// panels in bytes.
DEVICE u64 describe(const T* at, u32 panel) {
    u32 address = (u32)__cvta_generic_to_shared(at);
    return (u64)(address >> 4 & 0x3fff) | (u64)(panel >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// Products of 64 rows and 16 columns of the left operand: `c` becomes the product, plus `c` if `adds`.
#define FOUR(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 1), FOUR(i + 2), FOUR(i + 3)
#define OF64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define OF128 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

DEVICE void multiply(float (&c)[8][4], u64 a, u64 b, bool adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16" TYPES OF64
                 ", %32, %33, p, 1, 1, 0, 0; }"
                 : SIXTEEN(0), SIXTEEN(4)
                 : "l"(a), "l"(b), "r"((int)adds));
}
template <bool transposed> DEVICE void multiply(float (&c)[8][4], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16" TYPES OF64
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, %38; }"
                 : SIXTEEN(0), SIXTEEN(4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds), "n"((int)transposed));
}

DEVICE void multiply(float (&c)[16][4], u64 a, u64 b, bool adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16" TYPES OF128
                 ", %64, %65, p, 1, 1, 0, 0; }"
                 : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)
                 : "l"(a), "l"(b), "r"((int)adds));
}
template <bool transposed> DEVICE void multiply(float (&c)[16][4], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16" TYPES OF128
                 ", {%64, %65, %66, %67}, %68, p, 1, 1, %70; }"
                 : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds), "n"((int)transposed));
}

#else

DEVICE void start_products() {}
DEVICE void end_products() {}
template <int batches> DEVICE void await_products() {}
DEVICE void show_to_products() {}
template <class X> DEVICE void pin(X&) {}
DEVICE void compute_before_wait(u32) {}

#endif
