// Functions of three arrays.

struct Lerp {
    DEVICE A operator()(A x, A y, A z) const { return formula::lerp(x, y, z); }
};
ENTRY(lerp, Map<3>) { map3<T, T, T, T>(a, widened(Lerp())); }
