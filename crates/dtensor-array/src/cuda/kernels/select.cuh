// Selection by a mask.

//! kernels: where masked_fill
struct F_where {
    const Number* n;
    DEVICE T operator()(unsigned char condition, T x, T y) const { return condition ? x : y; }
};
KERNEL(where, 3, map3<T, unsigned char, T, T>(a, F_where{a.n}))

struct F_masked_fill {
    const Number* n;
    DEVICE T operator()(T x, unsigned char mask) const { return mask ? to<T>(n[0].value()) : x; }
};
KERNEL(masked_fill, 2, map2<T, T, unsigned char>(a, F_masked_fill{a.n}))
