// Scaled dot-product attention. A block computes `BLOCK_ROWS` rows of a head, in a loop over tiles of `TILE` columns: the logits of
// a tile are in registers, and nothing of the size of the full matrix is in memory.
//
// Two products do the work, `add_dots` and `add_product`. Half precision uses tensor cores, and the other types multiply in loops.
// They differ in which elements of a tile a thread holds: see `row_of`, `column_of` and `out_column_of`.

#define THREADS 128
// The columns of a tile.
#define TILE 64
// `M` is the number of times 16 rows that a warp computes, and `W` the number of columns of the operands that are in shared memory
// at a time.
#define WARP_ROWS (16 * M)
#define BLOCK_ROWS (THREADS / WARP * WARP_ROWS)

// The tiles of the operands of a loop: with two of each, one is loaded while the other is used.
#define STAGES (USES_MMA ? 2 : 1)
// A function for rare cases, which is not copied into each place that calls it.
#ifdef EMULATED
#define RARE inline
#else
#define RARE static __device__ __noinline__
#endif

// The rows that a thread has elements of, and the neighbouring threads that share a row.
#define R (M * (USES_MMA ? 2 : 4))
#define GROUP (USES_MMA ? 4 : 8)
// The elements of `n` columns that a thread has.
#define OF(n) ((n) / GROUP)
// How many neighbouring columns of the output a thread has at a time.
#define RUN (USES_MMA ? 2 : V)

// The matrix of a head.
struct Side {
    const T* at;
    i64 stride;
    u64 rows, columns;
    // Whether rows can be loaded 16 bytes at a time.
    bool is_aligned;
};
DEVICE Side side(const Matrices& m, u64 head, u64 rows, u64 columns) {
    const T* at = (const T*)m.at + offset_of(m, head);
    return Side{at, m.row, rows, columns, (u64)at % 16 == 0 && m.row % V == 0 && columns % V == 0};
}

// The first row of this thread's warp in a tile.
DEVICE int warp_row() { return (int)(threadIdx.x / WARP) * WARP_ROWS; }

// The row of a tile, of the thread's `i`-th row.
DEVICE int row_of(int i) { return warp_row() + lane() / GROUP + (WARP_ROWS / R) * i; }
// The column of a thread's `j`-th logit of a row.
DEVICE int column_of(int j) { return USES_MMA ? j / 2 * 8 + lane() % 4 * 2 + j % 2 : lane() % 8 + 8 * j; }
// The column of a thread's `j`-th element of a row of the output.
DEVICE int out_column_of(int j) {
    return USES_MMA ? column_of(j) : j / V * (8 * V) + lane() % 8 * V + j % V;
}

template <int N> DEVICE void clear(A (&x)[R][N]) {
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < N; j++) x[i][j] = A(0);
}

template <class F> DEVICE A row_reduce(A x, F f) {
    for (int mask = GROUP / 2; mask > 0; mask /= 2) x = f(x, shuffle_xor(x, mask));
    return x;
}

// How many of `n` there are from `first`, at most `N`.
template <int N> DEVICE int part(u64 n, u64 first) { return n <= first ? 0 : n - first < N ? (int)(n - first) : N; }

// `N` rows of `W` columns in shared memory. Rows are padded, so that neighbouring ones are in other banks.
template <int N> struct Rows {
    T rows[N][W + V];
};
// The rows of a block, and those of a tile of its loop.
typedef Rows<BLOCK_ROWS> Block;
typedef Rows<TILE> Tile;

// Loads a tile whose rows are not aligned.
RARE void load_by_element(T (*to_rows)[W + V], int count, const T* first, i64 stride, int rows, int columns) {
    for (int i = threadIdx.x; i < count * W; i += THREADS) {
        int r = i / W, c = i % W;
        to_rows[r][c] = r < rows && c < columns ? first[r * stride + c] : to<T>(A(0));
    }
}

// Loads rows from `row` and columns from `column` of a matrix. What is outside the matrix is zero.
template <int N> DEVICE void load(Rows<N>& tile, const Side& x, u64 row, u64 column) {
    const T* first = x.at + (i64)row * x.stride + column;
    int rows = part<N>(x.rows, row), columns = part<W>(x.columns, column);
    if (!x.is_aligned) return load_by_element(tile.rows, N, first, x.stride, rows, columns);
    constexpr int PER_ROW = W / V, STEP_ROWS = THREADS / PER_ROW;
    int r = threadIdx.x / PER_ROW, c = threadIdx.x % PER_ROW * V;
    const T* from = first + r * x.stride + c;
    for (; r < N; r += STEP_ROWS) {
        bool is_inside = r < rows && c < columns;
        load_pack(&tile.rows[r][c], is_inside ? from : x.at, is_inside);
        from += STEP_ROWS * x.stride;
    }
}

#if USES_MMA

// Where the fallback of the other types keeps a warp's factors.
struct Stage {};

