// Copies into regions of arrays, several at once. Elements of any type are copied as words of 1 to 16 bytes.

#define PIECES 24
#define PIECE_DIMS 5

// Must match `Piece` in `assign.rs`. Sizes and strides count words.
struct Piece {
    // Null: the words are the pattern.
    const unsigned char* source;
    unsigned char* target;
    u64 count;
    // The number of bytes of a word.
    u32 word;
    u32 ndim;
    struct {
        u64 size, source, target;
    } dims[PIECE_DIMS];
};
struct Assign {
    alignas(16) u64 pattern[2];
    Piece pieces[PIECES];
};

// The offset of the word `i` of a piece in its source and target.
template <class I> DEVICE void place(const Piece& p, u64 i, u64& source, u64& target) {
    source = target = 0;
    I rest = (I)i;
    for (u32 d = p.ndim - 1; d > 0; d--) {
        I size = (I)p.dims[d].size, next = rest / size, at = rest - next * size;
        source += at * p.dims[d].source;
        target += at * p.dims[d].target;
        rest = next;
    }
    source += rest * p.dims[0].source;
    target += rest * p.dims[0].target;
}

template <class W> DEVICE void assign(const Piece& p, const u64* pattern) {
    W value = *(const W*)pattern;
    const W* from = (const W*)p.source;
    W* to = (W*)p.target;
    for (u64 i = FIRST; i < p.count; i += STEP) {
        u64 source, target;
        if (p.count < (1ull << 32)) place<u32>(p, i, source, target);
        else place<u64>(p, i, source, target);
        to[target] = from ? from[source] : value;
    }
}

// Each `blockIdx.y` is a piece.
ENTRY(assign, Assign) {
    const Piece& p = a.pieces[blockIdx.y];
    switch (p.word) {
    case 1: return assign<unsigned char>(p, a.pattern);
    case 2: return assign<unsigned short>(p, a.pattern);
    case 4: return assign<u32>(p, a.pattern);
    case 8: return assign<u64>(p, a.pattern);
    default: return assign<Pack<u64, 2>>(p, a.pattern);
    }
}
