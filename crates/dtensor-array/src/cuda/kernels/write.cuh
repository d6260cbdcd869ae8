// Entries replaced by index.

// Must match `Mark` in `write.rs`.
struct Mark {
    const i64* ids;
    u64* table;
    u64 n, whole;
    Site site;
    u64 dim;
};

// Writes 1 + its position to the table's entry of each index.
ENTRY(mark, Mark) {
    for (u64 i = FIRST; i < a.n; i += STEP) {
        i64 id = a.ids[i];
        if ((u64)id >= a.whole) report(a.site, OUT_OF_BOUNDS, id, (u32)a.dim, (i64)a.whole);
        else if (atomicCAS(&a.table[id], 0ull, i + 1) != 0) report(a.site, TWICE, id, (u32)a.dim, 0);
    }
}

// Must match `IndexWrite` in `write.rs`.
struct IndexWrite {
    const unsigned char* x;
    const unsigned char* source;
    unsigned char* out;
    const u64* table;
    u64 count, inner, size, n, start, word;
};

template <class W> DEVICE void index_write(const IndexWrite& a) {
    const W* x = (const W*)a.x;
    const W* source = (const W*)a.source;
    for (u64 i = FIRST; i < a.count; i += STEP) {
        u64 row = quotient(i, a.inner), outer = quotient(row, a.size);
        u64 position = a.table[a.start + row - outer * a.size];
        const W* from = position ? &source[(outer * a.n + position - 1) * a.inner + i - row * a.inner] : &x[i];
        ((W*)a.out)[i] = *from;
    }
}
ENTRY(index_write, IndexWrite) {
    switch (a.word) {
    case 1: return index_write<unsigned char>(a);
    case 2: return index_write<unsigned short>(a);
    case 4: return index_write<u32>(a);
    case 8: return index_write<u64>(a);
    default: return index_write<Pack<u64, 2>>(a);
    }
}
