// Optimizer steps of many parameters in one launch.

// A parameter: the addresses of its value, its gradient and its state. Must match `Slot` in `optim.rs`.
struct Slot {
    T* arrays[5];
    u64 numel;
};

#define SLOTS 72
// The number of elements that a block updates.
#define CHUNK 4096

// Must match `Update` in `optim.rs`.
struct Update {
    double numbers[9];
    // The numbers in a recording, which may change them from replay to replay.
    const double* recorded;
    u32 nesterov;
    u32 count;
    Slot slots[SLOTS];
    // The first block of each parameter, and the number of blocks.
    u32 first[SLOTS + 1];
};

DEVICE A number(const Update& a, int i) { return (A)(a.recorded ? a.recorded : a.numbers)[i]; }

// Calls `f(x)` for each index of the arrays of all parameters. `x` holds the elements of the `N` arrays, and those that `writes`
// has a bit for are replaced.
template <int N, class F> DEVICE void update(const Update& a, u32 writes, F f) {
    u32 from = 0, end = a.count;
    while (end - from > 1) {
        u32 middle = (from + end) / 2;
        if (a.first[middle] <= blockIdx.x) from = middle;
        else end = middle;
    }
    const Slot& slot = a.slots[from];
    u64 start = (u64)(blockIdx.x - a.first[from]) * CHUNK;
    int n = slot.numel - start < CHUNK ? (int)(slot.numel - start) : CHUNK;
    T* arrays[N];
    bool is_wide = true;
    for (int k = 0; k < N; k++) {
        arrays[k] = slot.arrays[k] + start;
        is_wide = is_wide && (u64)arrays[k] % 16 == 0;
    }
    constexpr int V = 16 / sizeof(T);
    int whole = is_wide ? n / V * V : 0;
    for (int i = threadIdx.x * V; i < whole; i += blockDim.x * V) {
        Pack<T, V> packs[N];
        for (int k = 0; k < N; k++) packs[k] = *(const Pack<T, V>*)(arrays[k] + i);
        for (int j = 0; j < V; j++) {
            A x[N];
            for (int k = 0; k < N; k++) x[k] = acc(packs[k].values[j]);
            f(x);
            for (int k = 0; k < N; k++) packs[k].values[j] = to<T>(x[k]);
        }
        for (int k = 0; k < N; k++)
            if (writes >> k & 1) *(Pack<T, V>*)(arrays[k] + i) = packs[k];
    }
    for (int i = whole + threadIdx.x; i < n; i += blockDim.x) {
        A x[N];
        for (int k = 0; k < N; k++) x[k] = acc(arrays[k][i]);
        f(x);
        for (int k = 0; k < N; k++)
            if (writes >> k & 1) arrays[k][i] = to<T>(x[k]);
    }
}

// Adds weight decay to the gradient. Without decay the gradient does not change, even if the value is not finite.
DEVICE A add_decay(A g, A decay, A p) { return decay == A(0) ? g : g + decay * p; }

struct Sgd {
    A lr, decay, keep, gain, sign;
    bool nesterov;
    DEVICE Sgd(const Update& a)
        : lr(number(a, 0)), decay(number(a, 1)), keep(number(a, 2)), gain(number(a, 3)),
          sign(number(a, 4)), nesterov(a.nesterov) {}
};
struct PlainSgd : Sgd {
    DEVICE PlainSgd(const Update& a) : Sgd(a) {}
    DEVICE void operator()(A (&x)[2]) const { x[0] = x[0] - lr * add_decay(x[1] * sign, decay, x[0]); }
};
struct MomentumSgd : Sgd {
    DEVICE MomentumSgd(const Update& a) : Sgd(a) {}
    DEVICE void operator()(A (&x)[3]) const {
        A g = add_decay(x[1] * sign, decay, x[0]);
        A m = keep * x[2] + gain * g;
        x[0] = x[0] - lr * (nesterov ? g + keep * m : m);
        x[2] = m;
    }
};
ENTRY(sgd, Update) { update<2>(a, 1, PlainSgd(a)); }
ENTRY(sgd_momentum, Update) { update<3>(a, 5, MomentumSgd(a)); }

DEVICE float root(float x) { return sqrtf(x); }
DEVICE double root(double x) { return sqrt(x); }

template <int N> struct Adam {
    A lr, scale, first, beta2, second, eps, decay, shrink, sign;
    DEVICE Adam(const Update& a)
        : lr(number(a, 0)), scale(number(a, 1)), first(number(a, 2)), beta2(number(a, 3)),
          second(number(a, 4)), eps(number(a, 5)), decay(number(a, 6)), shrink(number(a, 7)),
          sign(number(a, 8)) {}
    DEVICE void operator()(A (&x)[N]) const {
        A g = add_decay(x[1] * sign, decay, x[0]);
        A m = x[2] + first * (g - x[2]);
        A v = beta2 * x[3] + second * g * g;
        A most = v;
        if (N == 5) {
            most = larger(x[N - 1], v);
            x[N - 1] = most;
        }
        x[0] = x[0] * shrink - lr * (m / (root(most) * scale + eps));
        x[2] = m;
        x[3] = v;
    }
};
ENTRY(adam, Update) { update<4>(a, 13, Adam<4>(a)); }
ENTRY(adam_largest, Update) { update<5>(a, 29, Adam<5>(a)); }

struct Scale {
    A by;
    DEVICE void operator()(A (&x)[1]) const { x[0] = x[0] * by; }
};
ENTRY(scale, Update) { update<1>(a, 1, Scale{number(a, 0)}); }

struct Clamp {
    A low, high;
    DEVICE void operator()(A (&x)[1]) const {
        A y = x[0] < low ? low : x[0];
        x[0] = y > high ? high : y;
    }
};
ENTRY(clamp, Update) { update<1>(a, 1, Clamp{number(a, 0), number(a, 1)}); }
