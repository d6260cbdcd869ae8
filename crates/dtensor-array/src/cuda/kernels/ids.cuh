// Indices into a dim, of which an array may hold a shard.

// The indices, and how they are checked. Must match `Ids` in `index.rs`.
struct Ids {
    const i64* ids;
    u64 n;
    // The first index of this shard, the number of its indices, and the size of the full dim.
    u64 start, size, whole;
    // An index to skip, if `has_skip`.
    i64 skip;
    Site site;
    u32 dim, has_skip;
};

// The position of an index in this shard, or `size` if it is elsewhere.
DEVICE u64 local_index(const Ids& a, i64 id) {
    if ((u64)id >= a.whole) {
        if (!a.has_skip || id != a.skip) report(a.site, OUT_OF_BOUNDS, id, a.dim, (i64)a.whole);
        return a.size;
    }
    u64 at = (u64)id - a.start;
    return at < a.size && !(a.has_skip && id == a.skip) ? at : a.size;
}
