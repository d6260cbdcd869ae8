// A stable sort of (key, value) by key: eight bits in each pass, the lowest first. A block sorts a tile.

#define DIGITS 256
#define ROUNDS 8
#define WARPS (DIGITS / WARP)
#define TILE (DIGITS * ROUNDS)

// Must match `Radix` in `index.rs`.
struct Radix {
    const u64* keys;
    const u64* values;
    u64* sorted_keys;
    u64* sorted_values;
    // If there are several tiles: for each digit, how often it is in each tile, and then how often in those before it.
    u64* counts;
    // How often each digit is in all tiles.
    u64* totals;
    u64 n, tiles;
    u64 shift;
};

BLOCK_ENTRY(radix_count, Radix) {
    __shared__ u32 counts[DIGITS];
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (u32 r = 0; r < ROUNDS; r++) {
        u64 i = blockIdx.x * (u64)TILE + r * DIGITS + threadIdx.x;
        if (i < a.n) atomicAdd(&counts[(a.keys[i] >> a.shift) % DIGITS], 1u);
    }
    __syncthreads();
    a.counts[threadIdx.x * a.tiles + blockIdx.x] = counts[threadIdx.x];
}

// The sum of the values of all threads of a block before this one, and in `total` of all. `sums` is shared memory for 8 values.
DEVICE u64 block_scan(u64 x, u64* sums, u64& total) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u64 sum = x;
    for (u32 distance = 1; distance < WARP; distance *= 2) {
        u64 before = __shfl_up_sync(FULL_WARP, sum, distance);
        if (lane >= distance) sum += before;
    }
    __syncthreads();
    if (lane == WARP - 1) sums[warp] = sum;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (u32 w = 0; w < WARPS; w++) {
        if (w < warp) before += sums[w];
        total += sums[w];
    }
    return before + sum - x;
}

// Each block scans the counts of a digit.
BLOCK_ENTRY(radix_scan, Radix) {
    __shared__ u64 sums[WARPS];
    u64* counts = a.counts + blockIdx.x * a.tiles;
    u64 before = 0;
    for (u64 first = 0; first < a.tiles; first += DIGITS) {
        u64 i = first + threadIdx.x, total;
        u64 x = i < a.tiles ? counts[i] : 0;
        u64 at = block_scan(x, sums, total);
        if (i < a.tiles) counts[i] = before + at;
        before += total;
    }
    if (threadIdx.x == 0) a.totals[blockIdx.x] = before;
}

// The threads of a warp with the same digit as this one. All threads of the warp must call it.
DEVICE u32 peers(u32 digit, bool is_valid) {
    u32 mask = __ballot_sync(FULL_WARP, is_valid);
    for (u32 bit = 1; bit < DIGITS; bit *= 2) {
        u32 set = __ballot_sync(FULL_WARP, (digit & bit) != 0);
        mask &= digit & bit ? set : ~set;
    }
    return mask;
}

BLOCK_ENTRY(radix_scatter, Radix) {
    __shared__ u64 sums[WARPS];
    __shared__ u64 first[DIGITS];
    // How many keys with each digit each warp has, and then how many are before its next one.
    __shared__ u32 counts[WARPS][DIGITS];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u32 w = 0; w < WARPS; w++) counts[w][threadIdx.x] = 0;
    __syncthreads();
    u64 start = blockIdx.x * (u64)TILE + warp * (WARP * ROUNDS) + lane;
    u64 keys[ROUNDS];
    u32 masks[ROUNDS];
    for (u32 r = 0; r < ROUNDS; r++) {
        u64 i = start + r * WARP;
        bool is_valid = i < a.n;
        keys[r] = is_valid ? a.keys[i] : 0;
        u32 digit = (keys[r] >> a.shift) % DIGITS;
        masks[r] = peers(digit, is_valid);
        if (is_valid && __ffs(masks[r]) == (int)lane + 1) counts[warp][digit] += __popc(masks[r]);
        __syncwarp();
    }
    __syncthreads();
    u32 before = 0;
    for (u32 w = 0; w < WARPS; w++) {
        u32 count = counts[w][threadIdx.x];
        counts[w][threadIdx.x] = before;
        before += count;
    }
    // The counts of the only tile are those of all tiles.
    bool is_alone = a.tiles == 1;
    u64 total, smaller = block_scan(is_alone ? before : a.totals[threadIdx.x], sums, total);
    first[threadIdx.x] = smaller + (is_alone ? 0 : a.counts[threadIdx.x * a.tiles + blockIdx.x]);
    __syncthreads();
    for (u32 r = 0; r < ROUNDS; r++) {
        u64 i = start + r * WARP;
        bool is_valid = i < a.n;
        u32 digit = (keys[r] >> a.shift) % DIGITS;
        u32 rank = counts[warp][digit] + __popc(masks[r] & ((1u << lane) - 1));
        __syncwarp();
        if (is_valid) {
            u64 to = first[digit] + rank;
            a.sorted_keys[to] = keys[r];
            a.sorted_values[to] = a.values[i];
            if (__ffs(masks[r]) == (int)lane + 1) counts[warp][digit] += __popc(masks[r]);
        }
        __syncwarp();
    }
}

// Must match `IndexKeys` in `index.rs`.
struct IndexKeys {
    Ids ids;
    u64* keys;
    u64* values;
};
// The keys are the indices in this shard, or `size` for those elsewhere. The values are their positions.
ENTRY(index_keys, IndexKeys) {
    for (u64 i = FIRST; i < a.ids.n; i += STEP) {
        a.keys[i] = local_index(a.ids, a.ids.ids[i]);
        a.values[i] = i;
    }
}

// Must match `Bounds` in `index.rs`.
struct Bounds {
    const u64* keys;
    u64* begin;
    u64* end;
    u64 n, size;
};
// Writes where the run of each key begins and ends.
ENTRY(bounds, Bounds) {
    for (u64 i = FIRST; i < a.n; i += STEP) {
        u64 key = a.keys[i];
        if (key >= a.size) continue;
        if (i == 0 || a.keys[i - 1] != key) a.begin[key] = i;
        if (i + 1 == a.n || a.keys[i + 1] != key) a.end[key] = i + 1;
    }
}
