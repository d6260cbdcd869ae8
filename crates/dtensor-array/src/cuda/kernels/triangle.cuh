// The part of a matrix on one side of a diagonal. Not a function of elements alone, so it is never fused.

#ifndef FUSED
struct Triangle : Map<1> {
    u64 rows, columns;
    // The last diagonal of the lower triangle, or the first one of the upper.
    i64 diagonal;
    u32 lower, reserved;
};
template <int V> struct Keep {
    const Triangle& a;
    DEVICE void operator()(u64 i, const i64* offsets) const {
        u64 line, column;
        if (a.numel < (1ull << 32)) {
            u32 first = (u32)i * V, columns = (u32)a.columns;
            line = first / columns;
            column = first - (u32)line * columns;
            line = (u32)line % (u32)a.rows;
        } else {
            line = i * V / a.columns;
            column = i * V - line * a.columns;
            line %= a.rows;
        }
        bool inside[V], any = false;
        for (int j = 0; j < V; j++) {
            i64 distance = (i64)column - (i64)line;
            inside[j] = a.lower ? distance <= a.diagonal : distance >= a.diagonal;
            any |= inside[j];
            if (++column == a.columns) {
                column = 0;
                if (++line == a.rows) line = 0;
            }
        }
        // What is not kept is not loaded.
        Pack<T, V> x;
        if (any) x = load<T, V>(a, 0, offsets[0]);
        for (int j = 0; j < V; j++)
            if (!inside[j]) x.values[j] = to<T>(A(0));
        ((Pack<T, V>*)a.out)[i] = x;
    }
};
ENTRY(triangle, Triangle) {
    if (a.vector == 1) each_index(a, Keep<1>{a});
    else each_index(a, Keep<16 / sizeof(T)>{a});
}
#endif
