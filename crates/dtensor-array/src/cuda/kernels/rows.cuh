// Work on the lines of contiguous arrays `[outer, n, inner]` along the middle dim, with a team of threads for each line. Must match
// `rows.rs`.

struct Lines {
    // `outer · inner`, and the elements of each line.
    u64 lines, n, inner;
    // The number of threads for each line, and of lines of a block. If `inner` is 1, a team is a part of a warp or the block;
    // else neighbouring threads work on neighbouring lines.
    u32 team, across;
    // The number of elements that are loaded at once.
    u32 vector;
    // The number of elements that shared memory has for each line of a block, or 0 if it does not hold them.
    u32 room;
};

// A number of elements, as a type.
template <int N_> struct Width {
    static constexpr int N = N_;
};
// The number of elements of a pack.
#define WIDTH(pack) ((int)(sizeof(pack) / sizeof(T)))

// A line, and a thread of its team. Threads without a line have `n` = 0.
struct Line {
    u64 index, n;
    // The index of the first element, and the distance to the next one.
    u64 first, stride;
    u32 lane, team, across;
    // The place of the line in its block.
    u32 slot;

    // Combines a value of each thread of the team. All get the result. All threads of the block must call this.
    template <class V, class F> DEVICE V reduce(V x, V identity, F f) const {
        __shared__ V buffer[256];
        if (stride > 1) {
            if (team == 1) return x;
            buffer[threadIdx.x] = x;
            __syncthreads();
            for (u32 half = team / 2; half > 0; half /= 2) {
                if (lane < half) buffer[threadIdx.x] = f(buffer[threadIdx.x], buffer[threadIdx.x + half * across]);
                __syncthreads();
            }
            x = buffer[slot];
            __syncthreads();
            return x;
        }
        if (team > WARP) return block_reduce(x, identity, f, buffer);
        for (u32 mask = team / 2; mask > 0; mask /= 2) x = f(x, shuffle_xor(x, mask));
        return x;
    }
    template <class V> DEVICE V sum(V x) const { return reduce(x, V(0), Sum()); }

    template <int V> DEVICE Pack<T, V> load(const T* x, u64 i) const {
        return *(const Pack<T, V>*)(x + first + (V == 1 ? i * stride : i));
    }
    template <int V> DEVICE void store(T* x, u64 i, const Pack<T, V>& pack) const {
        *(Pack<T, V>*)(x + first + (V == 1 ? i * stride : i)) = pack;
    }
    // The number of elements before the first aligned pack, if `inner` is 1.
    template <int V> DEVICE u64 head() const {
        u64 before = V == 1 ? 0 : (V - first % V) % V;
        return before < n ? before : n;
    }
    // Calls `f(i, Width<N>())` for the elements of this thread, of which the first is `i`: `N` is `V`, or 1 at the ends of the line.
    template <int V, class F> DEVICE void walk(F f) const {
        u64 start = head<V>(), end = start + (n - start) / V * V;
        if constexpr (V > 1)
            for (u64 i = lane; i < start; i += team) f(i, Width<1>());
        for (u64 i = start + lane * V; i < end; i += team * V) f(i, Width<V>());
        if constexpr (V > 1)
            for (u64 i = end + lane; i < n; i += team) f(i, Width<1>());
    }
    // As `walk`, with the elements: `f(i, pack)`.
    template <int V, class F> DEVICE void each(const T* x, F f) const {
        constexpr int LOADS = 4;
        u64 start = head<V>(), end = start + (n - start) / V * V, step = team * V, i = start + lane * V;
        if constexpr (V > 1)
            for (u64 k = lane; k < start; k += team) f(k, load<1>(x, k));
        for (; i + (LOADS - 1) * step < end; i += LOADS * step) {
            Pack<T, V> packs[LOADS];
            for (int u = 0; u < LOADS; u++) packs[u] = load<V>(x, i + u * step);
            for (int u = 0; u < LOADS; u++) f(i + u * step, packs[u]);
        }
        for (; i < end; i += step) f(i, load<V>(x, i));
        if constexpr (V > 1)
            for (u64 k = end + lane; k < n; k += team) f(k, load<1>(x, k));
    }
    // As `each`, for two arrays: `f(i, x, y)`.
    template <int V, class F> DEVICE void each(const T* x, const T* y, F f) const {
        u64 start = head<V>(), end = start + (n - start) / V * V, step = team * V, i = start + lane * V;
        if constexpr (V > 1)
            for (u64 k = lane; k < start; k += team) f(k, load<1>(x, k), load<1>(y, k));
        for (; i + step < end; i += 2 * step) {
            Pack<T, V> xs[2] = {load<V>(x, i), load<V>(x, i + step)}, ys[2] = {load<V>(y, i), load<V>(y, i + step)};
            for (int u = 0; u < 2; u++) f(i + u * step, xs[u], ys[u]);
        }
        for (; i < end; i += step) f(i, load<V>(x, i), load<V>(y, i));
        if constexpr (V > 1)
            for (u64 k = end + lane; k < n; k += team) f(k, load<1>(x, k), load<1>(y, k));
    }
};

