// The largest or smallest element along a dim, and its index.

// An element and its index; −1 if there is none.
struct Found {
    A value;
    i64 index;
};
DEVICE Found shuffle_xor(Found x, int mask) {
    return Found{shuffle_xor(x.value, mask), shuffle_xor(x.index, mask)};
}

// NaN is better than every number.
template <bool LARGEST> DEVICE bool is_better(A x, A y) {
    return (LARGEST ? x > y : x < y) || (is_nan(x) && !is_nan(y));
}
template <bool LARGEST> DEVICE A worst() { return LARGEST ? lowest<A>() : highest<A>(); }

template <bool LARGEST> struct FirstBest {
    typedef Found State;
    T* out;
    i64* indices;
    DEVICE Found identity() const { return Found{worst<LARGEST>(), -1}; }
    template <int N> DEVICE void take(Found& best, const Pack<T, N>& x, u64 index, u64 step) const {
        for (int j = 0; j < N; j++) {
            A value = acc(x.values[j]);
            if (best.index < 0 || is_better<LARGEST>(value, best.value)) best = Found{value, (i64)(index + j * step)};
        }
    }
    DEVICE Found merge(Found x, Found y) const {
        bool takes_y = is_better<LARGEST>(y.value, x.value) ||
                       (y.index < x.index && !is_better<LARGEST>(x.value, y.value));
        return y.index >= 0 && (x.index < 0 || takes_y) ? y : x;
    }
    DEVICE void finish(Found best, i64 to) const {
        out[to] = ::to<T>(best.value);
        indices[to] = best.index;
    }
};

//! kernels: max_rows max_columns max_parts min_rows min_columns min_parts
FOLD(max, FirstBest<true>{(T*)a.out, (i64*)a.second})
FOLD(min, FirstBest<false>{(T*)a.out, (i64*)a.second})

// Must match `Merge` in `extremum.rs`.
struct Merge {
    const T* values;
    const i64* indices;
    T* out;
    i64* out_indices;
    u64 n, parts;
};
template <bool LARGEST> DEVICE void merge_parts(const Merge& a) {
    FirstBest<LARGEST> f{a.out, a.out_indices};
    for (u64 i = FIRST; i < a.n; i += STEP) {
        Found best = f.identity();
        for (u64 part = 0; part < a.parts; part++)
            best = f.merge(best, Found{acc(a.values[part * a.n + i]), a.indices[part * a.n + i]});
        f.finish(best, (i64)i);
    }
}
ENTRY(merge_max, Merge) { merge_parts<true>(a); }
ENTRY(merge_min, Merge) { merge_parts<false>(a); }
