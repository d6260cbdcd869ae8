// The operands of attention, and how they get into shared memory.

#define USES_MMA (DTYPE == 2 || DTYPE == 3)
#ifndef EMULATED
#if __CUDA_ARCH__ >= 800
#define HAS_ASYNC_COPIES
#elif USES_MMA
#error "attention in half precision needs a GPU of compute capability 8.0 or later"
#endif
#endif

// The elements of a load.
#define V (16 / (int)sizeof(T))

DEVICE int lane() { return (int)(threadIdx.x % WARP); }

// The matrices of all heads, with contiguous rows. Must match `Matrices` in `attention.rs`.
struct Matrices {
    const void* at;
    u64 sizes[4];
    i64 strides[4];
    i64 row, column;
};

// Must match `Attention` in `attention.rs`.
struct Attention {
    Matrices q, k, v, grad, mask;
    T* out;
    A* lse;
    // For each query, the dot product of its output and the gradient.
    A* dots;
    T* dq;
    T* dk;
    T* dv;
    u64 heads, queries, keys, width, value_width;
    // The numbers of tiles of rows, and of slices of the columns of the output.
    u64 tiles, slices;
    // How many heads run together: their keys and values fit into the cache.
    u64 together;
    u64 first_query, all_queries;
    Draw draw;
    Threshold threshold;
    double scale, keep_scale;
    // 0: none, 1: bytes, 2: numbers to add.
    u32 mask_kind;
    u32 causal, dropout, reserved;
    Window window;
};

DEVICE i64 offset_of(const Matrices& m, u64 head) {
    i64 offset = 0;
    for (int d = 3; d >= 0; d--) {
        u64 size = m.sizes[d];
        if (size == 1) continue;
        // Divisions are slow.
        if (head < size) return offset + (i64)head * m.strides[d];
        u64 next = quotient(head, size);
        offset += (i64)(head - next * size) * m.strides[d];
        head = next;
    }
    return offset;
}

// Copies 16 bytes to shared memory, which are there after `wait_for_loads`; zeros unless `is_inside`.
DEVICE void load_pack(T* at, const T* from, bool is_inside) {
#ifdef HAS_ASYNC_COPIES
    u32 bytes = is_inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"((u32)__cvta_generic_to_shared(at)), "l"(from), "r"(bytes)
                 : "memory");
#else
    Pack<T, V> pack;
    for (int e = 0; e < V; e++) pack.values[e] = to<T>(A(0));
    if (is_inside) pack = *(const Pack<T, V>*)from;
    *(Pack<T, V>*)at = pack;
#endif
}

// Waits for this thread's loads. Those of others are there after the next barrier.
DEVICE void wait_for_loads() {
#ifdef HAS_ASYNC_COPIES
    asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}
