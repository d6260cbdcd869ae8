// Sorting and top-k of the rows of contiguous matrices.
//
// As on the host, each element is mapped to an unsigned key with the same order: NaN is above every number, −0 equals 0, and all
// bits are flipped for the descending order. A word holds the key and the element's index, so that words differ, and any sort of
// words is a stable sort of elements.

#if DTYPE == 1 || DTYPE == 5
typedef u64 Key;
struct Word {
    u64 key;
    u64 index;
};
DEVICE Word word(Key key, u32 index) { return Word{key, index}; }
DEVICE bool less(const Word& x, const Word& y) { return x.key < y.key || (x.key == y.key && x.index < y.index); }
DEVICE u32 index_of(const Word& x) { return (u32)x.index; }
#else
typedef u32 Key;
typedef u64 Word;
DEVICE Word word(Key key, u32 index) { return (u64)key << 32 | index; }
DEVICE bool less(Word x, Word y) { return x < y; }
DEVICE u32 index_of(Word x) { return (u32)x; }
#endif

#if DTYPE < 2 || DTYPE > 3
#define KEY_BITS (8 * (int)sizeof(T))
#else
#define KEY_BITS 16
#endif

DEVICE Key key_of(T x, bool is_descending) {
    constexpr Key ALL = ~Key(0) >> (8 * (int)sizeof(Key) - KEY_BITS), SIGN = Key(1) << (KEY_BITS - 1);
#if DTYPE == 0
    Key key = x;
#elif DTYPE == 1
    Key key = (Key)x ^ SIGN;
#else
#if DTYPE == 5
    Key bits = double_to_bits(x);
#elif DTYPE == 4
    Key bits = float_to_bits(x);
#else
    Key bits = x.bits;
#endif
    // −0 becomes 0. All bits of a negative number are flipped, of other numbers only the sign.
    if (bits == SIGN) bits = 0;
    Key key = is_nan(acc(x)) ? ALL : bits & SIGN ? bits ^ ALL : bits | SIGN;
#endif
    return is_descending ? key ^ ALL : key;
}

// The number of words that a block sorts.
#define TILE 2048

// Must match `Sort` in `sort.rs`.
struct Sort {
    // The elements, `[rows, n]`.
    const T* x;
    // Words to sort, `[rows, m]`; null for those of the elements, of which there are `m` then.
    const Word* words;
    // Sorted words; null if the first `count` elements of each row and their indices are written.
    Word* sorted;
    T* values;
    i64* indices;
    u64 rows, n, m, count;
    // The number of blocks for each row; if it is 1, blocks hold several rows, each in `segment` words, a power of two.
    u64 tiles, segment;
    // The number of words in each sorted run.
    u64 run;
    u64 is_descending;
};

// Writes the element of a word, or that there is none.
DEVICE void write_element(const Sort& a, u64 row, u64 j, bool is_there, u32 index) {
    u64 to = row * a.count + j;
    if (is_there) {
        a.values[to] = a.x[row * a.n + index];
        a.indices[to] = (i64)index;
    } else {
        a.values[to] = ::to<T>(A(0));
        a.indices[to] = -1;
    }
}

// Sorts tiles of rows.
BLOCK_ENTRY(sort_tiles, Sort) {
    __shared__ Word words[TILE];
    u64 per_block = a.tiles == 1 ? TILE / a.segment : 1;
    u64 row = blockIdx.x / a.tiles * per_block, first = blockIdx.x % a.tiles * TILE;
    u32 segment = (u32)a.segment;
    for (u32 i = threadIdx.x; i < TILE; i += blockDim.x) {
        u64 r = row + i / segment, at = first + i % segment;
        Word here = word(~Key(0), ~0u);
        if (r < a.rows && at < a.m)
            here = a.words ? a.words[r * a.m + at]
                           : word(key_of(a.x[r * a.n + at], a.is_descending), (u32)at);
        words[i] = here;
    }
    __syncthreads();
    // A bitonic sort of each segment.
    for (u32 size = 2; size <= segment; size *= 2) {
        for (u32 stride = size / 2; stride > 0; stride /= 2) {
            for (u32 pair = threadIdx.x; pair < TILE / 2; pair += blockDim.x) {
                u32 i = 2 * pair - (pair & (stride - 1)), j = i + stride;
                bool is_up = (i & (segment - 1) & size) == 0;
                Word x = words[i], y = words[j];
                if (less(y, x) == is_up) {
                    words[i] = y;
                    words[j] = x;
                }
            }
            __syncthreads();
        }
    }
    if (a.sorted) {
        for (u32 i = threadIdx.x; i < TILE; i += blockDim.x) {
            u64 r = row + i / segment, at = first + i % segment;
            if (r < a.rows && at < a.m) a.sorted[r * a.m + at] = words[i];
        }
        return;
    }
    for (u64 i = threadIdx.x; i < per_block * a.count; i += blockDim.x) {
        u64 r = i / a.count, j = i - r * a.count;
        bool is_there = j < a.m;
        if (row + r < a.rows) write_element(a, row + r, j, is_there, is_there ? index_of(words[r * segment + j]) : 0);
    }
}

