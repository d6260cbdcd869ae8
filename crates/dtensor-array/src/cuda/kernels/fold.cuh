// Folds any dims of an array with any strides into one result for each output. Must match `fold.rs`.
//
// A fold `F` is a struct with
//   typedef ... State;                   // what is known of some elements
//   State identity() const;              // of no elements
//   template <int N> void take(State& state, const Pack<T, N>& x, u64 index, u64 step) const;
//                                        // adds the elements `index`, `index + step`, … of the folded ones
//   State merge(State x, State y) const; // commutative, except for rounding
//   void finish(State state, i64 to) const;  // writes the result at index `to`
// A state that is a struct needs a function `shuffle_xor`.

#define FOLD_AXES 16

// A dim: its size with numbers to divide by it, and its strides in the array and, if it is kept, in the result.
struct FoldAxis {
    u32 size, magic, shift, reserved;
    i64 stride, out;
};

struct Fold {
    const T* x;
    void* out;
    // A second result, if the fold has one.
    void* second;
    // The states of all parts, if the elements of an output are folded by several blocks.
    void* parts;
    u64 outputs, count;
    // The number of parts of each output, and of elements in each part.
    u64 splits, chunk;
    u32 kept_ndim, folded_ndim;
    // Rows: the number of threads for each output. Columns: the number of threads side by side.
    u32 group;
    // The number of elements that are loaded at once.
    u32 vector;
    FoldAxis kept[FOLD_AXES], folded[FOLD_AXES];
    double numbers[2];
};

// The offset of an element in an array and in the result.
struct Place {
    i64 at, out;
};

// Not inlined, because most arrays have one or two axes, and compile faster so.
SEPARATE Place locate_among(const FoldAxis* axes, u32 ndim, u64 i) {
    Place place = {0, 0};
    for (int d = (int)ndim - 1; d > 0; d--) {
        const FoldAxis& axis = axes[d];
        u64 quotient;
        if (i < (1ull << 31)) quotient = (__umulhi((u32)i, axis.magic) + (u32)i) >> axis.shift;
        else quotient = i / axis.size;
        i64 here = (i64)(i - quotient * axis.size);
        place.at += here * axis.stride;
        place.out += here * axis.out;
        i = quotient;
    }
    place.at += (i64)i * axes[0].stride;
    place.out += (i64)i * axes[0].out;
    return place;
}
// Returns the place of index `i` of some axes.
DEVICE Place locate(const FoldAxis* axes, u32 ndim, u64 i) {
    if (ndim > 1) return locate_among(axes, ndim, i);
    return Place{(i64)i * axes[0].stride, (i64)i * axes[0].out};
}
DEVICE i64 folded_offset(const Fold& a, u64 i) { return locate(a.folded, a.folded_ndim, i).at; }

// The number of loads that do not wait for each other.
#define FOLD_LOADS 4

// Takes every `step`-th pack of `V` elements of the folded ones, from `i` to before `end`.
template <int V, class F>
DEVICE void fold_line(const Fold& a, const F& f, typename F::State& state, const T* x, u64 i, u64 end, u64 step) {
    for (; i + (FOLD_LOADS - 1) * step < end; i += FOLD_LOADS * step) {
        if constexpr (V == 1) {
            Pack<T, FOLD_LOADS> pack;
            for (int u = 0; u < FOLD_LOADS; u++) pack.values[u] = x[folded_offset(a, i + u * step)];
            f.take(state, pack, i, step);
        } else {
            Pack<T, V> packs[FOLD_LOADS];
            for (int u = 0; u < FOLD_LOADS; u++) packs[u] = *(const Pack<T, V>*)(x + folded_offset(a, i + u * step));
            for (int u = 0; u < FOLD_LOADS; u++) f.take(state, packs[u], i + u * step, 1);
        }
    }
    for (; i < end; i += step) f.take(state, *(const Pack<T, V>*)(x + folded_offset(a, i)), i, 1);
}

// Merges the states of groups of threads. The first thread of each group gets the result.
template <class F> DEVICE typename F::State fold_group(const F& f, typename F::State state, u32 group) {
    typedef typename F::State State;
    __shared__ State buffer[WARP];
    for (u32 mask = (group < WARP ? group : WARP) / 2; mask > 0; mask /= 2)
        state = f.merge(state, shuffle_xor(state, mask));
    if (group <= WARP) return state;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (lane == 0) buffer[warp] = state;
    __syncthreads();
    if (warp == 0) {
        state = lane < blockDim.x / WARP ? buffer[lane] : f.identity();
        for (u32 mask = WARP / 2; mask > 0; mask /= 2) state = f.merge(state, shuffle_xor(state, mask));
    }
    __syncthreads();
    return state;
}

// Folds with `group` threads for each output, or each part of it: a power of two up to the warp, or the block.
template <int V, class F> DEVICE void fold_rows_by(const Fold& a, const F& f) {
    typedef typename F::State State;
    u32 lane = threadIdx.x % a.group;
    u64 per_block = blockDim.x / a.group, jobs = a.outputs * a.splits;
    for (u64 first = blockIdx.x * per_block; first < jobs; first += gridDim.x * per_block) {
        u64 job = first + threadIdx.x / a.group;
        State state = f.identity();
        Place place = {0, 0};
        if (job < jobs) {
            u64 output = a.splits == 1 ? job : job / a.splits;
            u64 from = (job - output * a.splits) * a.chunk, end = from + a.chunk;
            place = locate(a.kept, a.kept_ndim, output);
            fold_line<V>(a, f, state, a.x + place.at, from + lane * V, end < a.count ? end : a.count, (u64)a.group * V);
        }
        state = fold_group(f, state, a.group);
        if (lane == 0 && job < jobs) {
            if (a.splits == 1) f.finish(state, place.out);
            else ((State*)a.parts)[job] = state;
        }
    }
}
template <class F> DEVICE void fold_rows(const Fold& a, const F& f) {
    if (a.vector == 1) fold_rows_by<1>(a, f);
    else fold_rows_by<16 / sizeof(T)>(a, f);
}

