// Copies between layouts, and arrays created from numbers.

struct Same {
    DEVICE T operator()(T x) const { return x; }
};
ENTRY(copy, Map<1>) { map1<T, T>(a, Same()); }

// Must match `Tabulate` in `copy.rs`.
struct Tabulate {
    T* out;
    u64 numel;
    double numbers[4];
    i64 integers[4];
    Window window;
};

// Stores a number in an element: floating-point numbers are rounded once, integers truncated.
DEVICE T from_double(double x) {
#if DTYPE == 0
    return (T)(i64)x;
#elif DTYPE == 1
    return (T)x;
#elif DTYPE == 5
    return x;
#else
    return to<T>((float)x);
#endif
}

ENTRY(fill, Tabulate) {
    T value = *(const T*)&a.integers[0];
    for (u64 i = FIRST; i < a.numel; i += STEP) a.out[i] = value;
}

ENTRY(arange, Tabulate) {
    for (u64 i = FIRST; i < a.numel; i += STEP)
        a.out[i] = from_double(a.numbers[0] + (double)full_index(a.window, i) * a.numbers[1]);
}

#if DTYPE < 2
ENTRY(arange_int, Tabulate) {
    for (u64 i = FIRST; i < a.numel; i += STEP)
        a.out[i] = (T)add(a.integers[0], multiply(a.integers[1], (i64)full_index(a.window, i)));
}
#endif

#if DTYPE == 5
// From `numbers[0]` to `numbers[1]` in steps of `numbers[2]`; the powers of `numbers[3]` if `integers[1]` is not 0.
ENTRY(linspace, Tabulate) {
    u64 steps = (u64)a.integers[0];
    for (u64 i = FIRST; i < a.numel; i += STEP) {
        u64 at = full_index(a.window, i);
        // From the nearer end, so that both ends are exact.
        double x = at < (steps + 1) / 2 ? a.numbers[0] + a.numbers[2] * (double)at
                                        : a.numbers[1] - a.numbers[2] * (double)(steps - 1 - at);
        a.out[i] = a.integers[1] ? pow(a.numbers[3], x) : x;
    }
}
#endif

ENTRY(eye, Tabulate) {
    u64 columns = (u64)a.integers[0];
    for (u64 i = FIRST; i < a.numel; i += STEP) {
        u64 at = full_index(a.window, i);
        a.out[i] = to<T>(at / columns == at % columns ? A(1) : A(0));
    }
}
