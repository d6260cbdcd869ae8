// Element-wise arithmetic of two arrays.

//! kernels: add sub mul div maximum minimum between
POINTWISE2(add, add(x, y))
POINTWISE2(sub, subtract(x, y))
POINTWISE2(mul, multiply(x, y))
POINTWISE2(maximum, larger(x, y))
POINTWISE2(minimum, smaller(x, y))

#if DTYPE >= 2
POINTWISE2(div, x / y)

DEVICE A interpolate(A x, A y, A weight, A rest) {
    A difference = y - x;
    // Counted from the nearer end, so that the result is never outside.
    A near = weight + weight < A(1) ? x + weight * difference : y - rest * difference;
    if (x == y) return x;
    return difference * A(0) == A(0) ? near : rest * x + weight * y;
}
POINTWISE2(between, interpolate(x, y, n[0].value(), n[1].value()))
#endif
