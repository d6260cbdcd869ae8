// The sliding windows of a convolution as columns of a matrix, and the adjoint.

// The windows along a dim, their number, and the size of the dim.
struct Along {
    u64 kernel, stride, dilation, before, count, size;
};
// Must match `Unfold` in `unfold.rs`.
struct Unfold {
    const T* in;
    T* out;
    u64 planes;
    Along along[2];
    u64 vector;
};

template <int V> DEVICE void unfold(const Unfold& a) {
    const Along& down = a.along[0];
    const Along& across = a.along[1];
    u64 positions = down.count * across.count, kernel = down.kernel * across.kernel;
    u64 count = a.planes * kernel * positions / V;
    for (u64 i = FIRST; i < count; i += STEP) {
        u64 row = quotient(i * V, positions), position = i * V - row * positions;
        u64 plane = quotient(row, kernel), k = row - plane * kernel;
        u64 ky = quotient(k, across.kernel), kx = k - ky * across.kernel;
        u64 oy = quotient(position, across.count), ox = position - oy * across.count;
        const T* in = a.in + plane * down.size * across.size;
        Pack<T, V> values;
        for (int v = 0; v < V; v++) {
            // What is before the first element wraps around to numbers that no size exceeds.
            u64 y = oy * down.stride + ky * down.dilation - down.before;
            u64 x = ox * across.stride + kx * across.dilation - across.before;
            bool is_inside = y < down.size && x < across.size;
            values.values[v] = to<T>(A(0));
            if (is_inside) values.values[v] = in[y * across.size + x];
            if (++ox == across.count) {
                ox = 0;
                oy++;
            }
        }
        ((Pack<T, V>*)a.out)[i] = values;
    }
}
ENTRY(unfold, Unfold) {
    if (a.vector == 1) unfold<1>(a);
    else unfold<16 / sizeof(T)>(a);
}

// The window whose element `k` is at `at` in the dim, or the number of windows if there is none.
DEVICE u64 window_of(const Along& along, u64 at, u64 k) {
    u64 first = at + along.before, offset = k * along.dilation;
    if (first < offset) return along.count;
    u64 window = quotient(first - offset, along.stride);
    return window < along.count && window * along.stride == first - offset ? window : along.count;
}

// Each element is the sum of its copies, in the order of their places in the windows.
ENTRY(fold, Unfold) {
    const Along& down = a.along[0];
    const Along& across = a.along[1];
    u64 positions = down.count * across.count;
    for (u64 i = FIRST; i < a.planes * down.size * across.size; i += STEP) {
        u64 row = quotient(i, across.size), x = i - row * across.size;
        u64 plane = quotient(row, down.size), y = row - plane * down.size;
        const T* in = a.in + plane * down.kernel * across.kernel * positions;
        A sum = A(0);
        for (u64 ky = 0; ky < down.kernel; ky++) {
            u64 oy = window_of(down, y, ky);
            if (oy == down.count) continue;
            const T* from = in + ky * across.kernel * positions + oy * across.count;
            for (u64 kx = 0; kx < across.kernel; kx++) {
                u64 ox = window_of(across, x, kx);
                if (ox < across.count) sum = add(sum, acc(from[kx * positions + ox]));
            }
        }
        a.out[i] = to<T>(sum);
    }
}
