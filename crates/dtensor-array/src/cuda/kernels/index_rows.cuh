// Entries selected by index. Elements of any type are copied as words of 1 to 16 bytes.

ENTRY(check, Ids) {
    for (u64 i = FIRST; i < a.n; i += STEP) local_index(a, a.ids[i]);
}

// Must match `Select` in `index.rs`. Sizes and strides count words.
struct Select {
    Ids ids;
    const unsigned char* x;
    unsigned char* out;
    u64 count, inner, outer_stride, stride, word;
};

template <class W> DEVICE void index_select(const Select& a) {
    const W* x = (const W*)a.x;
    const u64 none[2] = {0, 0};
    for (u64 i = FIRST; i < a.count; i += STEP) {
        u64 row = quotient(i, a.inner), outer = quotient(row, a.ids.n);
        u64 at = local_index(a.ids, a.ids.ids[row - outer * a.ids.n]);
        W value = *(const W*)none;
        if (at < a.ids.size) value = x[outer * a.outer_stride + at * a.stride + i - row * a.inner];
        ((W*)a.out)[i] = value;
    }
}
ENTRY(index_select, Select) {
    switch (a.word) {
    case 1: return index_select<unsigned char>(a);
    case 2: return index_select<unsigned short>(a);
    case 4: return index_select<u32>(a);
    case 8: return index_select<u64>(a);
    default: return index_select<Pack<u64, 2>>(a);
    }
}
