// Layer norm and RMS norm of rows, and their gradients. As on the host, the mean is the sum of two numbers that are subtracted one
// after the other, because its rounding error matters if it is large.

// Must match `Args` in `norm.rs`.
struct Args : Lines {
    const T* x;
    // Of dtype `T` if `dy_dtype` is 0, else of that dtype.
    const void* dy;
    u64 dy_dtype;
    // Added to the gradient of `x`; null if nothing is.
    const T* addend;
    // Of dtype `T`, or of the accumulation type if `is_wide`; null if all are 1 or 0.
    const void* weight;
    const void* bias;
    u64 is_wide;
    double eps;
    T* out;
    A* mean;
    A* rstd;
    // The rounding error of the mean, which the gradients of the parameters need; null if they are not needed.
    A* rest;
    // The sums of some rows each, `[splits, n]`, for the gradients of the weight and the bias; null if they are not needed.
    A* weight_parts;
    A* bias_parts;
    u64 rows_per_split;
};

// Loads `V` elements of a parameter of type `W`.
template <int V, class W> DEVICE Pack<A, V> parameter(const void* from, u64 i, A otherwise) {
    Pack<A, V> pack;
    if (from) {
        Pack<W, V> values = *(const Pack<W, V>*)((const W*)from + i);
        for (int j = 0; j < V; j++) pack.values[j] = acc(values.values[j]);
    } else {
        for (int j = 0; j < V; j++) pack.values[j] = otherwise;
    }
    return pack;
}

template <int V, class W, bool CENTER> DEVICE void forward(const Args& a) {
    SHARED_BYTES(shared);
    each_line(a, [&](const Line& line) {
        Kept<V> kept(shared, a, line, 0);
        A count = A((double)a.n), shift = CENTER && line.n > 0 ? acc(a.x[line.first]) : A(0), sum = A(0);
        line.each<V>(a.x, [&](u64 i, const auto& x) {
            if (a.room) kept.set(i, x);
            A terms = A(0);
            for (int j = 0; j < WIDTH(x); j++) {
                A d = acc(x.values[j]) - shift;
                terms += CENTER ? d : d * d;
            }
            sum += terms;
        });
        sum = line.sum(sum);
        A rest = A(0), squares = sum;
        if (CENTER) {
            rest = sum / count;
            squares = A(0);
            line.walk<V>([&](u64 i, auto width) {
            constexpr int N = decltype(width)::N;
                Pack<T, N> x = a.room ? kept.template get<N>(i) : line.load<N>(a.x, i);
                A terms = A(0);
                for (int j = 0; j < N; j++) {
                    A d = (acc(x.values[j]) - shift) - rest;
                    terms += d * d;
                }
                squares += terms;
            });
            squares = line.sum(squares);
        }
        A rstd = A(1) / sqrt(squares / count + A(a.eps));
        if (line.lane == 0 && line.index < a.lines) {
            if (CENTER) a.mean[line.index] = shift + rest;
            a.rstd[line.index] = rstd;
        }
        line.walk<V>([&](u64 i, auto width) {
            constexpr int N = decltype(width)::N;
            Pack<T, N> x = a.room ? kept.template get<N>(i) : line.load<N>(a.x, i), y;
            Pack<A, N> weight = parameter<N, W>(a.weight, i, A(1)), bias = parameter<N, W>(a.bias, i, A(0));
            for (int j = 0; j < N; j++) {
                A xhat = ((acc(x.values[j]) - shift) - rest) * rstd;
                y.values[j] = to<T>(xhat * weight.values[j] + bias.values[j]);
            }
            line.store<N>(a.out, i, y);
        });
    });
}

// Adds the elements of the addend to a gradient.
template <int N> DEVICE void add_to(Pack<T, N>& dx, const Args& a, const Line& line, u64 i) {
    if (!a.addend) return;
    Pack<T, N> more = line.load<N>(a.addend, i);
    for (int j = 0; j < N; j++) dx.values[j] = to<T>(acc(dx.values[j]) + acc(more.values[j]));
}

