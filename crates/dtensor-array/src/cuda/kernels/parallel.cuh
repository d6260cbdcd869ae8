// Element-wise reductions of several arrays, in list order.

#define INPUTS 64

// Must match `Combine` in `parallel.rs`.
struct Combine {
    T* out;
    u64 count;
    // The elements of the result are rows of `run` elements in the inputs: the first at `start`, `stride` apart.
    u64 run, start, stride;
    u32 inputs, vector;
    // Whether the sum is divided by the number of inputs.
    u32 averages, reserved;
    // The addresses of the inputs, if they are more than fit here.
    const T* const* table;
    const T* list[INPUTS];
};

template <int V, class F> DEVICE void combine(const Combine& a, F f) {
    const T* const* inputs = a.table ? a.table : a.list;
    for (u64 i = FIRST; i < a.count / V; i += STEP) {
        u64 row = quotient(i * V, a.run), from = row * a.stride + a.start + (i * V - row * a.run);
        Pack<T, V> x = *(const Pack<T, V>*)(inputs[0] + from), y;
        A merged[V];
        for (int v = 0; v < V; v++) merged[v] = acc(x.values[v]);
#pragma unroll 4
        for (u32 k = 1; k < a.inputs; k++) {
            x = *(const Pack<T, V>*)(inputs[k] + from);
            for (int v = 0; v < V; v++) merged[v] = f(merged[v], acc(x.values[v]));
        }
        for (int v = 0; v < V; v++) y.values[v] = to<T>(a.averages ? merged[v] / A(a.inputs) : merged[v]);
        ((Pack<T, V>*)a.out)[i] = y;
    }
}

struct Product {
    DEVICE A operator()(A x, A y) const { return multiply(x, y); }
};

//! kernels: sum product max min
#define COMBINE(name, F)                                              \
    ENTRY(name, Combine) {                                            \
        if (a.vector == 1) combine<1>(a, F());                        \
        else combine<16 / sizeof(T)>(a, F());                         \
    }
COMBINE(sum, Sum)
COMBINE(product, Product)
COMBINE(max, Largest)
COMBINE(min, Smallest)
