// Sums, products, extrema and norms.

#if DTYPE < 2
typedef i64 Total;
#else
typedef T Total;
#endif

// The element itself. The result is narrowed to `Out`, and divided by `divisor` first if that is not 0.
template <class Out> struct Element {
    typedef A State;
    Out* out;
    A divisor;
    DEVICE A operator()(T x) const { return acc(x); }
    DEVICE void finish(A state, i64 to) const {
#if DTYPE >= 2
        if (divisor >= A(0)) state = state / divisor;
#endif
        out[to] = ::to<Out>((typename Acc<Out>::type)state);
    }
};

struct Times {
    template <class V> DEVICE V operator()(V x, V y) const { return multiply(x, y); }
};

//! kernels: sum_rows sum_columns sum_parts prod_rows prod_columns prod_parts
//! kernels: max_rows max_columns max_parts min_rows min_columns min_parts
FOLD(sum, Terms<Element<Total>, Sum>{{(Total*)a.out, A(a.numbers[0])}, Sum(), A(0)})
FOLD(prod, Terms<Element<Total>, Times>{{(Total*)a.out, A(-1)}, Times(), A(1)})
FOLD(max, Terms<Element<T>, Largest>{{(T*)a.out, A(-1)}, Largest(), lowest<A>()})
FOLD(min, Terms<Element<T>, Smallest>{{(T*)a.out, A(-1)}, Smallest(), highest<A>()})

#if DTYPE >= 2
// A sum that is not rounded to `T`.
//! kernels: total_rows total_columns total_parts
FOLD(total, Terms<Element<A>, Sum>{{(A*)a.out, A(-1)}, Sum(), A(0)})
#endif
