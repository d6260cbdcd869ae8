// Attention in half precision without a mask or dropout, whose rows can be loaded 16 bytes at a time and fit into shared memory: the
// case that has to be fast. A group of 4 warps computes 64 rows, in a loop over tiles of `TILE` columns.
//
// `W` is the number of columns of all operands, `GROUPS` the groups of a block, `BLOCKS` the blocks that a multiprocessor runs at a
// time, `STAGES` the tiles of each operand of the loop, and `KEEPS` is 1 if the left operands of dot products stay in registers.

#define THREADS (128 * GROUPS)
#define ROWS (64 * GROUPS)

#ifdef EMULATED
#define PLAIN_ENTRY(name) BLOCK_ENTRY(name, Attention)
#define PLAIN_SHARED(name) SHARED_BYTES(name)
DEVICE float exp2_of(float x) { return exp2f(x); }
#else
#define PLAIN_ENTRY(name) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) kernel_##name(const __grid_constant__ Attention a)
// Tensor cores permute by address.
#define PLAIN_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
DEVICE float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// Compile-time choices, as arguments.
struct Yes {
    static constexpr bool value = true;
};
struct No {
    static constexpr bool value = false;
};

#define LOG2_E 1.4426950408889634f

// The group of this thread. All threads of a warp know that it is the same.
DEVICE int group() { return __shfl_sync(FULL_WARP, (int)(threadIdx.x / 128), 0); }
// The first of the 16 rows of this thread's warp.
DEVICE int warp_row() { return (int)(threadIdx.x / WARP) * 16; }
// The row of the thread's elements 0 and 1; elements 2 and 3 are 8 rows below.
DEVICE int thread_row() { return warp_row() + lane() / 4; }
// The column of the thread's elements 0 and 2 of the first 8 columns; 1 and 3 are in the next one.
DEVICE int thread_column() { return lane() % 4 * 2; }

// Rows of `W` columns, in panels of 64. The 16-byte parts of 8 neighbouring rows are permuted, so that a column is in all banks.
template <int rows> struct Tile {
    T panels[W / 64][rows][64];

    DEVICE int place(int row, int column) const {
        return column / 64 * (rows * 64) + row * 64 + (column / 8 % 8 ^ row % 8) * 8;
    }
    DEVICE T* at(int row, int column) { return &panels[0][0][0] + place(row, column); }
    DEVICE const T* at(int row, int column) const { return &panels[0][0][0] + place(row, column); }
};

// The matrix of a head.
struct Side {
    const T* at;
    i64 stride;
    int rows, columns;
};
DEVICE Side side(const Matrices& m, u64 head, u64 rows, u64 columns) {
    return Side{(const T*)m.at + offset_of(m, head), m.row, (int)rows, (int)columns};
}

// Starts to load rows from `row`. What is outside the matrix is zero.
template <int rows> DEVICE void load(Tile<rows>& tile, const Side& x, int row) {
    constexpr int PER_ROW = W / V, STEP_ROWS = THREADS / PER_ROW;
    static_assert(STEP_ROWS % 8 == 0, "the permutation repeats");
    int r = (int)threadIdx.x / PER_ROW, c = (int)threadIdx.x % PER_ROW * V;
    T* to = tile.at(r, c);
    const T* from = x.at + (i64)(row + r) * x.stride + c;
    // Nothing is read where there is no row or column.
    int left = c < x.columns ? x.rows - row - r : 0;
    i64 step = STEP_ROWS * x.stride;
#pragma unroll
    for (int i = 0; i < rows; i += STEP_ROWS) {
        if (rows % STEP_ROWS != 0 && r + i >= rows) break;
        load_pack(to + i * 64, from, i < left);
        from += step;
    }
}

// Waits for the loads of all threads, after which products may use the tiles.
DEVICE void await_loads() {
    wait_for_loads();
    show_to_products();
    __syncthreads();
}

// Ends a batch of this thread's loads, and waits until at most `batches` are running; products may use the others after a barrier.
DEVICE void end_loads() {
#ifdef HAS_ASYNC_COPIES
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}
template <int batches> DEVICE void await_own_loads() {
#ifdef HAS_ASYNC_COPIES
    asm volatile("cp.async.wait_group %0;" : : "n"(batches) : "memory");
#endif
    show_to_products();
}

template <int count> DEVICE void clear(float (&x)[count][4]) {
#pragma unroll
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) x[i][j] = 0.0f;
}

// Loads 16 rows and 16 columns as the left operand of a product.
template <int rows> DEVICE void load_left(u32 (&x)[4], const Tile<rows>& tile, int k) {
    load_matrices<false>(x, tile.at(warp_row() + lane() % 16, k + lane() / 16 * 8));
}

#if KEEPS
// The warp's rows of the left operand of dot products.
struct Left {
    u32 x[W / 16][4];
    DEVICE void load(const Tile<ROWS>& tile) {
#pragma unroll
        for (int k = 0; k < W; k += 16) load_left(x[k / 16], tile, k);
        pin(x);
    }
};
#else
struct Left {
    const Tile<ROWS>* tile;
    DEVICE void load(const Tile<ROWS>& from) { tile = &from; }
};
#endif

