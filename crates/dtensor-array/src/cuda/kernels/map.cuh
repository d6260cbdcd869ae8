// Element-wise loops over operands of any strides. Must match `map.rs`.

#define MOST_AXES 16

// A dim of the loop, with numbers to divide by its size, and the strides of the operands in elements.
template <int N> struct Axis {
    u32 size, magic, shift, reserved;
    i64 strides[N];
};

template <int N> struct Map {
    static constexpr int OPERANDS = N;
    u64 numel;
    void* out;
    const void* in[N];
    u32 ndim;
    // The number of elements that a thread computes at once: 1, or that of the widest load.
    u32 vector;
    Axis<N> axes[MOST_AXES];
};

// Calls `run(index, offsets)` for each index of a thread, counted in vectors, with the offset of its first element in each operand.
template <class M, class F> DEVICE void each_index(const M& a, F run) {
    constexpr int N = M::OPERANDS;
    u64 count = a.numel / a.vector;
    for (u64 i = FIRST; i < count; i += STEP) {
        i64 offsets[N];
        u64 rest = i * a.vector;
        for (int k = 0; k < N; k++) offsets[k] = 0;
        for (u32 d = a.ndim - 1; d > 0; d--) {
            const Axis<N>& axis = a.axes[d];
            u64 quotient, remainder;
            if (a.numel < (1ull << 31)) {
                u32 n = (u32)rest;
                u32 q = (__umulhi(n, axis.magic) + n) >> axis.shift;
                quotient = q;
                remainder = n - q * axis.size;
            } else {
                quotient = rest / axis.size;
                remainder = rest - quotient * axis.size;
            }
            for (int k = 0; k < N; k++) offsets[k] += (i64)remainder * axis.strides[k];
            rest = quotient;
        }
        for (int k = 0; k < N; k++) offsets[k] += (i64)rest * a.axes[0].strides[k];
        run(i, offsets);
    }
}

// Loads `V` elements of operand `k`, which are contiguous or the same.
template <class E, int V, class M> DEVICE Pack<E, V> load(const M& a, int k, i64 offset) {
    const E* from = (const E*)a.in[k] + offset;
    Pack<E, V> pack;
    if (V == 1) {
        pack.values[0] = *from;
    } else if (a.axes[a.ndim - 1].strides[k] == 0) {
        E x = *from;
        for (int i = 0; i < V; i++) pack.values[i] = x;
    } else {
        pack = *(const Pack<E, V>*)from;
    }
    return pack;
}

DEVICE constexpr int widest(int x, int y) { return x > y ? x : y; }

template <class O, class I, int V, class F> struct Map1 {
    const Map<1>& a;
    F f;
    DEVICE void operator()(u64 i, const i64* offsets) const {
        Pack<I, V> x = load<I, V>(a, 0, offsets[0]);
        Pack<O, V> y;
        for (int j = 0; j < V; j++) y.values[j] = f(x.values[j]);
        ((Pack<O, V>*)a.out)[i] = y;
    }
};
// out[i] = f(x[i]): elements, not widened.
template <class O, class I, class F> DEVICE void map1(const Map<1>& a, F f) {
    constexpr int V = 16 / widest(sizeof(O), sizeof(I));
    if (a.vector == 1) each_index(a, Map1<O, I, 1, F>{a, f});
    else each_index(a, Map1<O, I, V, F>{a, f});
}

template <class O, class I, class J, int V, class F> struct Map2 {
    const Map<2>& a;
    F f;
    DEVICE void operator()(u64 i, const i64* offsets) const {
        Pack<I, V> x = load<I, V>(a, 0, offsets[0]);
        Pack<J, V> y = load<J, V>(a, 1, offsets[1]);
        Pack<O, V> z;
        for (int j = 0; j < V; j++) z.values[j] = f(x.values[j], y.values[j]);
        ((Pack<O, V>*)a.out)[i] = z;
    }
};
// out[i] = f(x[i], y[i]).
template <class O, class I, class J, class F> DEVICE void map2(const Map<2>& a, F f) {
    constexpr int V = 16 / widest(sizeof(O), widest(sizeof(I), sizeof(J)));
    if (a.vector == 1) each_index(a, Map2<O, I, J, 1, F>{a, f});
    else each_index(a, Map2<O, I, J, V, F>{a, f});
}

template <class O, class I, class J, class K, int V, class F> struct Map3 {
    const Map<3>& a;
    F f;
    DEVICE void operator()(u64 i, const i64* offsets) const {
        Pack<I, V> x = load<I, V>(a, 0, offsets[0]);
        Pack<J, V> y = load<J, V>(a, 1, offsets[1]);
        Pack<K, V> z = load<K, V>(a, 2, offsets[2]);
        Pack<O, V> w;
        for (int j = 0; j < V; j++) w.values[j] = f(x.values[j], y.values[j], z.values[j]);
        ((Pack<O, V>*)a.out)[i] = w;
    }
};
// out[i] = f(x[i], y[i], z[i]).
template <class O, class I, class J, class K, class F> DEVICE void map3(const Map<3>& a, F f) {
    constexpr int V = 16 / widest(widest(sizeof(O), sizeof(I)), widest(sizeof(J), sizeof(K)));
    if (a.vector == 1) each_index(a, Map3<O, I, J, K, 1, F>{a, f});
    else each_index(a, Map3<O, I, J, K, V, F>{a, f});
}