// Folds columns: `group` threads side by side hold the states of `V` outputs each, which are neighbours, and the rows of threads
// of a block share the elements of these outputs.
template <int V, class F> DEVICE void fold_columns_by(const Fold& a, const F& f) {
    typedef typename F::State State;
    __shared__ State buffer[256];
    const FoldAxis& last = a.kept[a.kept_ndim - 1];
    u32 across = threadIdx.x % a.group, down = threadIdx.x / a.group, height = blockDim.x / a.group;
    u64 tiles = (last.size + a.group * V - 1) / (a.group * V);
    u64 tile = blockIdx.x / a.splits, part = blockIdx.x - tile * a.splits;
    u64 outer = tile / tiles, column = ((tile - outer * tiles) * a.group + across) * V;
    State states[V];
    for (int v = 0; v < V; v++) states[v] = f.identity();
    Place place = {0, 0};
    if (column < last.size) {
        if (a.kept_ndim > 1) place = locate(a.kept, a.kept_ndim - 1, outer);
        const T* x = a.x + place.at + (i64)column * last.stride;
        u64 i = part * a.chunk + down, end = (part + 1) * a.chunk;
        if (end > a.count) end = a.count;
        for (; i + (u64)(FOLD_LOADS - 1) * height < end; i += FOLD_LOADS * height) {
            Pack<T, V> packs[FOLD_LOADS];
            for (int u = 0; u < FOLD_LOADS; u++)
                packs[u] = *(const Pack<T, V>*)(x + folded_offset(a, i + u * height));
            for (int v = 0; v < V; v++) {
                Pack<T, FOLD_LOADS> line;
                for (int u = 0; u < FOLD_LOADS; u++) line.values[u] = packs[u].values[v];
                f.take(states[v], line, i, height);
            }
        }
        for (; i < end; i += height) {
            Pack<T, V> pack = *(const Pack<T, V>*)(x + folded_offset(a, i));
            for (int v = 0; v < V; v++) f.take(states[v], Pack<T, 1>{{pack.values[v]}}, i, 1);
        }
    }
    for (int v = 0; height > 1 && v < V; v++) {
        buffer[threadIdx.x] = states[v];
        __syncthreads();
        for (u32 half = height / 2; half > 0; half /= 2) {
            if (down < half) buffer[threadIdx.x] = f.merge(buffer[threadIdx.x], buffer[threadIdx.x + half * a.group]);
            __syncthreads();
        }
        if (down == 0) states[v] = buffer[threadIdx.x];
        __syncthreads();
    }
    if (down == 0 && column < last.size) {
        for (int v = 0; v < V; v++) {
            if (a.splits == 1) f.finish(states[v], place.out + (i64)(column + v) * last.out);
            else ((State*)a.parts)[(outer * last.size + column + v) * a.splits + part] = states[v];
        }
    }
}
template <class F> DEVICE void fold_columns(const Fold& a, const F& f) {
    if (a.vector == 1) fold_columns_by<1>(a, f);
    else fold_columns_by<16 / sizeof(T)>(a, f);
}

// Merges the parts of each output, with `group` threads for each.
template <class F> DEVICE void fold_parts(const Fold& a, const F& f) {
    typedef typename F::State State;
    u32 lane = threadIdx.x % a.group;
    u64 per_block = blockDim.x / a.group;
    for (u64 first = blockIdx.x * per_block; first < a.outputs; first += gridDim.x * per_block) {
        u64 output = first + threadIdx.x / a.group;
        State state = f.identity();
        Place place = {0, 0};
        if (output < a.outputs) {
            const State* parts = (const State*)a.parts + output * a.splits;
            for (u64 i = lane; i < a.splits; i += a.group) state = f.merge(state, parts[i]);
            place = locate(a.kept, a.kept_ndim, output);
        }
        state = fold_group(f, state, a.group);
        if (lane == 0 && output < a.outputs) f.finish(state, place.out);
    }
}

// Declares the three kernels of a fold.
#define FOLD(name, ...)                                                     \
    BLOCK_ENTRY(name##_rows, Fold) { fold_rows(a, __VA_ARGS__); }           \
    BLOCK_ENTRY(name##_columns, Fold) { fold_columns(a, __VA_ARGS__); }     \
    BLOCK_ENTRY(name##_parts, Fold) { fold_parts(a, __VA_ARGS__); }

// A fold of numbers: `term` of each element, combined by `F`. `Term::State` is the type that they are combined in.
template <class Term, class F> struct Terms {
    typedef typename Term::State State;
    Term term;
    F f;
    State start;
    DEVICE State identity() const { return start; }
    template <int N> DEVICE void take(State& state, const Pack<T, N>& x, u64, u64) const {
        State terms[N];
        for (int j = 0; j < N; j++) terms[j] = term(x.values[j]);
        // A tree is shorter and more accurate than a chain.
        for (int width = N / 2; width > 0; width /= 2)
            for (int j = 0; j < width; j++) terms[j] = f(terms[j], terms[j + width]);
        state = f(state, terms[0]);
    }
    DEVICE State merge(State x, State y) const { return f(x, y); }
    DEVICE void finish(State state, i64 to) const { term.finish(state, to); }
};