template <int V, class W, bool CENTER> DEVICE void backward(const Args& a) {
    SHARED_BYTES(shared);
    each_line(a, [&](const Line& line) {
        Kept<V> xs(shared, a, line, 0), dys(shared, a, line, 1);
        bool is_there = line.index < a.lines;
        A count = A((double)a.n), mean = CENTER && is_there ? a.mean[line.index] : A(0);
        A rstd = is_there ? a.rstd[line.index] : A(0);
        A rest = A(0), g_sum = A(0), g_d_sum = A(0);
        // With g = dy·weight and x̂ the normalised row: dx = rstd·(g − mean(g) − x̂·mean(g·x̂)).
        line.each<V>(a.x, (const T*)a.dy, [&](u64 i, const auto& x, const auto& dy) {
            if (a.room) {
                xs.set(i, x);
                dys.set(i, dy);
            }
            Pack<A, WIDTH(x)> weight = parameter<WIDTH(x), W>(a.weight, i, A(1));
            A ds = A(0), gs = A(0), gds = A(0);
            for (int j = 0; j < WIDTH(x); j++) {
                A d = acc(x.values[j]) - mean, g = acc(dy.values[j]) * weight.values[j];
                ds += d;
                gs += g;
                gds += g * d;
            }
            rest += ds;
            g_sum += gs;
            g_d_sum += gds;
        });
        g_d_sum = line.sum(g_d_sum);
        A g_mean = A(0);
        if (CENTER) {
            rest = line.sum(rest) / count;
            g_sum = line.sum(g_sum);
            g_mean = g_sum / count;
        } else {
            rest = A(0);
        }
        A g_xhat_mean = (CENTER ? g_d_sum - rest * g_sum : g_d_sum) * rstd / count;
        if (a.rest && line.lane == 0 && is_there) a.rest[line.index] = rest;
        line.walk<V>([&](u64 i, auto width) {
            constexpr int N = decltype(width)::N;
            Pack<T, N> x = a.room ? xs.template get<N>(i) : line.load<N>(a.x, i);
            Pack<T, N> dy = a.room ? dys.template get<N>(i) : line.load<N>((const T*)a.dy, i), dx;
            Pack<A, N> weight = parameter<N, W>(a.weight, i, A(1));
            for (int j = 0; j < N; j++) {
                A xhat = ((acc(x.values[j]) - mean) - rest) * rstd, g = acc(dy.values[j]) * weight.values[j];
                dx.values[j] = to<T>(rstd * (g - g_mean - xhat * g_xhat_mean));
            }
            add_to(dx, a, line, i);
            line.store<N>(a.out, i, dx);
        });
    });
}

// The packs of a row that a thread holds. As in `norm.rs`.
#define HELD (sizeof(T) == 2 ? 2 : 4)

