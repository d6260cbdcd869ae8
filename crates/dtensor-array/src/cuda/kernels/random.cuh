// Random numbers as functions of the element index. Each number is that of the host: see `host/random`.

// Must match `Random` in `random.rs`.
struct Random {
    T* out;
    // The elements that the numbers are applied to, if any.
    const T* in;
    u64 numel;
    Draw draw;
    Threshold threshold;
    // Whether four elements of `in` may be loaded at once.
    u32 is_wide;
    u32 form;
    double numbers[8];
    i64 low;
    u64 range;
    Site site;
    Window window;
};

// Selects a value. The index differs between threads, and values shall stay in registers.
template <class V> DEVICE V pick(const V (&values)[4], u32 k) {
    V x = k & 1 ? values[1] : values[0], y = k & 1 ? values[3] : values[2];
    return k & 2 ? y : x;
}

// Writes `finish(value, x)` to each element: `source(i, values)` generates the values of the elements `4 i..4 i + 4` of the full
// array, and `x` is the element of `a.in`.
template <class V, class S, class F> DEVICE void generate(const Random& a, S source, F finish) {
    bool is_whole = a.window.ndim == 0 && !a.window.table;
    for (u64 i = FIRST * 4; i < a.numel; i += STEP * 4) {
        V values[4];
        if (is_whole) {
            source(i / 4, values);
        } else {
            V found[4];
            u64 group = ~0ull;
            for (int j = 0; j < 4; j++) {
                if (i + j >= a.numel) break;
                u64 index = full_index(a.window, i + j);
                if (index / 4 != group) {
                    group = index / 4;
                    source(group, found);
                }
                values[j] = pick(found, (u32)(index % 4));
            }
        }
        if (a.is_wide && i + 4 <= a.numel) {
            Pack<T, 4> x, y;
            if (a.in) x = *(const Pack<T, 4>*)(a.in + i);
            for (int j = 0; j < 4; j++) y.values[j] = finish(values[j], x.values[j]);
            *(Pack<T, 4>*)(a.out + i) = y;
        } else {
            for (int j = 0; j < 4; j++) {
                if (i + j >= a.numel) break;
                T x = a.in ? a.in[i + j] : to<T>(A(0));
                a.out[i + j] = finish(values[j], x);
            }
        }
    }
}

// One word of 32 bits for each element.
struct Narrow {
    Draw draw;
    DEVICE void operator()(u64 group, u32 (&words)[4]) const {
        Words w = philox(draw, group);
        for (int j = 0; j < 4; j++) words[j] = w.x[j];
    }
};

// One word of 64 bits for each element.
struct Wide {
    Draw draw;
    DEVICE void operator()(u64 group, u64 (&words)[4]) const {
        for (int half = 0; half < 2; half++) {
            Words w = philox(draw, 2 * group + half);
            words[2 * half] = w.x[0] | (u64)w.x[1] << 32;
            words[2 * half + 1] = w.x[2] | (u64)w.x[3] << 32;
        }
    }
};

struct Bernoulli {
    Threshold threshold;
    DEVICE T operator()(u32 word, T) const { return to<T>(threshold.contains(word) ? A(1) : A(0)); }
};
ENTRY(bernoulli, Random) { generate<u32>(a, Narrow{a.draw}, Bernoulli{a.threshold}); }

struct Integers {
    i64 low;
    u64 range;
    DEVICE T operator()(u64 word, T) const {
        // The upper half of the product with the range.
        return to<T>((A)add(low, (i64)__umul64hi(word, range)));
    }
};
ENTRY(integers, Random) { generate<u64>(a, Wide{a.draw}, Integers{a.low, a.range}); }

#if DTYPE >= 2

