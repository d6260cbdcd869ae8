// Scaling by a factor that is known only on the GPU.

// Must match `Scale` in `clip.rs`.
struct Scale {
    T* x;
    const double* by;
    u64 numel;
};
ENTRY(scale_by, Scale) {
    double by = *a.by;
    if (by == 1.0) return;
    for (u64 i = FIRST; i < a.numel; i += STEP) a.x[i] = to<T>(acc(a.x[i]) * (A)by);
}
