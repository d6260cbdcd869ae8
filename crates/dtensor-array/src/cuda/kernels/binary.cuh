// Element-wise arithmetic of two arrays.

//! kernels: add sub mul div maximum minimum
#define BINARY(name, formula)                                                     \
    struct F_##name {                                                             \
        DEVICE A operator()(A x, A y) const { return formula; }                   \
    };                                                                            \
    ENTRY(name, Map<2>) { map2<T, T, T>(a, widened(F_##name())); }

BINARY(add, add(x, y))
BINARY(sub, subtract(x, y))
BINARY(mul, multiply(x, y))
BINARY(maximum, larger(x, y))
BINARY(minimum, smaller(x, y))

#if DTYPE >= 2
BINARY(div, x / y)

struct BetweenArgs : Map<2> {
    Number weight, rest;
};
struct Between {
    A weight, rest;
    DEVICE A operator()(A x, A y) const {
        A difference = y - x;
        // Counted from the nearer end, so that the result is never outside.
        A near = weight + weight < A(1) ? x + weight * difference : y - rest * difference;
        if (x == y) return x;
        return difference * A(0) == A(0) ? near : rest * x + weight * y;
    }
};
ENTRY(between, BetweenArgs) { map2<T, T, T>(a, widened(Between{a.weight.value(), a.rest.value()})); }
#endif
