// Cumulative sums along the middle dim of contiguous arrays `[outer, n, inner]`. Floating-point numbers are summed in double
// precision.

#if DTYPE < 2
typedef i64 Running;
typedef i64 Out;
DEVICE Out result(Running x) { return x; }
#else
typedef double Running;
typedef T Out;
DEVICE Out result(Running x) { return to<T>((A)x); }
#endif

// Must match `Scan` in `scan.rs`.
struct Scan {
    const T* x;
    Out* out;
    // The sums of all chunks: written by the kernels for sums; read by the others, as running sums along each line.
    Running* sums;
    u64 lines, n, inner;
    // The number of chunks of each line, and of elements in each.
    u64 splits, chunk;
    // The number of threads for each chunk, and of elements that are loaded at once.
    u32 team, vector;
    u64 is_reverse;
};

// Loads elements `i` to `i + V` in the order of the sum.
template <int V> DEVICE Pack<T, V> load(const Scan& a, u64 line, u64 i) {
    u64 at = line * a.n + (a.is_reverse ? a.n - i - V : i);
    Pack<T, V> pack = *(const Pack<T, V>*)(a.x + at);
    Pack<T, V> ordered;
    for (int j = 0; j < V; j++) ordered.values[j] = a.is_reverse ? pack.values[V - 1 - j] : pack.values[j];
    return ordered;
}
template <int V> DEVICE void store(const Scan& a, u64 line, u64 i, const Pack<Running, V>& sums) {
    u64 at = line * a.n + (a.is_reverse ? a.n - i - V : i);
    Pack<Out, V> pack;
    for (int j = 0; j < V; j++) pack.values[j] = result(a.is_reverse ? sums.values[V - 1 - j] : sums.values[j]);
    *(Pack<Out, V>*)(a.out + at) = pack;
}

// Returns the sum of the values of earlier threads of the team; sets `all` to that of all threads.
DEVICE Running sum_before(const Scan& a, Running x, Running& all) {
    __shared__ Running sums[WARP];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int delta = 1; delta < WARP; delta *= 2) {
        Running other = __shfl_up_sync(FULL_WARP, x, delta);
        if (lane >= delta) x = add(other, x);
    }
    Running before = __shfl_up_sync(FULL_WARP, x, 1);
    if (lane == 0) before = Running(0);
    all = __shfl_sync(FULL_WARP, x, WARP - 1);
    if (a.team == WARP) return before;
    if (lane == 0) sums[warp] = all;
    __syncthreads();
    Running warps_before = Running(0);
    all = Running(0);
    for (u32 w = 0; w < blockDim.x / WARP; w++) {
        if (w == warp) warps_before = all;
        all = add(all, sums[w]);
    }
    __syncthreads();
    return add(warps_before, before);
}

// A warp or a block for each chunk of a line, if `inner` is 1.
template <int V> DEVICE void scan_rows(const Scan& a) {
    u32 lane = threadIdx.x % a.team;
    u64 per_block = blockDim.x / a.team, jobs = a.lines * a.splits;
    for (u64 job = blockIdx.x * per_block + threadIdx.x / a.team; job < jobs; job += gridDim.x * per_block) {
        u64 line = job / a.splits, split = job - line * a.splits;
        u64 from = split * a.chunk, end = from + a.chunk < a.n ? from + a.chunk : a.n;
        Running carry = split > 0 ? a.sums[job - 1] : Running(0);
        for (u64 start = from; start < end; start += a.team * V) {
            u64 i = start + lane * V;
            Pack<Running, V> sums;
            Running sum = Running(0), all;
            if (i < end) {
                Pack<T, V> x = load<V>(a, line, i);
                for (int j = 0; j < V; j++) sums.values[j] = sum = add(sum, (Running)acc(x.values[j]));
            }
            Running before = add(carry, sum_before(a, sum, all));
            carry = add(carry, all);
            if (i < end) {
                for (int j = 0; j < V; j++) sums.values[j] = add(before, sums.values[j]);
                store<V>(a, line, i, sums);
            }
        }
    }
}
BLOCK_ENTRY(scan_rows, Scan) { a.vector == 1 ? scan_rows<1>(a) : scan_rows<16 / sizeof(T)>(a); }

// The sum of each chunk, with a block for each.
template <int V> DEVICE void sum_rows(const Scan& a) {
    __shared__ Running buffer[WARP];
    for (u64 job = blockIdx.x; job < a.lines * a.splits; job += gridDim.x) {
        u64 line = job / a.splits, from = (job - line * a.splits) * a.chunk;
        u64 end = from + a.chunk < a.n ? from + a.chunk : a.n;
        Running sum = Running(0);
#pragma unroll 4
        for (u64 i = from + threadIdx.x * V; i < end; i += blockDim.x * V) {
            Pack<T, V> x = load<V>(a, line, i);
            for (int j = 0; j < V; j++) sum = add(sum, (Running)acc(x.values[j]));
        }
        sum = block_reduce(sum, Running(0), Sum(), buffer);
        if (threadIdx.x == 0) a.sums[job] = sum;
    }
}
BLOCK_ENTRY(sum_rows, Scan) { a.vector == 1 ? sum_rows<1>(a) : sum_rows<16 / sizeof(T)>(a); }

#define LOADS 8

// A thread for each chunk of a line: neighbouring threads work on neighbouring lines.
template <bool WRITES> DEVICE void scan_columns(const Scan& a) {
    for (u64 job = FIRST; job < a.lines * a.splits; job += STEP) {
        u64 split = job / a.lines, line = job - split * a.lines;
        u64 outer = line / a.inner, first = outer * a.n * a.inner + (line - outer * a.inner);
        u64 from = split * a.chunk, end = from + a.chunk < a.n ? from + a.chunk : a.n;
        Running sum = WRITES && split > 0 ? a.sums[line * a.splits + split - 1] : Running(0);
        for (u64 i = from; i < end; i += LOADS) {
            T x[LOADS];
            u64 at[LOADS];
            int n = end - i < LOADS ? (int)(end - i) : LOADS;
            for (int u = 0; u < LOADS; u++) {
                at[u] = first + (a.is_reverse ? a.n - 1 - (i + u) : i + u) * a.inner;
                if (u < n) x[u] = a.x[at[u]];
            }
            for (int u = 0; u < LOADS; u++) {
                if (u >= n) break;
                sum = add(sum, (Running)acc(x[u]));
                if (WRITES) a.out[at[u]] = result(sum);
            }
        }
        if (!WRITES) a.sums[line * a.splits + split] = sum;
    }
}
ENTRY(scan_columns, Scan) { scan_columns<true>(a); }
ENTRY(sum_columns, Scan) { scan_columns<false>(a); }