#ifdef HAS_WARPGROUPS

// Starts to compute the dot products of the group's rows of `left` and all rows of `right`.
template <int columns>
DEVICE void start_dots(float (&s)[columns / 8][4], const Left& left, const Tile<columns>& right) {
    u64 b = describe(&right.panels[0][0][0], 0);
#if !KEEPS
    u64 a = describe(&left.tile->panels[0][group() * 64][0], 0);
#endif
    pin(s);
    start_products();
#pragma unroll
    for (int k = 0; k < W; k += 16) {
        u64 y = b + (k / 64 * columns * 128 + k % 64 * 2) / 16;
#if KEEPS
        multiply<false>(s, left.x[k / 16], y, k > 0);
#else
        multiply(s, a + (k / 64 * ROWS * 128 + k % 64 * 2) / 16, y, k > 0);
#endif
    }
    end_products();
}

// Starts to add the product of the group's rows of factors and `right`.
template <int count>
DEVICE void start_product(float (&o)[W / 8][4], const u32 (&p)[count][4], const Tile<count * 16>& right) {
    u64 b = describe(&right.panels[0][0][0], sizeof right.panels[0]);
    pin(o);
    start_products();
#pragma unroll
    for (int k = 0; k < count; k++) multiply<true>(o, p[k], b + k * (16 * 128 / 16), true);
    end_products();
}

#else

template <int columns>
DEVICE void start_dots(float (&s)[columns / 8][4], const Left& left, const Tile<columns>& right) {
    clear(s);
#pragma unroll
    for (int k = 0; k < W; k += 16) {
#if KEEPS
        const u32(&a)[4] = left.x[k / 16];
#else
        u32 a[4];
        load_left(a, *left.tile, k);
#endif
#pragma unroll
        for (int n = 0; n < columns; n += 16) {
            u32 b[4];
            load_matrices<false>(b, right.at(n + lane() / 16 * 8 + lane() % 8, k + lane() / 8 % 2 * 8));
            multiply_add(s[n / 8], a, {b[0], b[1]});
            multiply_add(s[n / 8 + 1], a, {b[2], b[3]});
        }
    }
}

template <int count>
DEVICE void start_product(float (&o)[W / 8][4], const u32 (&p)[count][4], const Tile<count * 16>& right) {
#pragma unroll
    for (int k = 0; k < count; k++)
#pragma unroll
        for (int n = 0; n < W; n += 16) {
            u32 b[4];
            load_matrices<true>(b, right.at(k * 16 + lane() / 8 % 2 * 8 + lane() % 8, n + lane() / 16 * 8));
            multiply_add(o[n / 8], p[k], {b[0], b[1]});
            multiply_add(o[n / 8 + 1], p[k], {b[2], b[3]});
        }
}

#endif

// Rounds results of dot products to the left operand of a product.
template <int count> DEVICE void to_left(u32 (&p)[count][4], const float (&s)[count * 2][4]) {
#pragma unroll
    for (int k = 0; k < count; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][i] = pair_of(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
    pin(p);
}

// The element that `to_left` rounded.
template <int count> DEVICE float from_left(const u32 (&p)[count][4], int j, int e) {
    T x;
    x.bits = (unsigned short)(p[j / 2][j % 2 * 2 + e / 2] >> (e % 2 * 16));
    return acc(x);
}

// Writes the thread's elements times a factor for each of its two rows, from `row` of a contiguous matrix.
DEVICE void store(T* to, int row, int rows, int columns, const float (&x)[W / 8][4], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int r = row + thread_row() + 8 * i;
        if (r >= rows) break;
        T* at = to + (i64)r * columns;
        float factor = i == 0 ? upper : lower;
#pragma unroll
        for (int j = 0; j < W / 8; j++) {
            int c = j * 8 + thread_column();
            if (c < columns) *(u32*)(at + c) = pair_of(x[j][2 * i] * factor, x[j][2 * i + 1] * factor);
        }
    }
}

// Which rows of which head a block computes. Heads whose other operands fit into the cache run together, the longest work first.
struct Place {
    int row;
    u64 head;
    DEVICE Place(const Attention& a, bool from_the_end) {
        u32 together = (u32)a.together, tiles = (u32)a.tiles, first = blockIdx.x / (together * tiles) * together;
        u32 heads = (u32)a.heads - first < together ? (u32)a.heads - first : together;
        u32 rest = blockIdx.x % (together * tiles), tile = rest / heads;
        row = (int)(from_the_end ? tiles - 1 - tile : tile) * ROWS;
        head = first + rest % heads;
    }
};

// The keys that a query attends to are those before this one.
DEVICE int end_of_keys(const Attention& a, int query) {
    i64 end = (i64)a.first_query + query + 1;
    return a.causal && end < (i64)a.keys ? (int)end : (int)a.keys;
}

// The backward pass computes the probabilities of each tile again. As the gradients of queries and those of keys and values are sums
// over different rows, they are kernels of their own: the results are the same each time.
//
// `dots` has two planes of numbers for each head: what shifts the logits of a query, and the dot product of its output and gradient.
// Planes are padded to full tiles.
DEVICE int padded(const Attention& a) { return ((int)a.queries + 127) / 128 * 128; }
