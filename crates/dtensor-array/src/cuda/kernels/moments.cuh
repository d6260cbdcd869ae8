// Variances and standard deviations.

// The number of elements, their mean, and the sum of squared differences from the mean.
struct Moments {
    double n, mean, total;
};
DEVICE Moments shuffle_xor(Moments x, int mask) {
    return Moments{shuffle_xor(x.n, mask), shuffle_xor(x.mean, mask), shuffle_xor(x.total, mask)};
}

// Merges the moments of different elements, by the formula of Chan, Golub and LeVeque.
DEVICE Moments merge_moments(Moments x, Moments y) {
    if (x.n == 0.0) return y;
    if (y.n == 0.0) return x;
    double n = x.n + y.n, difference = y.mean - x.mean, part = y.n / n;
    return Moments{n, x.mean + difference * part, x.total + y.total + difference * difference * (x.n * part)};
}

// What is written: the variance, the deviation or, in three arrays one after the other, the moments.
enum Result { VARIANCE, DEVIATION, MOMENTS };

template <Result RESULT> struct MomentsOf {
    typedef Moments State;
    void* out;
    // The divisor of the variance, or the distance between the three arrays.
    double divisor;
    DEVICE Moments identity() const { return Moments{0.0, 0.0, 0.0}; }
    template <int N> DEVICE void take(Moments& all, const Pack<T, N>& x, u64, u64) const {
        double sum = 0.0, total = 0.0;
        for (int j = 0; j < N; j++) sum += (double)acc(x.values[j]);
        double mean = sum * (1.0 / N);
        for (int j = 0; j < N; j++) {
            double d = (double)acc(x.values[j]) - mean;
            total = fma(d, d, total);
        }
        all = merge_moments(all, Moments{(double)N, mean, N == 1 ? sum - sum : total});
    }
    DEVICE Moments merge(Moments x, Moments y) const { return merge_moments(x, y); }
    DEVICE void finish(Moments all, i64 to) const {
        if (RESULT == MOMENTS) {
            double* moments = (double*)out;
            moments[to] = all.n;
            moments[(i64)divisor + to] = all.mean;
            moments[2 * (i64)divisor + to] = all.total;
        } else {
            double variance = all.total / divisor;
            ((T*)out)[to] = ::to<T>((A)(RESULT == DEVIATION ? sqrt(variance) : variance));
        }
    }
};

//! kernels: variance_rows variance_columns variance_parts deviation_rows deviation_columns deviation_parts
//! kernels: moments_rows moments_columns moments_parts
FOLD(variance, MomentsOf<VARIANCE>{a.out, a.numbers[0]})
FOLD(deviation, MomentsOf<DEVIATION>{a.out, a.numbers[0]})
FOLD(moments, MomentsOf<MOMENTS>{a.out, a.numbers[0]})

// Must match `Merge` in `moments.rs`.
struct Merge {
    const double* parts;
    T* out;
    u64 n, count;
    double correction;
    u64 is_root;
};
ENTRY(merge, Merge) {
    for (u64 i = FIRST; i < a.n; i += STEP) {
        Moments all = {0.0, 0.0, 0.0};
        for (u64 part = 0; part < a.count; part++) {
            const double* from = a.parts + part * 3 * a.n + i;
            all = merge_moments(all, Moments{from[0], from[a.n], from[2 * a.n]});
        }
        double divisor = all.n - a.correction;
        // No elements have no variance, for any divisor.
        double variance = all.n == 0.0 ? all.n / all.n : all.total / (divisor > 0.0 ? divisor : 0.0);
        a.out[i] = to<T>((A)(a.is_root ? sqrt(variance) : variance));
    }
}
