// Element-wise functions of an array and numbers.

struct Numbers : Map<1> {
    Number x, y;
};

//! kernels: scale shift affine unit square cube inverse_square clamp
#define SCALAR(name, formula)                                                                       \
    struct F_##name {                                                                               \
        A m, n;                                                                                     \
        DEVICE A operator()(A x) const { return formula; }                                          \
    };                                                                                              \
    ENTRY(name, Numbers) { map1<T, T>(a, widened(F_##name{a.x.value(), a.y.value()})); }

DEVICE A clamped(A x, A lo, A hi) {
    x = x < lo ? lo : x;
    return x > hi ? hi : x;
}

SCALAR(scale, multiply(x, m))
SCALAR(shift, add(x, n))
SCALAR(affine, add(multiply(x, m), n))
SCALAR(unit, A(1))
SCALAR(square, multiply(x, x))
SCALAR(cube, multiply(multiply(x, x), x))
SCALAR(clamp, clamped(x, m, n))

#if DTYPE >= 2
SCALAR(inverse_square, A(1) / (x * x))

struct Bounds : Map<2> {
    Number lo, hi;
    // Whether there is no bound on this side.
    u32 no_lo, no_hi;
};
struct Inside {
    A lo, hi;
    u32 no_lo, no_hi;
    DEVICE A operator()(A x, A dy) const { return (no_lo || x > lo) && (no_hi || x < hi) ? dy : A(0); }
};
ENTRY(clamp_grad, Bounds) {
    map2<T, T, T>(a, widened(Inside{a.lo.value(), a.hi.value(), a.no_lo, a.no_hi}));
}
#endif