#if DTYPE == 5
typedef Wide ElementWords;
typedef u64 Word;
#define TWO_POW_M52 2.220446049250313e-16
#define TWO_POW_M53 1.1102230246251565e-16
DEVICE double uniform_of(u64 word) { return (double)(word >> 11) * TWO_POW_M53; }
DEVICE double inner_of(u64 word) { return ((double)(word >> 12) + 0.5) * TWO_POW_M52; }
#else
typedef Narrow ElementWords;
typedef u32 Word;
#define TWO_POW_M24 5.9604644775390625e-8f
#define TWO_POW_M32 2.3283064365386963e-10f
DEVICE float uniform_of(u32 word) { return (float)(word >> 8) * TWO_POW_M24; }
DEVICE double inner_of(u32 word) { return ((double)word + 0.5) * 2.3283064365386963e-10; }
#endif

struct Uniform {
    A offset, width, low, high;
    DEVICE T operator()(Word word, T) const {
        A x = acc(to<T>(uniform_of(word) * width + offset));
        x = x > high ? high : x;
        return to<T>(x < low ? low : x);
    }
};
ENTRY(uniform, Random) {
    Uniform finish{(A)a.numbers[0], (A)a.numbers[1], (A)a.numbers[2], (A)a.numbers[3]};
    generate<Word>(a, ElementWords{a.draw}, finish);
}

// Two normal numbers from each pair of words (Box–Muller transform).
struct Normals {
    ElementWords words;
    DEVICE void operator()(u64 group, A (&values)[4]) const {
        Word w[4];
        words(group, w);
        for (int j = 0; j < 4; j += 2) {
            A s, c;
#if DTYPE == 5
            double u = ((double)(w[j] >> 11) + 0.5) * TWO_POW_M53;
            double radius = sqrt(-2.0 * log(u));
            sincos((double)(w[j + 1] >> 11) * (TWO_POW_M53 * 6.283185307179586), &s, &c);
#else
            float u = (float)w[j] * TWO_POW_M32 + 0.5f * TWO_POW_M32;
            float radius = sqrtf(-2.0f * logf(u));
            sincosf((float)(w[j + 1] >> 8) * (TWO_POW_M24 * 6.2831855f), &s, &c);
#endif
            values[j] = radius * c;
            values[j + 1] = radius * s;
        }
    }
};
struct Scaled {
    A mean, std;
    DEVICE T operator()(A z, T) const { return to<T>(z * std + mean); }
};
ENTRY(normal, Random) {
    generate<A>(a, Normals{{a.draw}}, Scaled{(A)a.numbers[0], (A)a.numbers[1]});
}

struct Dropout {
    Threshold threshold;
    A scale;
    DEVICE T operator()(u32 word, T x) const {
        return to<T>(acc(x) * (threshold.contains(word) ? A(0) : scale));
    }
};
ENTRY(dropout, Random) { generate<u32>(a, Narrow{a.draw}, Dropout{a.threshold, (A)a.numbers[0]}); }

struct BernoulliEach {
    Site site;
    DEVICE T operator()(u32 word, T x) const {
        double p = (double)acc(x);
        if (!(p >= 0.0 && p <= 1.0)) {
            report(site, PROBABILITY, (i64)double_to_bits(p), 0, 0);
            return to<T>(A(0));
        }
        // `word < round(x)` holds if and only if `word + 0.5 <= x`. All operations are exact.
        return to<T>((double)word + 0.5 <= p * 4294967296.0 ? A(1) : A(0));
    }
};
ENTRY(bernoulli_each, Random) { generate<u32>(a, Narrow{a.draw}, BernoulliEach{a.site}); }

// The truncated normal distribution: as `host/random/truncated.rs`, with the same names.

template <int N> DEVICE double poly(double x, const double (&coefficients)[N]) {
    double sum = 0.0;
    for (int i = 0; i < N; i++) sum = fma(sum, x, coefficients[i]);
    return sum;
}

