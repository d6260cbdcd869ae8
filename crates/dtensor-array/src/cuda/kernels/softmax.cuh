// Softmax and log-softmax along a dim, and their gradients.

// Must match `Args` in `softmax.rs`.
struct Args : Lines {
    // The array, or the result of the forward pass.
    const T* x;
    const T* dy;
    void* out;
    // One number for each line, if the kernel takes them.
    const A* numbers;
};

template <int V, bool LOG> DEVICE void forward(const Args& a) {
    SHARED_BYTES(shared);
    each_line(a, [&](const Line& line) {
        Kept<V> kept(shared, a, line, 0);
        ExpSum all = {lowest<A>(), A(0)};
        line.each<V>(a.x, [&](u64 i, const auto& x) {
            if (a.room) kept.set(i, x);
            all.take(x);
        });
        all.combine(line);
        A largest = all.largest, factor = LOG ? ln(all.sum) : A(1) / all.sum;
        line.walk<V>([&](u64 i, auto width) {
            constexpr int N = decltype(width)::N;
            Pack<T, N> x = a.room ? kept.template get<N>(i) : line.load<N>(a.x, i), y;
            for (int j = 0; j < N; j++) {
                A d = acc(x.values[j]) - largest;
                y.values[j] = to<T>(LOG ? d - factor : exp(d) * factor);
            }
            line.store<N>((T*)a.out, i, y);
        });
    });
}

// The term of the gradient that is summed over each line.
template <bool LOG> DEVICE A gradient_term(T y, T dy) { return LOG ? acc(dy) : acc(y) * acc(dy); }

// The gradient, from the sum of these terms.
template <bool LOG> DEVICE T gradient(T y, T dy, A sum) {
    return to<T>(LOG ? acc(dy) - exp(acc(y)) * sum : acc(y) * (acc(dy) - sum));
}

template <int V, bool LOG> DEVICE A gradient_sum(const Args& a, const Line& line, bool is_kept, Kept<V> ys, Kept<V> dys) {
    A sum = A(0);
    line.each<V>(a.x, a.dy, [&](u64 i, const auto& y, const auto& dy) {
        if (is_kept) {
            ys.set(i, y);
            dys.set(i, dy);
        }
        A terms = A(0);
        for (int j = 0; j < WIDTH(y); j++) terms += gradient_term<LOG>(y.values[j], dy.values[j]);
        sum += terms;
    });
    return line.sum(sum);
}

template <int V, bool LOG> DEVICE void backward(const Args& a) {
    SHARED_BYTES(shared);
    each_line(a, [&](const Line& line) {
        Kept<V> ys(shared, a, line, 0), dys(shared, a, line, 1);
        A sum = gradient_sum<V, LOG>(a, line, a.room, ys, dys);
        line.walk<V>([&](u64 i, auto width) {
            constexpr int N = decltype(width)::N;
            Pack<T, N> y = a.room ? ys.template get<N>(i) : line.load<N>(a.x, i);
            Pack<T, N> dy = a.room ? dys.template get<N>(i) : line.load<N>(a.dy, i), dx;
            for (int j = 0; j < N; j++) dx.values[j] = gradient<LOG>(y.values[j], dy.values[j], sum);
            line.store<N>((T*)a.out, i, dx);
        });
    });
}

#define PACKED (16 / sizeof(T))
BLOCK_ENTRY(softmax, Args) { a.vector == 1 ? forward<1, false>(a) : forward<PACKED, false>(a); }
BLOCK_ENTRY(log_softmax, Args) { a.vector == 1 ? forward<1, true>(a) : forward<PACKED, true>(a); }
BLOCK_ENTRY(softmax_backward, Args) { a.vector == 1 ? backward<1, false>(a) : backward<PACKED, false>(a); }
BLOCK_ENTRY(log_softmax_backward, Args) { a.vector == 1 ? backward<1, true>(a) : backward<PACKED, true>(a); }
