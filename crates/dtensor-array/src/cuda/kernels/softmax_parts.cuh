// Softmax over a sharded dim.

// out[line] = the largest number.
template <int V> DEVICE void largest_of_lines(const Args& a) {
    each_line(a, [&](const Line& line) {
        A largest = lowest<A>();
        line.each<V>(a.x, [&](u64, const auto& x) {
            for (int j = 0; j < WIDTH(x); j++) largest = LargestNumber()(largest, acc(x.values[j]));
        });
        largest = line.reduce(largest, lowest<A>(), LargestNumber());
        if (line.lane == 0 && line.index < a.lines) ((A*)a.out)[line.index] = largest;
    });
}

// out[line] = Σ exp(x − numbers[line]).
template <int V> DEVICE void exp_sums_of_lines(const Args& a) {
    each_line(a, [&](const Line& line) {
        A sum = A(0), by = line.index < a.lines ? a.numbers[line.index] : A(0);
        line.each<V>(a.x, [&](u64, const auto& x) {
            A terms = A(0);
            for (int j = 0; j < WIDTH(x); j++) terms += exp(acc(x.values[j]) - by);
            sum += terms;
        });
        sum = line.sum(sum);
        if (line.lane == 0 && line.index < a.lines) ((A*)a.out)[line.index] = sum;
    });
}

template <int V, bool LOG> DEVICE void gradient_sums(const Args& a) {
    each_line(a, [&](const Line& line) {
        Kept<V> none(nullptr, a, line, 0);
        A sum = gradient_sum<V, LOG>(a, line, false, none, none);
        if (line.lane == 0 && line.index < a.lines) ((A*)a.out)[line.index] = sum;
    });
}

BLOCK_ENTRY(maxima, Args) { a.vector == 1 ? largest_of_lines<1>(a) : largest_of_lines<PACKED>(a); }
BLOCK_ENTRY(exp_sums, Args) { a.vector == 1 ? exp_sums_of_lines<1>(a) : exp_sums_of_lines<PACKED>(a); }
BLOCK_ENTRY(backward_sums, Args) { a.vector == 1 ? gradient_sums<1, false>(a) : gradient_sums<PACKED, false>(a); }
BLOCK_ENTRY(log_backward_sums, Args) { a.vector == 1 ? gradient_sums<1, true>(a) : gradient_sums<PACKED, true>(a); }

// What is computed for each element, from numbers of its line.
struct Normalised {
    DEVICE T operator()(T x, A largest, A sum) const { return to<T>(exp(acc(x) - largest) * (A(1) / sum)); }
};
struct LogNormalised {
    DEVICE T operator()(T x, A largest, A sum) const { return to<T>((acc(x) - largest) - ln(sum)); }
};
template <bool LOG> struct Gradient {
    DEVICE T operator()(T y, T dy, A sum) const { return gradient<LOG>(y, dy, sum); }
};
ENTRY(normalised, Map<3>) { map3<T, T, A, A>(a, Normalised()); }
ENTRY(log_normalised, Map<3>) { map3<T, T, A, A>(a, LogNormalised()); }
ENTRY(backward_with, Map<3>) { map3<T, T, T, A>(a, Gradient<false>()); }
ENTRY(log_backward_with, Map<3>) { map3<T, T, T, A>(a, Gradient<true>()); }