DEVICE double quantile(double p) {
    double q = p - 0.5;
    if (fabs(q) <= 0.425) {
        double r = 0.425 * 0.425 - q * q;
        const double over[8] = {2509.0809287301227, 33430.57558358813,  67265.7709270087,   45921.95393154987,
                                13731.69376550946,  1971.5909503065513, 133.14166789178438, 3.3871328727963665};
        const double under[8] = {5226.495278852854, 28729.085735721943, 39307.89580009271, 21213.794301586597,
                                 5394.196021424751, 687.187007492058,   42.31333070160091, 1.0};
        return q * poly(r, over) / poly(r, under);
    }
    if (p <= 0.0) return lowest<double>();
    double r = sqrt(-log(p));
    if (r <= 5.0) {
        const double over[8] = {0.0007745450142783414, 0.022723844989269184, 0.2417807251774506, 1.2704582524523684,
                                3.6478483247632045,    5.769497221460691,    4.630337846156546,  1.4234371107496835};
        const double under[8] = {1.0507500716444169e-9, 0.0005475938084995345, 0.015198666563616457,
                                 0.14810397642748008,   0.6897673349851,       1.6763848301838038,
                                 2.053191626637759,     1.0};
        return -poly(r - 1.6, over) / poly(r - 1.6, under);
    }
    const double over[8] = {2.0103343992922881e-7, 2.7115555687434876e-5, 0.0012426609473880784, 0.026532189526576124,
                            0.29656057182850487,   1.7848265399172913,    5.463784911164114,     6.657904643501103};
    const double under[8] = {2.0442631033899397e-15, 1.421511758316446e-7, 1.8463183175100548e-5,
                             0.0007868691311456133,  0.014875361290850615, 0.1369298809227358,
                             0.599832206555888,      1.0};
    return -poly(r - 5.0, over) / poly(r - 5.0, under);
}

DEVICE double log_mix(double u, double rest, double log_share) {
    double change = u * expm1(log_share);
    return change > -0.5 ? log1p(change) : log(rest + u * exp(log_share));
}

DEVICE double mills(double z) {
    double rest = z;
    for (int n = 16; n >= 1; n--) rest = z + (double)n / rest;
    return 1.0 / rest;
}

// The forms of the distribution. As `Truncated::numbers` in `truncated.rs`.
#define FORM_ONE 0
#define FORM_QUANTILE 1
#define FORM_NARROW 2
#define FORM_TAIL 3

struct Truncated {
    u32 form;
    double x[5];
    double low, high;
    DEVICE double number(double u) const {
        if (form == FORM_ONE) return x[0];
        if (form == FORM_QUANTILE) {
            double mean = x[0], std = x[1], below = x[2], above = x[3], between = x[4];
            double under = below + u * between, over = above + (1.0 - u) * between;
            double z = quantile(under < over ? under : over);
            return mean + std * (under < over ? z : -z);
        }
        double bound = x[0], step = x[1];
        double share = step < 0.0 ? 1.0 - u : u, rest = step < 0.0 ? u : 1.0 - u;
        if (form == FORM_NARROW) {
            double slope = x[2], width = x[3], fall = slope * width;
            double distance = fall > 2.220446049250313e-16 ? -log_mix(share, rest, -fall) / slope : share * width;
            return bound + step * distance;
        }
        double from = x[2], ratio = x[3], beyond = x[4];
        double further = log_mix(share, rest, beyond);
        double distance = -2.0 * further / (from + hypot(from, sqrt(-2.0 * further)));
        for (int i = 0; i < 3; i++) {
            double here = mills(from + distance);
            double error = log(here / ratio) - distance * (from + 0.5 * distance) - further;
            distance += error * here;
        }
        return bound + step * distance;
    }
    DEVICE T operator()(Word word, T) const {
        double y = (double)acc(to<T>((A)number(inner_of(word))));
        y = y > high ? high : y;
        return to<T>((A)(y < low ? low : y));
    }
};
ENTRY(truncated, Random) {
    const double* x = a.numbers;
    Truncated finish{a.form, {x[0], x[1], x[2], x[3], x[4]}, x[5], x[6]};
    generate<Word>(a, ElementWords{a.draw}, finish);
}

#endif