// Returns how many of the first `diagonal` words of two merged runs come from the first one.
DEVICE u64 merge_path(const Word* x, u64 x_size, const Word* y, u64 y_size, u64 diagonal) {
    u64 low = diagonal > y_size ? diagonal - y_size : 0, high = diagonal < x_size ? diagonal : x_size;
    while (low < high) {
        u64 middle = (low + high) / 2;
        if (less(x[middle], y[diagonal - 1 - middle])) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Merges pairs of runs: a block writes a tile of the result.
BLOCK_ENTRY(sort_merge, Sort) {
    __shared__ Word words[TILE];
    __shared__ u64 bounds[2];
    u64 row = blockIdx.x / a.tiles, from = blockIdx.x % a.tiles * TILE;
    u64 end = from + TILE < a.m ? from + TILE : a.m, base = from / (2 * a.run) * (2 * a.run);
    u64 middle = base + a.run < a.m ? base + a.run : a.m, last = base + 2 * a.run < a.m ? base + 2 * a.run : a.m;
    const Word* x = a.words + row * a.m + base;
    const Word* y = a.words + row * a.m + middle;
    if (threadIdx.x < 2)
        bounds[threadIdx.x] = merge_path(x, middle - base, y, last - middle, (threadIdx.x ? end : from) - base);
    __syncthreads();
    u64 x_from = bounds[0], x_end = bounds[1], y_from = from - base - x_from, y_end = end - base - x_end;
    u32 x_size = (u32)(x_end - x_from), size = (u32)(end - from);
    for (u32 i = threadIdx.x; i < size; i += blockDim.x) words[i] = i < x_size ? x[x_from + i] : y[y_from + i - x_size];
    __syncthreads();
    u32 per_thread = TILE / blockDim.x, at = threadIdx.x * per_thread;
    if (at >= size) return;
    u32 i = (u32)merge_path(words, x_size, words + x_size, (u64)(y_end - y_from), at), j = x_size + at - i;
    Word* to = a.sorted + row * a.m + from + at;
    for (u32 k = 0; k < per_thread && at + k < size; k++) {
        bool takes_x = j >= size || (i < x_size && less(words[i], words[j]));
        to[k] = words[takes_x ? i++ : j++];
    }
}

// Writes the elements of sorted words.
ENTRY(sort_finish, Sort) {
    for (u64 i = FIRST; i < a.rows * a.count; i += STEP) {
        u64 row = i / a.count, j = i - row * a.count;
        bool is_there = j < a.m;
        write_element(a, row, j, is_there, is_there ? index_of(a.words[row * a.m + j]) : 0);
    }
}

// Selects the `m` smallest words of each row, in no order that matters but always the same: a block for each row finds the largest
// of their keys digit by digit, and then collects them.
BLOCK_ENTRY(select, Sort) {
    __shared__ u32 counts[256];
    __shared__ u32 found[2];
    __shared__ u32 warps[2][WARP];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const T* x = a.x + row * a.n;
        // The upper digits of the largest selected key, and how many words with these digits are selected.
        Key prefix = 0, mask = 0;
        u64 needed = a.m;
        for (int shift = KEY_BITS - 8; shift >= 0; shift -= 8) {
            for (u32 i = threadIdx.x; i < 256; i += blockDim.x) counts[i] = 0;
            __syncthreads();
#pragma unroll 4
            for (u64 i = threadIdx.x; i < a.n; i += blockDim.x) {
                Key key = key_of(x[i], a.is_descending);
                if ((key & mask) == prefix) atomicAdd(&counts[(u32)(key >> shift) & 255], 1u);
            }
            __syncthreads();
            if (warp == 0) {
                // Each thread counts eight digits.
                u32 own = 0;
                for (int k = 0; k < 8; k++) own += counts[lane * 8 + k];
                u32 up_to = own;
                for (int delta = 1; delta < WARP; delta *= 2) {
                    u32 other = __shfl_up_sync(FULL_WARP, up_to, delta);
                    if (lane >= delta) up_to += other;
                }
                u32 before = up_to - own;
                if (before < needed && needed <= up_to) {
                    u32 digit = lane * 8;
                    while (before + counts[digit] < needed) before += counts[digit++];
                    found[0] = digit;
                    found[1] = before;
                }
            }
            __syncthreads();
            prefix |= (Key)found[0] << shift;
            mask |= (Key)255 << shift;
            needed -= found[1];
            __syncthreads();
        }
        // Smaller keys come first, then those equal to the largest one, by index.
        Word* smaller = a.sorted + row * a.m;
        Word* equal = smaller + (a.m - needed);
        u64 equals = 0;
        for (u64 start = 0; start < a.n; start += blockDim.x) {
            u64 i = start + threadIdx.x;
            Key key = i < a.n ? key_of(x[i], a.is_descending) : ~Key(0);
            bool is_smaller = i < a.n && key < prefix, is_equal = i < a.n && key == prefix;
            u32 bits[2] = {__ballot_sync(FULL_WARP, is_smaller), __ballot_sync(FULL_WARP, is_equal)};
            if (lane == 0) {
                warps[0][warp] = __popc(bits[0]);
                warps[1][warp] = __popc(bits[1]);
            }
            __syncthreads();
            u32 before[2], all[2];
            for (int k = 0; k < 2; k++) {
                before[k] = __popc(bits[k] & ((1u << lane) - 1));
                all[k] = 0;
                for (u32 w = 0; w < blockDim.x / WARP; w++) {
                    if (w == warp) before[k] += all[k];
                    all[k] += warps[k][w];
                }
            }
            if (is_smaller) smaller[before[0]] = word(key, (u32)i);
            if (is_equal && equals + before[1] < needed) equal[equals + before[1]] = word(key, (u32)i);
            smaller += all[0];
            equals += all[1];
            __syncthreads();
        }
    }
}

// Must match `Merge` in `sort.rs`.
struct Merge {
    // Candidates and their indices, `[rows, m]`.
    const T* values;
    const i64* indices;
    T* out;
    i64* out_indices;
    u64 rows, m, count, tiles, is_descending;
};

// Writes each candidate at the number of candidates before it. Those with a negative index come last and count as none.
BLOCK_ENTRY(merge_top, Merge) {
    __shared__ Key keys[256];
    __shared__ i64 places[256];
    u64 row = blockIdx.x / a.tiles, i = blockIdx.x % a.tiles * blockDim.x + threadIdx.x;
    const T* values = a.values + row * a.m;
    const i64* indices = a.indices + row * a.m;
    Key key = i < a.m ? key_of(values[i], a.is_descending) : ~Key(0);
    i64 place = i < a.m ? indices[i] : -1;
    // What is beyond the candidates, up to `count`, keeps its place.
    u64 rank = i < a.m ? 0 : i;
    for (u64 start = 0; start < a.m; start += blockDim.x) {
        u64 other = start + threadIdx.x;
        keys[threadIdx.x] = other < a.m ? key_of(values[other], a.is_descending) : ~Key(0);
        places[threadIdx.x] = other < a.m ? indices[other] : -1;
        __syncthreads();
        u64 n = a.m - start < blockDim.x ? a.m - start : blockDim.x;
        for (u32 j = 0; j < n && i < a.m; j++) {
            i64 there = places[j];
            bool is_tie = there == place && keys[j] == key;
            bool is_before = there < 0 ? place < 0 && start + j < i
                                       : place < 0 || keys[j] < key || (keys[j] == key && there < place) ||
                                             (is_tie && start + j < i);
            rank += is_before;
        }
        __syncthreads();
    }
    if (rank < a.count && (i < a.m || i < a.count)) {
        a.out[row * a.count + rank] = place < 0 ? to<T>(A(0)) : values[i];
        a.out_indices[row * a.count + rank] = place < 0 ? -1 : place;
    }
}
