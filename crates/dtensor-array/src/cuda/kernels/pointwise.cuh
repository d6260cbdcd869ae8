// Declares element-wise functions: `F_name`, the function of elements, and its kernel. A fused kernel uses the functions only.

// A number as an argument of a kernel, in the type that a unit computes in. Must match `number` in `scalar.rs`.
struct Number {
    u64 bits;
    DEVICE A value() const { return *(const A*)&bits; }
};

// Must match `With` and `Numbers` in `map.rs`.
#define NUMBERS 5
template <int N> struct Pointwise : Map<N> {
    Number n[NUMBERS];
};

#ifndef KERNEL
#define KERNEL(name, N, ...) \
    ENTRY(name, Pointwise<N>) { __VA_ARGS__; }
#endif

// Functions of elements `left` and `right`, widened to `x`, `y` and `z`, and of the numbers `n`, with results of type `O`.
#define FUNCTION1(name, O, formula)           \
    struct F_##name {                         \
        const Number* n;                      \
        DEVICE O operator()(T left) const {   \
            A x = acc(left);                  \
            return formula;                   \
        }                                     \
    };                                        \
    KERNEL(name, 1, map1<O, T>(a, F_##name{a.n}))

#define FUNCTION2(name, O, formula)                   \
    struct F_##name {                                 \
        const Number* n;                              \
        DEVICE O operator()(T left, T right) const {  \
            A x = acc(left), y = acc(right);          \
            return formula;                           \
        }                                             \
    };                                                \
    KERNEL(name, 2, map2<O, T, T>(a, F_##name{a.n}))

#define FUNCTION3(name, O, formula)                           \
    struct F_##name {                                         \
        const Number* n;                                      \
        DEVICE O operator()(T left, T middle, T right) const { \
            A x = acc(left), y = acc(middle), z = acc(right); \
            return formula;                                   \
        }                                                     \
    };                                                        \
    KERNEL(name, 3, map3<O, T, T, T>(a, F_##name{a.n}))

// Functions whose result is narrowed to `T`.
#define POINTWISE1(name, formula) FUNCTION1(name, T, to<T>(formula))
#define POINTWISE2(name, formula) FUNCTION2(name, T, to<T>(formula))
#define POINTWISE3(name, formula) FUNCTION3(name, T, to<T>(formula))
