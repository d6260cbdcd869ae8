// Elements gathered and added by index. Terms are added in the order of the indices.

// Must match `Pick` in `index.rs`.
struct Gather : Map<2> {
    Ids ids;
    // The stride of the indexed dim.
    u64 stride;
};
// The operands are the indices, and the elements at index 0.
ENTRY(gather, Gather) {
    struct Run {
        const Gather& a;
        DEVICE void operator()(u64 i, const i64* offsets) const {
            const i64* steps = a.axes[a.ndim - 1].strides;
            for (u32 j = 0; j < a.vector; j++) {
                u64 at = local_index(a.ids, ((const i64*)a.in[0])[offsets[0] + j * steps[0]]);
                T value = to<T>(A(0));
                if (at < a.ids.size) value = ((const T*)a.in[1])[offsets[1] + j * steps[1] + at * a.stride];
                ((T*)a.out)[i * a.vector + j] = value;
            }
        }
    };
    each_index(a, Run{a});
}

// Must match `Keys` in `index.rs`.
struct ScatterKeys : Map<3> {
    Ids ids;
    u64 stride;
    u64* values;
    // The key of indices elsewhere.
    u64 none;
};
// The operands are the indices, the elements at index 0, and the terms. A key is the offset of the element that a term is added to,
// and the value that of the term.
ENTRY(scatter_keys, ScatterKeys) {
    struct Run {
        const ScatterKeys& a;
        DEVICE void operator()(u64 i, const i64* offsets) const {
            const i64* steps = a.axes[a.ndim - 1].strides;
            for (u32 j = 0; j < a.vector; j++) {
                u64 at = local_index(a.ids, ((const i64*)a.in[0])[offsets[0] + j * steps[0]]);
                u64 key = (u64)(offsets[1] + j * steps[1]) + at * a.stride;
                ((u64*)a.out)[i * a.vector + j] = at < a.ids.size ? key : a.none;
                a.values[i * a.vector + j] = (u64)(offsets[2] + j * steps[2]);
            }
        }
    };
    each_index(a, Run{a});
}

// Must match `Scatter` in `index.rs`.
struct Scatter {
    T* out;
    const T* source;
    const u64* keys;
    const u64* values;
    // The number of keys, the number along the dim, and the distance of neighbours along it.
    u64 count, n, inner;
    u64 none;
};

// The first of equal keys along the dim adds the terms of all of them.
ENTRY(scatter_few, Scatter) {
    for (u64 i = FIRST; i < a.count; i += STEP) {
        u64 key = a.keys[i];
        if (key == a.none) continue;
        u64 row = quotient(i, a.inner), at = row - quotient(row, a.n) * a.n;
        const u64* keys = a.keys + i - at * a.inner;
        bool is_first = true;
        for (u64 j = 0; j < at && is_first; j++) is_first = keys[j * a.inner] != key;
        if (!is_first) continue;
        A sum = acc(a.out[key]);
        const u64* values = a.values + i - at * a.inner;
        for (u64 j = at; j < a.n; j++)
            if (keys[j * a.inner] == key) sum = add(sum, acc(a.source[values[j * a.inner]]));
        a.out[key] = to<T>(sum);
    }
}

// The keys are sorted. The first of equal ones adds the terms of all of them.
ENTRY(scatter_sorted, Scatter) {
    for (u64 i = FIRST; i < a.count; i += STEP) {
        u64 key = a.keys[i];
        if (key == a.none || (i > 0 && a.keys[i - 1] == key)) continue;
        u64 end = i + 1, step = 1;
        while (step > 0) {
            if (end + step <= a.count && a.keys[end + step - 1] == key) {
                end += step;
                step *= 2;
            } else {
                step /= 2;
            }
        }
        A sum = acc(a.out[key]);
#pragma unroll 4
        for (u64 j = i; j < end; j++) sum = add(sum, acc(a.source[a.values[j]]));
        a.out[key] = to<T>(sum);
    }
}
