// Element-wise powers. Those of integers wrap.

DEVICE float power(float x, float e) { return powf(x, e); }
DEVICE double power(double x, double e) { return pow(x, e); }
DEVICE i64 power(i64 x, i64 e) {
    // A negative power of an integer is an integer only for 1 and -1. All others truncate to 0.
    if (e < 0 && x != 1 && x != -1) return 0;
    u64 base = (u64)x, left = e < 0 ? 0 - (u64)e : (u64)e, product = 1;
    for (; left > 0; left /= 2) {
        if (left % 2) product *= base;
        base *= base;
    }
    return (i64)product;
}

//! kernels: pow pow_scalar
POINTWISE2(pow, power(x, y))
POINTWISE1(pow_scalar, power(x, n[0].value()))
