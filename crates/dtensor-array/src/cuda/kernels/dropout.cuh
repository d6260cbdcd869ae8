// Dropout of a full array: an element-wise function of an element and its random word.

struct F_dropout {
    // The seed and the stream of the draw, the threshold of words that are dropped, the scale of the others, and the address that
    // the draw of a replay is relative to.
    const Number* n;

    DEVICE T operator()(T x, u32 word) const {
        Threshold dropped{(u32)n[2].bits, (u32)(n[2].bits >> 32)};
        return to<T>(acc(x) * (dropped.contains(word) ? A(0) : n[3].value()));
    }

    // Generates the words of the elements from `first`, which is a multiple of their number.
    template <int V> DEVICE void words(u64 first, u32 (&words)[V]) const {
        Draw draw;
        draw.seed = n[0].bits;
        draw.stream = n[1].bits;
        draw.first = (const u64*)n[4].bits;
        Words four;
        for (int j = 0; j < V; j++) {
            if (j % 4 == 0) four = philox(draw, (first + j) / 4);
            u32 k = V >= 4 ? j % 4 : (u32)(first % 4) + j;
            u32 even = k & 2 ? four.x[2] : four.x[0], odd = k & 2 ? four.x[3] : four.x[1];
            words[j] = k & 1 ? odd : even;
        }
    }
};

#ifndef FUSED
template <int V> struct Dropout {
    const Pointwise<1>& a;
    DEVICE void operator()(u64 i, const i64* offsets) const {
        F_dropout f{a.n};
        u32 words[V];
        f.words(i * V, words);
        Pack<T, V> x = load<T, V>(a, 0, offsets[0]), y;
        for (int j = 0; j < V; j++) y.values[j] = f(x.values[j], words[j]);
        ((Pack<T, V>*)a.out)[i] = y;
    }
};
ENTRY(dropout, Pointwise<1>) {
    if (a.vector == 1) each_index(a, Dropout<1>{a});
    else each_index(a, Dropout<16 / sizeof(T)>{a});
}
#endif