// Adds the product of two matrices to the thread's elements `2 j` and `2 j + 1` of its rows `2 m` and `2 m + 1`.
template <int N> DEVICE void add_tensor(float (&x)[R][N], int m, int j, const u32 (&a)[4], u32 b0, u32 b1) {
    float c[4] = {x[2 * m][2 * j], x[2 * m][2 * j + 1], x[2 * m + 1][2 * j], x[2 * m + 1][2 * j + 1]};
    const u32 b[2] = {b0, b1};
    multiply_add(c, a, b);
    x[2 * m][2 * j] = c[0];
    x[2 * m][2 * j + 1] = c[1];
    x[2 * m + 1][2 * j] = c[2];
    x[2 * m + 1][2 * j + 1] = c[3];
}

// Adds the dot products of the warp's rows of `left` and all rows of `right`, over the first `width` columns.
DEVICE void add_dots(A (&s)[R][OF(TILE)], const Block& left, const Tile& right, int width) {
#pragma unroll
    for (int k = 0; k < W; k += 16) {
        if (k >= width) break;
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            load_matrices<false>(a[m], &left.rows[warp_row() + 16 * m + lane() % 16][k + lane() / 16 * 8]);
#pragma unroll
        for (int n = 0; n < TILE; n += 16) {
            u32 b[4];
            load_matrices<false>(b, &right.rows[n + lane() / 16 * 8 + lane() % 8][k + lane() / 8 % 2 * 8]);
#pragma unroll
            for (int m = 0; m < M; m++) {
                add_tensor(s, m, n / 8, a[m], b[0], b[1]);
                add_tensor(s, m, n / 8 + 1, a[m], b[2], b[3]);
            }
        }
    }
}

// Adds the product of the warp's rows of factors `p` and the first `width` columns of `right`.
DEVICE void add_product(A (&o)[R][OF(W)], const A (&p)[R][OF(TILE)], const Tile& right, int width, Stage*) {
#pragma unroll
    for (int k = 0; k < TILE; k += 16) {
        const int j = k / 4;
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) a[m][i] = pair_of(p[2 * m + i % 2][j + i / 2 * 2], p[2 * m + i % 2][j + i / 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < W; n += 16) {
            if (n < width) {
                u32 b[4];
                load_matrices<true>(b, &right.rows[k + lane() / 8 % 2 * 8 + lane() % 8][n + lane() / 16 * 8]);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    add_tensor(o, m, n / 8, a[m], b[0], b[1]);
                    add_tensor(o, m, n / 8 + 1, a[m], b[2], b[3]);
                }
            }
        }
    }
}

DEVICE A exponential(A x) { return __expf(x); }

#else

// A warp's factors.
struct Stage {
    T rows[WARP_ROWS][TILE + V];
};

DEVICE float fused(float x, float y, float z) { return fmaf(x, y, z); }
DEVICE double fused(double x, double y, double z) { return fma(x, y, z); }

DEVICE void add_dots(A (&s)[R][OF(TILE)], const Block& left, const Tile& right, int width) {
    for (int k = 0; k < width; k += V) {
        Pack<T, V> x[R];
#pragma unroll
        for (int i = 0; i < R; i++) x[i] = *(const Pack<T, V>*)&left.rows[row_of(i)][k];
#pragma unroll
        for (int j = 0; j < OF(TILE); j++) {
            Pack<T, V> y = *(const Pack<T, V>*)&right.rows[column_of(j)][k];
#pragma unroll
            for (int i = 0; i < R; i++)
#pragma unroll
                for (int e = 0; e < V; e++) s[i][j] = fused(x[i].values[e], y.values[e], s[i][j]);
        }
    }
}

DEVICE void add_product(A (&o)[R][OF(W)], const A (&p)[R][OF(TILE)], const Tile& right, int width, Stage* stages) {
    Stage& stage = stages[threadIdx.x / WARP];
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < OF(TILE); j++) stage.rows[row_of(i) - warp_row()][column_of(j)] = p[i][j];
    __syncwarp();
    for (int k = 0; k < TILE; k += V) {
        Pack<T, V> x[R];
#pragma unroll
        for (int i = 0; i < R; i++) x[i] = *(const Pack<T, V>*)&stage.rows[row_of(i) - warp_row()][k];
#pragma unroll
        for (int e = 0; e < V; e++)
#pragma unroll
            for (int n = 0; n < OF(W); n += V) {
                if (n * 8 < width) {
                    Pack<T, V> y = *(const Pack<T, V>*)&right.rows[k + e][out_column_of(n)];
#pragma unroll
                    for (int i = 0; i < R; i++)
#pragma unroll
                        for (int c = 0; c < V; c++)
                            o[i][n + c] = fused(x[i].values[e], y.values[c], o[i][n + c]);
                }
            }
    }
    __syncwarp();
}

DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }

#endif

DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }

RARE void load_columns(Block* left, Tile* right, Side x, u64 row, Side y, u64 column, u64 k) {
    __syncthreads();
    load(*left, x, row, k);
    load(*right, y, column, k);
    wait_for_loads();
    __syncthreads();
}

