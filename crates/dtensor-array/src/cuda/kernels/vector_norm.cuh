// Vector norms.

// |x|.
struct Magnitude {
    typedef A State;
    T* out;
    DEVICE A operator()(T x) const { return (A)abs(acc(x)); }
    DEVICE void finish(A state, i64 to) const { out[to] = ::to<T>(state); }
};

// x², in double precision.
struct Square {
    typedef double State;
    T* out;
    DEVICE double operator()(T x) const {
        double y = (double)acc(x);
        return y * y;
    }
    DEVICE void finish(double state, i64 to) const { out[to] = ::to<T>((A)sqrt(state)); }
};

// |x|^p, or 1 for elements that are not 0 if p is 0, in double precision.
struct Power {
    typedef double State;
    T* out;
    double p;
    DEVICE double operator()(T x) const {
        double y = (double)acc(x);
        if (p == 0.0) return y != 0.0 ? 1.0 : 0.0;
        return pow(y < 0.0 ? -y : y, p);
    }
    DEVICE void finish(double state, i64 to) const { out[to] = ::to<T>((A)(p == 0.0 ? state : pow(state, 1.0 / p))); }
};

//! kernels: magnitudes_rows magnitudes_columns magnitudes_parts squares_rows squares_columns squares_parts
//! kernels: largest_rows largest_columns largest_parts smallest_rows smallest_columns smallest_parts
//! kernels: powers_rows powers_columns powers_parts
FOLD(magnitudes, Terms<Magnitude, Sum>{{(T*)a.out}, Sum(), A(0)})
FOLD(squares, Terms<Square, Sum>{{(T*)a.out}, Sum(), 0.0})
FOLD(largest, Terms<Magnitude, Largest>{{(T*)a.out}, Largest(), A(0)})
FOLD(smallest, Terms<Magnitude, Smallest>{{(T*)a.out}, Smallest(), highest<A>()})
FOLD(powers, Terms<Power, Sum>{{(T*)a.out, a.numbers[0]}, Sum(), 0.0})
