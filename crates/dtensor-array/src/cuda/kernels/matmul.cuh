// Matrix products, for what the library does not compute: integers, and layouts that it declines.

#define TILE 64
#define INNER 16
#define MATMUL_THREADS 256
// The rows and columns of the result that a thread computes.
#define PER_THREAD 4

// Must match `Args` in `matmul.rs`. Strides count elements.
struct Matmul {
    const T* a;
    const T* b;
    T* out;
    // Added to each row, if given.
    const T* bias;
    u64 m, n, k;
    // The strides of rows, of columns and from one product to the next.
    i64 a_strides[3], b_strides[3];
    u64 out_stride;
    // The number of tiles along a row of the result.
    u64 tiles;
    // Whether the result is added to what is there.
    u32 accumulates;
};

DEVICE float fused(float x, float y, float z) { return fmaf(x, y, z); }
DEVICE double fused(double x, double y, double z) { return fma(x, y, z); }
DEVICE i64 fused(i64 x, i64 y, i64 z) { return add(multiply(x, y), z); }

// Copies a tile of `TILE` rows and `INNER` columns to `tile[column][row]`. What is outside the matrix is zero.
DEVICE void load_tile(A (*tile)[TILE + 4], const T* from, u64 row, u64 rows, u64 column, u64 columns, i64 row_stride,
                      i64 column_stride) {
    bool by_rows = column_stride == 1;
    for (int i = threadIdx.x; i < TILE * INNER; i += MATMUL_THREADS) {
        int r = by_rows ? i / INNER : i % TILE, c = by_rows ? i % INNER : i / TILE;
        bool is_inside = row + r < rows && column + c < columns;
        tile[c][r] = is_inside ? acc(from[(i64)(row + r) * row_stride + (i64)(column + c) * column_stride]) : A(0);
    }
}

BLOCK_ENTRY(matmul, Matmul) {
    __shared__ A left[INNER][TILE + 4], right[INNER][TILE + 4];
    u64 row = blockIdx.x / a.tiles * TILE, column = blockIdx.x % a.tiles * TILE;
    const T* from_a = a.a + (i64)blockIdx.y * a.a_strides[2];
    const T* from_b = a.b + (i64)blockIdx.y * a.b_strides[2];
    int my_row = threadIdx.x / 16 * PER_THREAD, my_column = threadIdx.x % 16 * PER_THREAD;
    A sums[PER_THREAD][PER_THREAD];
    for (int i = 0; i < PER_THREAD; i++)
        for (int j = 0; j < PER_THREAD; j++) sums[i][j] = A(0);
    for (u64 inner = 0; inner < a.k; inner += INNER) {
        load_tile(left, from_a, row, a.m, inner, a.k, a.a_strides[0], a.a_strides[1]);
        load_tile(right, from_b, column, a.n, inner, a.k, a.b_strides[1], a.b_strides[0]);
        __syncthreads();
        for (int c = 0; c < INNER; c++) {
            A x[PER_THREAD], y[PER_THREAD];
            for (int i = 0; i < PER_THREAD; i++) x[i] = left[c][my_row + i];
            for (int j = 0; j < PER_THREAD; j++) y[j] = right[c][my_column + j];
            for (int i = 0; i < PER_THREAD; i++)
                for (int j = 0; j < PER_THREAD; j++) sums[i][j] = fused(x[i], y[j], sums[i][j]);
        }
        __syncthreads();
    }
    T* out = a.out + blockIdx.y * a.out_stride;
    for (int i = 0; i < PER_THREAD; i++) {
        u64 r = row + my_row + i;
        if (r >= a.m) return;
        for (int j = 0; j < PER_THREAD; j++) {
            u64 c = column + my_column + j;
            if (c >= a.n) break;
            T* at = out + r * a.n + c;
            A sum = sums[i][j];
            if (a.bias) sum = add(sum, acc(a.bias[c]));
            if (a.accumulates) sum = add(sum, acc(*at));
            *at = to<T>(sum);
        }
    }
}
