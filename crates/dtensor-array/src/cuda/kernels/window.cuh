// Which element of a full array each element of a shard is. Must match `window.rs`.

#define WINDOW_DIMS 8
#define WINDOW_RANGES 48

struct Window {
    // All indices, if the window has too many dims or ranges for the rest of this struct.
    const i64* table;
    // 0 if the shard is the full array.
    u32 ndim;
    u32 reserved;
    u32 size[WINDOW_DIMS];
    u64 stride[WINDOW_DIMS];
    // The ranges of each dim: from `ranges[d]` to before `ranges[d + 1]`.
    u32 ranges[WINDOW_DIMS + 1];
    // The first index of each range in the shard, and what is added to it in the full array.
    u32 at[WINDOW_RANGES];
    u64 shift[WINDOW_RANGES];
};

DEVICE u64 full_index(const Window& w, u64 i) {
    if (w.table) return (u64)w.table[i];
    if (w.ndim == 0) return i;
    u64 index = 0;
    for (int d = (int)w.ndim - 1; d >= 0; d--) {
        u64 next = i / w.size[d];
        u32 here = (u32)(i - next * w.size[d]);
        u32 range = w.ranges[d];
        while (range + 1 < w.ranges[d + 1] && w.at[range + 1] <= here) range++;
        index += (here + w.shift[range]) * w.stride[d];
        i = next;
    }
    return index;
}
