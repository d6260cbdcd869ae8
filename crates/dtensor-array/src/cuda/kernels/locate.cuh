// Indices in a shard as indices in the full array.

// Must match `Locate` in `locate.rs`.
struct LocateArgs : Map<1> {
    u64 sizes[16], strides[16];
    u64 first, ndim;
};

struct InFull {
    const LocateArgs& a;
    DEVICE T operator()(T index) const {
        if (index < 0) return index;
        u64 rest = (u64)index, full = a.first;
        for (int d = (int)a.ndim - 1; d >= 0; d--) {
            full += rest % a.sizes[d] * a.strides[d];
            rest /= a.sizes[d];
        }
        return (T)full;
    }
};
ENTRY(locate, LocateArgs) { map1<T, T>(a, InFull{a}); }
