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
        line.each<V>(a.x, [&](u64 i, const Pack<T, V>& x) {
            if (a.is_kept) kept.set(i, x);
            all.take(x);
        });
        all.combine(line);
        A largest = all.largest, factor = LOG ? ln(all.sum) : A(1) / all.sum;
        for (u64 i = line.lane * V; i < line.n; i += line.team * V) {
            Pack<T, V> x = a.is_kept ? kept.get(i) : line.load<V>(a.x, i), y;
            for (int j = 0; j < V; j++) {
                A d = acc(x.values[j]) - largest;
                y.values[j] = to<T>(LOG ? d - factor : exp(d) * factor);
            }
            line.store<V>((T*)a.out, i, y);
        }
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
    line.each<V>(a.x, a.dy, [&](u64 i, const Pack<T, V>& y, const Pack<T, V>& dy) {
        if (is_kept) {
            ys.set(i, y);
            dys.set(i, dy);
        }
        A terms = A(0);
        for (int j = 0; j < V; j++) terms += gradient_term<LOG>(y.values[j], dy.values[j]);
        sum += terms;
    });
    return line.sum(sum);
}

template <int V, bool LOG> DEVICE void backward(const Args& a) {
    SHARED_BYTES(shared);
    each_line(a, [&](const Line& line) {
        Kept<V> ys(shared, a, line, 0), dys(shared, a, line, 1);
        A sum = gradient_sum<V, LOG>(a, line, a.is_kept, ys, dys);
        for (u64 i = line.lane * V; i < line.n; i += line.team * V) {
            Pack<T, V> y = a.is_kept ? ys.get(i) : line.load<V>(a.x, i);
            Pack<T, V> dy = a.is_kept ? dys.get(i) : line.load<V>(a.dy, i), dx;
            for (int j = 0; j < V; j++) dx.values[j] = gradient<LOG>(y.values[j], dy.values[j], sum);
            line.store<V>((T*)a.out, i, dx);
        }
    });
}

#define PACKED (16 / sizeof(T))
BLOCK_ENTRY(softmax, Args) { a.vector == 1 ? forward<1, false>(a) : forward<PACKED, false>(a); }
BLOCK_ENTRY(log_softmax, Args) { a.vector == 1 ? forward<1, true>(a) : forward<PACKED, true>(a); }
BLOCK_ENTRY(softmax_backward, Args) { a.vector == 1 ? backward<1, false>(a) : backward<PACKED, false>(a); }
BLOCK_ENTRY(log_softmax_backward, Args) { a.vector == 1 ? backward<1, true>(a) : backward<PACKED, true>(a); }
