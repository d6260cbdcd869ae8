// Cross-entropy and negative log-likelihood. A line holds the classes of one position.

// Must match `Args` in `loss.rs`.
struct Args : Lines {
    // The logits or log-probabilities.
    const T* x;
    const i64* target;
    // The weights of all classes, and their sum; null if all are 1.
    const T* weight;
    const A* weight_sum;
    // The values of each position over all classes.
    const A* maxima;
    const A* totals;
    const A* picked;
    // The gradients of the losses: of type `T` for negative log-likelihoods, else `A`. So are the losses and weights.
    const void* scale;
    void* out;
    void* out_weights;
    A* out_maxima;
    A* out_totals;
    // The number of all classes, and the first one of the array.
    i64 classes, first_class, ignore_index;
    // 1 − label smoothing, and label smoothing / number of all classes.
    double keep, spread;
    u64 is_smooth;
    Site site;
};

// Returns the class of a position, or −1 if it is ignored, invalid, or not there.
DEVICE i64 class_of(const Args& a, u64 position) {
    if (position >= a.lines) return -1;
    i64 index = a.target[position];
    if (index == a.ignore_index) return -1;
    if (index >= 0 && index < a.classes) return index;
    report(a.site, OUT_OF_BOUNDS, index, 1, a.classes);
    return -1;
}

// Returns the index of a class in the array, or −1 if the array does not hold it.
DEVICE i64 local_index(const Args& a, i64 cls) {
    i64 at = cls - a.first_class;
    return cls >= 0 && at >= 0 && at < (i64)a.n ? at : -1;
}

DEVICE A weight_of(const Args& a, i64 cls) { return cls < 0 ? A(0) : a.weight ? acc(a.weight[cls]) : A(1); }
DEVICE A weight_sum(const Args& a) { return a.weight_sum ? *a.weight_sum : A(a.classes); }

// The loss of a position. Logits are relative to the largest one: `x` is that of the target, `log_sum` the logarithm of the sum of
// exponentials, and `weighted` the sum of the logits times the class weights.
DEVICE A loss_of(const Args& a, i64 cls, A x, A log_sum, A weighted) {
    A loss = A(a.keep) * weight_of(a, cls) * (log_sum - x);
    return a.is_smooth ? loss + A(a.spread) * (weight_sum(a) * log_sum - weighted) : loss;
}

DEVICE void write_position(const Args& a, u64 position, i64 cls, A loss, A largest, A total) {
    ((A*)a.out)[position] = cls < 0 ? A(0) : loss;
    ((A*)a.out_weights)[position] = weight_of(a, cls);
    a.out_maxima[position] = cls < 0 ? A(0) : largest;
    a.out_totals[position] = cls < 0 ? A(1) : total;
}

// Sums the differences of the logits from `largest` times the class weights.
template <int V> DEVICE A weighted_sum(const Args& a, const Line& line, A largest) {
    A sum = A(0);
    line.each<V>(a.x, [&](u64 i, const auto& x) {
        A terms = A(0);
        for (int j = 0; j < WIDTH(x); j++) terms += (acc(x.values[j]) - largest) * weight_of(a, a.first_class + (i64)i + j);
        sum += terms;
    });
    return line.sum(sum);
}

template <int V> DEVICE void forward(const Args& a) {
    each_line(a, [&](const Line& here) {
        Line line = here;
        i64 cls = class_of(a, line.index);
        if (cls < 0) line.n = 0;
        ExpSum all = {lowest<A>(), A(0)};
        line.each<V>(a.x, [&](u64, const auto& x) { all.take(x); });
        all.combine(line);
        A weighted = a.is_smooth ? weighted_sum<V>(a, line, all.largest) : A(0);
        if (line.lane != 0 || line.index >= a.lines) return;
        A loss = A(0);
        if (cls >= 0) {
            A x = acc(a.x[line.first + (u64)cls * line.stride]) - all.largest;
            loss = loss_of(a, cls, x, ln(all.sum), weighted);
        }
        write_position(a, line.index, cls, loss, all.largest, all.sum);
    });
}

