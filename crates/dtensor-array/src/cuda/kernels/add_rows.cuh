// Rows added by index. Terms are added in the order of the indices.

// The number of terms in one partial sum.
#define TERMS 64

// Must match `AddRows` in `index.rs`.
struct AddRows {
    const T* dy;
    T* out;
    A* partials;
    // The positions of each index of the shard: `at[begin[j]]` to before `at[end[j]]`, and the index at each place.
    const u64* at;
    const u64* keys;
    const u64* begin;
    const u64* end;
    u64 outer, size, inner, n;
    u64 vector;
};

template <int V> DEVICE Pack<A, V> sum_rows(const AddRows& a, const T* dy, u64 from, u64 to) {
    Pack<A, V> sum;
    for (int v = 0; v < V; v++) sum.values[v] = A(0);
#pragma unroll 4
    for (u64 i = from; i < to; i++) {
        Pack<T, V> x = *(const Pack<T, V>*)(dy + a.at[i] * a.inner);
        for (int v = 0; v < V; v++) sum.values[v] = add(sum.values[v], acc(x.values[v]));
    }
    return sum;
}

// A sum of many terms is one of partial sums. Those but the first of each sum are computed here: at most one of them begins in each
// range of `TERMS` places.
template <int V> DEVICE void add_partials(const AddRows& a) {
    u64 width = a.inner / V, ranges = (a.n + TERMS - 1) / TERMS;
    for (u64 i = FIRST; i < ranges * a.outer * width; i += STEP) {
        u64 row = quotient(i, width), column = (i - row * width) * V;
        u64 range = quotient(row, a.outer), outer = row - range * a.outer;
        u64 key = a.keys[range * TERMS];
        if (key >= a.size) continue;
        u64 begin = a.begin[key], end = a.end[key];
        u64 from = range * TERMS + (begin - range * TERMS) % TERMS;
        if (from <= begin || from >= end) continue;
        u64 until = from + TERMS < end ? from + TERMS : end;
        *(Pack<A, V>*)(a.partials + row * a.inner + column) =
            sum_rows<V>(a, a.dy + outer * a.n * a.inner + column, from, until);
    }
}

template <int V> DEVICE void add_rows(const AddRows& a) {
    u64 width = a.inner / V;
    for (u64 i = FIRST; i < a.outer * a.size * width; i += STEP) {
        u64 row = quotient(i, width), column = (i - row * width) * V;
        u64 outer = quotient(row, a.size), key = row - outer * a.size;
        u64 begin = a.begin[key], end = a.end[key];
        const T* dy = a.dy + outer * a.n * a.inner + column;
        Pack<T, V> y;
        if (begin == end) {
            for (int v = 0; v < V; v++) y.values[v] = to<T>(A(0));
        } else {
            y = *(const Pack<T, V>*)(dy + a.at[begin] * a.inner);
            if (end - begin == 2) {
                // As in main memory, where the sum of two -0 is -0.
                Pack<T, V> x = *(const Pack<T, V>*)(dy + a.at[begin + 1] * a.inner);
                for (int v = 0; v < V; v++) y.values[v] = to<T>(add(acc(y.values[v]), acc(x.values[v])));
            } else if (end - begin > 2) {
                Pack<A, V> sum = sum_rows<V>(a, dy, begin, begin + TERMS < end ? begin + TERMS : end);
                for (u64 from = begin + TERMS; from < end; from += TERMS) {
                    const A* partials = a.partials + (from / TERMS * a.outer + outer) * a.inner + column;
                    for (int v = 0; v < V; v++) sum.values[v] = add(sum.values[v], partials[v]);
                }
                for (int v = 0; v < V; v++) y.values[v] = to<T>(sum.values[v]);
            }
        }
        *(Pack<T, V>*)(a.out + row * a.inner + column) = y;
    }
}

ENTRY(add_partials, AddRows) {
    if (a.vector == 1) add_partials<1>(a);
    else add_partials<16 / sizeof(T)>(a);
}
ENTRY(add_rows, AddRows) {
    if (a.vector == 1) add_rows<1>(a);
    else add_rows<16 / sizeof(T)>(a);
}