// Adds the dot products of the rows of `x` from `row` and those of `y` from `column`. If `is_loaded` is true, the tiles hold all of
// their columns. Else they are loaded, and hold the last columns after this.
DEVICE void add_all_dots(A (&s)[R][OF(TILE)], Block& left, Tile& right, const Side& x, u64 row, const Side& y, u64 column,
                         bool is_loaded) {
    for (u64 k = 0; k < x.columns; k += W) {
        if (!is_loaded) load_columns(&left, &right, x, row, y, column, k);
        add_dots(s, left, right, part<W>(x.columns, k));
    }
}

RARE A masked(A x, u32 kind, const void* mask, i64 at) {
    if (kind == 1) return ((const unsigned char*)mask)[at] ? x : lowest<A>();
    return x + acc(((const T*)mask)[at]);
}

RARE Words random_words(Draw draw, u64 block) { return philox(draw, block); }

// The mask and the dropout of a head.
struct Rule {
    const Attention& a;
    A scale, keep_scale;
    const void* mask;
    // The index in the full tensor of the weight of the first query and key.
    u64 first_weight;
    u64 block;
    Words words;

    DEVICE Rule(const Attention& a, u64 head) 
        : a(a), scale((A)a.scale), keep_scale((A)a.keep_scale), mask(nullptr), first_weight(0), block(~0ull) {
        i64 offset = a.mask_kind ? offset_of(a.mask, head) : 0;
        if (a.mask_kind == 1) mask = (const unsigned char*)a.mask.at + offset;
        if (a.mask_kind == 2) mask = (const T*)a.mask.at + offset;
        if (a.dropout) first_weight = (full_index(a.window, head) * a.all_queries + a.first_query) * a.keys;
    }

    // The logit of a query and a key from their dot product. If the query does not attend to the key, it is −∞.
    DEVICE A logit(A dot, bool is_seen, u64 query, u64 key) const {
        if (!is_seen) return lowest<A>();
        A x = dot * scale;
        if (a.mask_kind == 0) return x;
        return masked(x, a.mask_kind, mask, (i64)query * a.mask.row + (i64)key * a.mask.column);
    }

    // The probability, without dropout, of a query that attends to some key.
    DEVICE A probability(A dot, bool is_seen, u64 query, u64 key, A lse) const {
        // If a query attends to no key, its logits are −∞, and a shift of 0 makes their exponentials 0.
        return exponential(logit(dot, is_seen, query, key) - (lse == lowest<A>() ? A(0) : lse));
    }

    // The factor of dropout.
    DEVICE A keep(u64 query, u64 key) {
        u64 index = first_weight + query * a.keys + key;
        if (index / 4 != block) {
            block = index / 4;
            words = random_words(a.draw, block);
        }
        u32 k = (u32)(index % 4);
        u32 x = k & 1 ? words.x[1] : words.x[0], y = k & 1 ? words.x[3] : words.x[2];
        return a.threshold.contains(k & 2 ? y : x) ? A(0) : keep_scale;
    }
};

struct Greater {
    DEVICE A operator()(A x, A y) const { return y > x ? y : x; }
};

// Writes `x · factor` to a row of a matrix with `columns` columns, from `column`.
DEVICE void store_row(T* row, u64 column, u64 columns, const A (&x)[OF(W)], A factor, bool is_zero) {
#pragma unroll
    for (int j = 0; j < OF(W); j += RUN) {
        Pack<T, RUN> pack;
        for (int e = 0; e < RUN; e++) pack.values[e] = to<T>(is_zero ? A(0) : x[j + e] * factor);
        u64 c = column + out_column_of(j);
        if (columns % RUN == 0) {
            if (c < columns) *(Pack<T, RUN>*)(row + c) = pack;
        } else {
            for (int e = 0; e < RUN; e++)
                if (c + e < columns) row[c + e] = pack.values[e];
        }
    }
}

// Which rows, columns and head a block computes.
struct Place {
    u64 row, column, head;
    DEVICE Place(const Attention& a, bool from_the_end) {
        u64 tile = blockIdx.x % a.tiles, rest = blockIdx.x / a.tiles;
        // The longest work first.
        row = (from_the_end ? a.tiles - 1 - tile : tile) * BLOCK_ROWS;
        column = rest % a.slices * W;
        head = rest / a.slices;
    }
};

// Returns a number in `0..=TILE`.
DEVICE int in_tile(i64 x) { return x < 0 ? 0 : x < TILE ? (int)x : TILE; }

// How many keys of a tile, from `key`, a query attends to.
DEVICE int keys_of(const Attention& a, u64 query, u64 key) {
    if (query >= a.queries) return 0;
    i64 end = a.causal && a.first_query + query + 1 < a.keys ? a.first_query + query + 1 : a.keys;
    return in_tile(end - (i64)key);
}

// The end of the keys that the queries of a block, from `query`, attend to.
DEVICE u64 keys_seen(const Attention& a, u64 query) {
    u64 last = query + BLOCK_ROWS < a.queries ? query + BLOCK_ROWS : a.queries;
    return a.causal && a.first_query + last < a.keys ? a.first_query + last : a.keys;
}
