// Element-wise functions of an array and numbers.

//! kernels: scale shift affine unit square cube inverse_square clamp clamp_grad
POINTWISE1(scale, multiply(x, n[0].value()))
POINTWISE1(shift, add(x, n[1].value()))
POINTWISE1(affine, add(multiply(x, n[0].value()), n[1].value()))
POINTWISE1(unit, A(1))
POINTWISE1(square, multiply(x, x))
POINTWISE1(cube, multiply(multiply(x, x), x))

DEVICE A clamped(A x, A lo, A hi) {
    x = x < lo ? lo : x;
    return x > hi ? hi : x;
}
POINTWISE1(clamp, clamped(x, n[0].value(), n[1].value()))

#if DTYPE >= 2
POINTWISE1(inverse_square, A(1) / (x * x))

// The lowest bits of `missing` say that there is no lower, and no upper bound.
DEVICE A inside(A x, A dy, A lo, A hi, u64 missing) {
    return (missing & 1 || x > lo) && (missing & 2 || x < hi) ? dy : A(0);
}
POINTWISE2(clamp_grad, inside(x, y, n[0].value(), n[1].value(), n[2].bits))
#endif
