// Changes of dtype.

//! kernels: to_u8 to_i64 to_f16 to_bf16 to_f32 to_f64

// Narrows to `float` such that rounding the result to half precision gives the correctly rounded `x`. If bits are lost, the last
// bit is set ("round to odd").
DEVICE float single(double x) {
    float y = (float)x;
    double wide = (double)y;
    // If rounding went away from zero, the previous number is the truncated one.
    u32 truncated = float_to_bits(y) - (fabs(wide) > fabs(x) ? 1 : 0);
    return wide == x || x != x ? y : bits_to_float(truncated | 1);
}
DEVICE float single(float x) { return x; }
DEVICE float single(i64 x) {
    // Bits beyond the precision of `double` are merged into one.
    bool fits = x < (1ll << 53) && x > -(1ll << 53);
    i64 folded = (x & ~0xfffll) | ((x & 0xfff) != 0 ? 0x1000 : 0);
    return single((double)(fits ? x : folded));
}

DEVICE void convert(i64 x, unsigned char& y) { y = (unsigned char)x; }
DEVICE void convert(i64 x, i64& y) { y = x; }
template <class F> DEVICE void convert(F x, unsigned char& y) {
    y = x >= F(255) ? 255 : x > F(0) ? (unsigned char)(int)x : 0;
}
template <class F> DEVICE void convert(F x, i64& y) {
    if (x != x) y = 0;
    else if (x >= F(9223372036854775808.0)) y = highest<i64>();
    else if (x <= F(-9223372036854775808.0)) y = lowest<i64>();
    else y = (i64)x;
}
template <class F> DEVICE void convert(F x, half_t& y) { y.bits = float_to_half(single(x)); }
template <class F> DEVICE void convert(F x, bfloat_t& y) { y.bits = float_to_bfloat(single(x)); }
template <class F> DEVICE void convert(F x, float& y) { y = (float)x; }
template <class F> DEVICE void convert(F x, double& y) { y = (double)x; }

template <class O> DEVICE O converted(A x) {
    O y;
    convert(x, y);
    return y;
}
#define CAST(name, type) FUNCTION1(to_##name, type, converted<type>(x))

#if DTYPE != 0
CAST(u8, unsigned char)
#endif
#if DTYPE != 1
CAST(i64, i64)
#endif
#if DTYPE != 2
CAST(f16, half_t)
#endif
#if DTYPE != 3
CAST(bf16, bfloat_t)
#endif
#if DTYPE != 4
CAST(f32, float)
#endif
#if DTYPE != 5
CAST(f64, double)
#endif