// As `backward`, and sums dy·x̂ and dy over the rows of each block, of which a thread holds its part in registers.
// `D` is the type of `dy`.
template <int V, class W, class D, bool CENTER> DEVICE void gradients(const Args& a) {
    SHARED_BYTES(shared);
    A weights[HELD][V], biases[HELD][V];
    for (int k = 0; k < HELD; k++)
        for (int j = 0; j < V; j++) weights[k][j] = biases[k][j] = A(0);
    each_line(a, [&](const Line& line) {
        Pack<T, V> xs[HELD];
        Pack<D, V> dys[HELD];
        const D* dy = (const D*)a.dy + line.first;
        u64 first = line.lane * V, step = line.team * V;
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (first + k * step < line.n) {
                xs[k] = line.load<V>(a.x, first + k * step);
                dys[k] = *(const Pack<D, V>*)(dy + first + k * step);
            }
        bool is_there = line.index < a.lines;
        A count = A((double)a.n), mean = CENTER && is_there ? a.mean[line.index] : A(0);
        A rstd = is_there ? a.rstd[line.index] : A(0);
        A rest = A(0), g_sum = A(0), g_d_sum = A(0);
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (first + k * step < line.n) {
                Pack<A, V> weight = parameter<V, W>(a.weight, first + k * step, A(1));
                A ds = A(0), gs = A(0), gds = A(0);
                for (int j = 0; j < V; j++) {
                    A d = acc(xs[k].values[j]) - mean, g = acc(dys[k].values[j]) * weight.values[j];
                    ds += d;
                    gs += g;
                    gds += g * d;
                }
                rest += ds;
                g_sum += gs;
                g_d_sum += gds;
            }
        g_d_sum = line.sum(g_d_sum);
        A g_mean = A(0);
        if (CENTER) {
            rest = line.sum(rest) / count;
            g_sum = line.sum(g_sum);
            g_mean = g_sum / count;
        } else {
            rest = A(0);
        }
        A g_xhat_mean = (CENTER ? g_d_sum - rest * g_sum : g_d_sum) * rstd / count;
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (first + k * step < line.n) {
                Pack<A, V> weight = parameter<V, W>(a.weight, first + k * step, A(1));
                Pack<T, V> dx;
                for (int j = 0; j < V; j++) {
                    A xhat = ((acc(xs[k].values[j]) - mean) - rest) * rstd, d = acc(dys[k].values[j]);
                    dx.values[j] = to<T>(rstd * (d * weight.values[j] - g_mean - xhat * g_xhat_mean));
                    weights[k][j] += d * xhat;
                    biases[k][j] += d;
                }
                add_to(dx, a, line, first + k * step);
                line.store<V>(a.out, first + k * step, dx);
            }
    });
    // The teams of the block have summed different rows.
    A* sums = (A*)shared;
    u32 lane = threadIdx.x % a.team, slot = threadIdx.x / a.team;
    for (int which = 0; which < 2; which++) {
        A* parts = which ? a.bias_parts : a.weight_parts;
        if (!parts) continue;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            u64 i = (u64)(lane + k * a.team) * V;
            if (i < a.n)
                for (int j = 0; j < V; j++) sums[slot * a.n + i + j] = which ? biases[k][j] : weights[k][j];
        }
        __syncthreads();
        for (u64 i = threadIdx.x; i < a.n; i += blockDim.x) {
            double sum = 0.0;
            for (u32 row = 0; row < a.across; row++) sum += (double)sums[row * a.n + i];
            parts[blockIdx.x * a.n + i] = (A)sum;
        }
        __syncthreads();
    }
}

#define PACKED (16 / sizeof(T))
template <bool CENTER> DEVICE void gradients_any(const Args& a) {
    if (sizeof(T) < sizeof(A) && a.is_wide)
        a.vector == 1 ? gradients<1, A, T, CENTER>(a) : gradients<PACKED, A, T, CENTER>(a);
    else if (a.vector == 1) gradients<1, T, T, CENTER>(a);
#if DTYPE == 4
    // Numbers of dtypes are those of `DType`.
    else if (a.dy_dtype == 2) gradients<PACKED, T, half_t, CENTER>(a);
    else if (a.dy_dtype == 3) gradients<PACKED, T, bfloat_t, CENTER>(a);
#endif
    else gradients<PACKED, T, T, CENTER>(a);
}
template <bool CENTER> DEVICE void forward_any(const Args& a) {
    // The accumulation type may be the element type, which is compiled once.
    if (sizeof(T) < sizeof(A) && a.is_wide) a.vector == 1 ? forward<1, A, CENTER>(a) : forward<PACKED, A, CENTER>(a);
    else a.vector == 1 ? forward<1, T, CENTER>(a) : forward<PACKED, T, CENTER>(a);
}
template <bool CENTER> DEVICE void backward_any(const Args& a) {
    if (sizeof(T) < sizeof(A) && a.is_wide) a.vector == 1 ? backward<1, A, CENTER>(a) : backward<PACKED, A, CENTER>(a);
    else a.vector == 1 ? backward<1, T, CENTER>(a) : backward<PACKED, T, CENTER>(a);
}
BLOCK_ENTRY(layer_norm, Args) { forward_any<true>(a); }
BLOCK_ENTRY(rms_norm, Args) { forward_any<false>(a); }
BLOCK_ENTRY(layer_norm_backward, Args) { backward_any<true>(a); }
BLOCK_ENTRY(rms_norm_backward, Args) { backward_any<false>(a); }
BLOCK_ENTRY(layer_norm_gradients, Args) { gradients_any<true>(a); }
BLOCK_ENTRY(rms_norm_gradients, Args) { gradients_any<false>(a); }

