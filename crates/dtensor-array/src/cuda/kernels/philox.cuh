// The generator of random words: Philox 4×32-10, as in `host/random/philox.rs`.

struct Draw {
    u64 seed, stream;
    // The seed and number of a replay's first draw, to which this one is relative; null for a draw by itself.
    const u64* first;
};

struct Words {
    u32 x[4];
};

// The words of a block.
DEVICE Words philox(const Draw& draw, u64 block) {
    u64 seed = draw.seed, stream = draw.stream;
    if (draw.first) {
        seed += draw.first[0];
        stream += draw.first[1];
    }
    u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = (u32)stream, c3 = (u32)(stream >> 32);
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        u64 p = (u64)c0 * 0xd2511f53u, q = (u64)c2 * 0xcd9e8d57u;
        c0 = (u32)(q >> 32) ^ c1 ^ k0;
        c1 = (u32)q;
        c2 = (u32)(p >> 32) ^ c3 ^ k1;
        c3 = (u32)p;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return Words{{c0, c1, c2, c3}};
}

// The words that count as a success: those below `under`, or all.
struct Threshold {
    u32 under, all;
    DEVICE bool contains(u32 word) const { return word < under || all; }
};
