// Element-wise comparison of two arrays: 1 where it holds, else 0.

//! kernels: eq ne lt le
#define COMPARE(name, condition)                                                                \
    struct F_##name {                                                                           \
        DEVICE unsigned char operator()(T left, T right) const {                                \
            A x = acc(left), y = acc(right);                                                    \
            return condition ? 1 : 0;                                                           \
        }                                                                                       \
    };                                                                                          \
    ENTRY(name, Map<2>) { map2<unsigned char, T, T>(a, F_##name()); }

COMPARE(eq, x == y)
COMPARE(ne, x != y)
COMPARE(lt, x < y)
COMPARE(le, x <= y)