// Threads side by side and above each other in the sums over rows.
#define ACROSS 32
#define DOWN 8

// Adds the values of the threads above each other. The first ones get the result.
DEVICE double sum_down(double x) {
    __shared__ double buffer[ACROSS * DOWN];
    buffer[threadIdx.x] = x;
    __syncthreads();
    for (u32 half = DOWN / 2; half > 0; half /= 2) {
        if (threadIdx.x < half * ACROSS) buffer[threadIdx.x] += buffer[threadIdx.x + half * ACROSS];
        __syncthreads();
    }
    x = buffer[threadIdx.x];
    __syncthreads();
    return x;
}

// Sums dy·x̂ and dy over the rows of each split.
template <int V, bool CENTER> DEVICE void parameter_parts(const Args& a) {
    u64 column = ((u64)blockIdx.x * ACROSS + threadIdx.x % ACROSS) * V;
    u64 row = blockIdx.y * a.rows_per_split + threadIdx.x / ACROSS, end = (blockIdx.y + 1) * a.rows_per_split;
    if (end > a.lines) end = a.lines;
    A weights[V], biases[V];
    for (int j = 0; j < V; j++) weights[j] = biases[j] = A(0);
    if (column < a.n) {
#pragma unroll 4
        for (; row < end; row += DOWN) {
            u64 at = row * a.n + column;
            Pack<T, V> x = *(const Pack<T, V>*)(a.x + at), dy = *(const Pack<T, V>*)((const T*)a.dy + at);
            A mean = CENTER ? a.mean[row] : A(0), rest = CENTER ? a.rest[row] : A(0), rstd = a.rstd[row];
            for (int j = 0; j < V; j++) {
                A d = acc(dy.values[j]);
                weights[j] += d * (((acc(x.values[j]) - mean) - rest) * rstd);
                biases[j] += d;
            }
        }
    }
    for (int j = 0; j < V; j++) {
        double weight = sum_down((double)weights[j]), bias = a.bias_parts ? sum_down((double)biases[j]) : 0.0;
        if (threadIdx.x < ACROSS && column < a.n) {
            if (a.weight_parts) a.weight_parts[blockIdx.y * a.n + column + j] = (A)weight;
            if (a.bias_parts) a.bias_parts[blockIdx.y * a.n + column + j] = (A)bias;
        }
    }
}
BLOCK_ENTRY(layer_norm_parameters, Args) {
    a.vector == 1 ? parameter_parts<1, true>(a) : parameter_parts<PACKED, true>(a);
}
BLOCK_ENTRY(rms_norm_parameters, Args) {
    a.vector == 1 ? parameter_parts<1, false>(a) : parameter_parts<PACKED, false>(a);
}

// Must match `SumParts` in `norm.rs`.
struct SumParts {
    const A* parts[2];
    T* out[2];
    u64 n, splits;
};
// Sums the splits of each column, of one array or of two.
BLOCK_ENTRY(sum_parts, SumParts) {
    u64 column = (u64)blockIdx.x * ACROSS + threadIdx.x % ACROSS;
    const A* parts = a.parts[blockIdx.y];
    double sum = 0.0;
    if (column < a.n) {
#pragma unroll 4
        for (u64 i = threadIdx.x / ACROSS; i < a.splits; i += DOWN) sum += (double)parts[i * a.n + column];
    }
    sum = sum_down(sum);
    if (threadIdx.x < ACROSS && column < a.n) a.out[blockIdx.y][column] = to<T>((A)sum);
}