template <int V> DEVICE void backward(const Args& a) {
    each_line(a, [&](const Line& line) {
        i64 cls = class_of(a, line.index), at = local_index(a, cls);
        A largest = A(0), factor = A(0), at_target = A(0), everywhere = A(0);
        if (cls >= 0) {
            A scale = ((const A*)a.scale)[line.index];
            at_target = scale * A(a.keep) * weight_of(a, cls);
            everywhere = scale * A(a.spread);
            A all = a.is_smooth ? at_target + everywhere * weight_sum(a) : at_target;
            largest = a.maxima[line.index];
            factor = all / a.totals[line.index];
        }
        line.each<V>(a.x, [&](u64 i, const auto& x) {
            Pack<T, WIDTH(x)> dx;
            for (int j = 0; j < WIDTH(x); j++) {
                A d = A(0);
                if (cls >= 0) {
                    d = exp(acc(x.values[j]) - largest) * factor;
                    if ((i64)i + j == at) d -= at_target;
                    if (a.is_smooth) d -= everywhere * weight_of(a, a.first_class + (i64)i + j);
                }
                dx.values[j] = to<T>(d);
            }
            line.store<WIDTH(x)>((T*)a.out, i, dx);
        });
    });
}

template <int V> DEVICE void weighted_sums(const Args& a) {
    each_line(a, [&](const Line& line) {
        A sum = weighted_sum<V>(a, line, line.n > 0 ? a.maxima[line.index] : A(0));
        if (line.lane == 0 && line.index < a.lines) a.out_totals[line.index] = sum;
    });
}

#define PACKED (16 / sizeof(T))
BLOCK_ENTRY(cross_entropy, Args) { a.vector == 1 ? forward<1>(a) : forward<PACKED>(a); }
BLOCK_ENTRY(cross_entropy_backward, Args) { a.vector == 1 ? backward<1>(a) : backward<PACKED>(a); }
BLOCK_ENTRY(weighted_sums, Args) { a.vector == 1 ? weighted_sums<1>(a) : weighted_sums<PACKED>(a); }

// The index in the array of class `at` of a position.
DEVICE u64 place_of(const Args& a, u64 position, i64 at) {
    u64 outer = position / a.inner;
    return (outer * a.n + (u64)at) * a.inner + (position - outer * a.inner);
}

// out_maxima[position] = the logit of its class minus the largest one, or 0 if the array does not hold the class.
ENTRY(picked, Args) {
    for (u64 i = FIRST; i < a.lines; i += STEP) {
        i64 at = local_index(a, class_of(a, i));
        a.out_maxima[i] = at < 0 ? A(0) : acc(a.x[place_of(a, i, at)]) - a.maxima[i];
    }
}

ENTRY(losses, Args) {
    for (u64 i = FIRST; i < a.lines; i += STEP) {
        i64 cls = class_of(a, i);
        A weighted = a.is_smooth ? a.picked[a.lines + i] : A(0);
        A loss = cls < 0 ? A(0) : loss_of(a, cls, a.picked[i], ln(a.totals[i]), weighted);
        write_position(a, i, cls, loss, a.maxima[i], a.totals[i]);
    }
}

ENTRY(nll, Args) {
    for (u64 i = FIRST; i < a.lines; i += STEP) {
        i64 cls = class_of(a, i), at = local_index(a, cls);
        A logp = at < 0 ? A(0) : acc(a.x[place_of(a, i, at)]);
        ((T*)a.out)[i] = to<T>(at < 0 ? A(0) : -(a.weight ? weight_of(a, cls) * logp : logp));
        ((T*)a.out_weights)[i] = to<T>(weight_of(a, cls));
    }
}

// The gradient is zero elsewhere.
ENTRY(nll_backward, Args) {
    for (u64 i = FIRST; i < a.lines; i += STEP) {
        i64 at = local_index(a, class_of(a, i));
        if (at >= 0) ((T*)a.out)[place_of(a, i, at)] = to<T>(-acc(((const T*)a.scale)[i]));
    }
}