// Shared memory for line `k` of those that a thread keeps: each thread reads only what it has written.
template <int V> struct Kept {
    T* data;
    DEVICE Kept(unsigned char* shared, const Lines& a, const Line& line, u32 k) {
        // Packs are aligned as those of the line are.
        data = (T*)shared + ((u64)k * a.across + line.slot) * a.room + line.first % V;
    }
    template <int N> DEVICE void set(u64 i, const Pack<T, N>& pack) { *(Pack<T, N>*)(data + i) = pack; }
    template <int N> DEVICE Pack<T, N> get(u64 i) const { return *(const Pack<T, N>*)(data + i); }
};

// Calls `body(line)` for each line of this thread's team. All threads of a block call it equally often.
template <class F> DEVICE void each_line(const Lines& a, F body) {
    Line line;
    line.stride = a.inner;
    line.team = a.team;
    line.across = a.across;
    bool is_column = a.inner > 1;
    line.slot = is_column ? threadIdx.x % a.across : threadIdx.x / a.team;
    line.lane = is_column ? threadIdx.x / a.across : threadIdx.x % a.team;
    for (u64 start = (u64)blockIdx.x * a.across; start < a.lines; start += (u64)gridDim.x * a.across) {
        line.index = start + line.slot;
        line.n = line.index < a.lines ? a.n : 0;
        u64 outer = is_column ? line.index / a.inner : line.index;
        line.first = outer * a.n * a.inner + (line.index - outer * a.inner);
        body(line);
    }
}

// The largest number; ignores NaN.
struct LargestNumber {
    template <class V> DEVICE V operator()(V x, V y) const { return y > x ? y : x; }
};

#if DTYPE >= 2
// The exponential of a number that is at most 0. Fewer bits suffice for halves, whose kernels would else be bound by arithmetic.
DEVICE A exp_below(A x) {
#if DTYPE == 2 || DTYPE == 3
    return __expf(x);
#else
    return exp(x);
#endif
}

// The largest number of some elements, and the sum of `exp(x − largest)`.
struct ExpSum {
    A largest, sum;

    // What is subtracted: −∞ would give NaN.
    static DEVICE A shift(A largest) { return largest == lowest<A>() ? A(0) : largest; }

    template <int V> DEVICE void take(const Pack<T, V>& pack) {
        A here = largest;
        for (int j = 0; j < V; j++) here = LargestNumber()(here, acc(pack.values[j]));
        if (here > largest) {
            sum *= exp(largest - here);
            largest = here;
        }
        A by = shift(largest), terms = A(0);
        for (int j = 0; j < V; j++) terms += exp_below(acc(pack.values[j]) - by);
        sum += terms;
    }

    // Combines those of a team. If the line contains NaN or +∞, or only −∞, the sum is NaN.
    DEVICE void combine(const Line& line) {
        A all = line.reduce(largest, lowest<A>(), LargestNumber());
        if (largest != all) sum *= exp(largest - all);
        sum = line.sum(sum);
        largest = all;
        if (all == lowest<A>() && line.n > 0) sum = all - all;
    }
};
#endif
