// Copies between layouts, and arrays created from numbers.

struct Same {
    DEVICE T operator()(T x) const { return x; }
};
ENTRY(copy, Map<1>) { map1<T, T>(a, Same()); }

// Must match `Tabulate` in `copy.rs`.
struct Tabulate {
    T* out;
    u64 numel;
    double numbers[4];
    i64 integers[4];
    Window window;
};

// Stores a number in an element: floating-point numbers are rounded once, integers truncated.
DEVICE T from_double(double x) {
#if DTYPE == 0
    return (T)(i64)x;
#elif DTYPE == 1
    return (T)x;
#elif DTYPE == 5
    return x;
#else
    return to<T>((float)x);
#endif
}

ENTRY(fill, Tabulate) {
    T value = *(const T*)&a.integers[0];
    for (u64 i = FIRST; i < a.numel; i += STEP) a.out[i] = value;
}

ENTRY(arange, Tabulate) {
    for (u64 i = FIRST; i < a.numel; i += STEP)
        a.out[i] = from_double(a.numbers[0] + (double)full_index(a.window, i) * a.numbers[1]);
}

#if DTYPE < 2
ENTRY(arange_int, Tabulate) {
    for (u64 i = FIRST; i < a.numel; i += STEP)
        a.out[i] = (T)add(a.integers[0], multiply(a.integers[1], (i64)full_index(a.window, i)));
}
#endif

#if DTYPE == 5
// From `numbers[0]` to `numbers[1]` in steps of `numbers[2]`; the powers of `numbers[3]` if `integers[1]` is not 0.
ENTRY(linspace, Tabulate) {
    u64 steps = (u64)a.integers[0];
    for (u64 i = FIRST; i < a.numel; i += STEP) {
        u64 at = full_index(a.window, i);
        // From the nearer end, so that both ends are exact.
        double x = at < (steps + 1) / 2 ? a.numbers[0] + a.numbers[2] * (double)at
                                        : a.numbers[1] - a.numbers[2] * (double)(steps - 1 - at);
        a.out[i] = a.integers[1] ? pow(a.numbers[3], x) : x;
    }
}
#endif

ENTRY(eye, Tabulate) {
    u64 columns = (u64)a.integers[0];
    for (u64 i = FIRST; i < a.numel; i += STEP) {
        u64 at = full_index(a.window, i);
        a.out[i] = to<T>(at / columns == at % columns ? A(1) : A(0));
    }
}

#define TILE 64
#define TILE_DIMS 6
// The padding of a row of a tile, so that the elements of a column are in different banks.
#define TILE_PADDING (sizeof(T) >= 4 ? 1 : 4 / sizeof(T))

// Must match `Transposed` in `copy.rs`. Strides count elements.
struct Transposed {
    T* out;
    const T* in;
    // The numbers of tiles: all, along the columns, and along the rows.
    u64 tiles, across, down;
    // The last dim of the result, which has stride 1 there, and the dim that has the smallest stride in the source.
    u64 columns, rows;
    u64 column_stride, row_stride;
    u64 out_stride;
    // The other dims.
    u32 ndim, reserved;
    struct {
        u64 size, in, out;
    } dims[TILE_DIMS];
};

// Copies tile by tile, so that both arrays are accessed along a dim with a small stride.
BLOCK_ENTRY(transpose, Transposed) {
    __shared__ T tile[TILE][TILE + TILE_PADDING];
    for (u64 t = blockIdx.x; t < a.tiles; t += gridDim.x) {
        u64 rest = t / a.across, next = rest / a.down;
        u64 column = (t - rest * a.across) * TILE, row = (rest - next * a.down) * TILE;
        const T* in = a.in + column * a.column_stride + row * a.row_stride;
        T* out = a.out + row * a.out_stride + column;
        rest = next;
        for (int d = (int)a.ndim - 1; d >= 0; d--) {
            next = rest / a.dims[d].size;
            u64 at = rest - next * a.dims[d].size;
            in += at * a.dims[d].in;
            out += at * a.dims[d].out;
            rest = next;
        }
        u32 columns = (u32)(a.columns - column < TILE ? a.columns - column : TILE);
        u32 rows = (u32)(a.rows - row < TILE ? a.rows - row : TILE);
        u32 lane = threadIdx.x % TILE, first = threadIdx.x / TILE, step = blockDim.x / TILE;
#pragma unroll 16
        for (u32 c = first; c < TILE; c += step)
            if (c < columns && lane < rows) tile[c][lane] = in[c * a.column_stride + lane * a.row_stride];
        __syncthreads();
#pragma unroll 16
        for (u32 r = first; r < TILE; r += step)
            if (r < rows && lane < columns) out[r * a.out_stride + lane] = tile[lane][r];
        __syncthreads();
    }
}
