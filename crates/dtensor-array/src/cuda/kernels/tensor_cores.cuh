// Products of small matrices by a warp, on tensor cores.

#if USES_MMA

#ifdef EMULATED
// The operands of a warp's tensor product, as numbers.
static float emulated_a[1024][8], emulated_b[1024][4];
DEVICE float half_of(u32 pair, int which) {
    T x;
    x.bits = (unsigned short)(pair >> (16 * which));
    return acc(x);
}
// Adds the product of a 16 by 16 and a 16 by 8 matrix, spread over the threads of a warp.
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    int me = threadIdx.x, base = me / WARP * WARP;
    for (int i = 0; i < 8; i++) emulated_a[me][i] = half_of(a[i / 2], i % 2);
    for (int i = 0; i < 4; i++) emulated_b[me][i] = half_of(b[i / 2], i % 2);
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            float x = emulated_a[base + row % 8 * 4 + k % 8 / 2][(row / 8 + 2 * (k / 8)) * 2 + k % 2];
            float y = emulated_b[base + column * 4 + k % 8 / 2][k / 8 * 2 + k % 2];
            c[i] += x * y;
        }
    }
    __syncwarp();
}
// Loads four 8 by 8 matrices; thread `i` gives the address of row `i % 8` of matrix `i / 8`. Each thread gets two neighbouring
// elements of each: of row `lane / 4`, or of column `lane / 4` if `transposed`.
template <bool transposed> DEVICE void load_matrices(u32 (&x)[4], const T* row) {
    for (int i = 0; i < 4; i++) {
        u32 bits = 0;
        for (int e = 0; e < 2; e++) {
            int near = lane() % 4 * 2 + e, far = lane() / 4;
            const T* from = __shfl_sync(FULL_WARP, row, i * 8 + (transposed ? near : far));
            bits |= (u32)from[transposed ? far : near].bits << (16 * e);
        }
        x[i] = bits;
    }
}
#else
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if DTYPE == 2
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <bool transposed> DEVICE void load_matrices(u32 (&x)[4], const T* row) {
    u32 address = (u32)__cvta_generic_to_shared(row);
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
}
#endif

// Rounds two numbers.
DEVICE u32 pair_of(float x, float y) {
#ifdef EMULATED
    return (u32)to<T>(x).bits | (u32)to<T>(y).bits << 16;
#else
    u32 pair;
#if DTYPE == 2
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
#endif
    return pair;
#endif
}

#endif
