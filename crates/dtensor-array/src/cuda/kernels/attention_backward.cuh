// The backward pass of attention. It computes the probabilities of each tile again.

// A warp computes the dot product of each query's output and gradient.
BLOCK_ENTRY(dots, Attention) {
    u64 rows = a.heads * a.queries;
    for (u64 row = FIRST / WARP; row < rows; row += STEP / WARP) {
        const T* grad = (const T*)a.grad.at + offset_of(a.grad, row / a.queries) + (i64)(row % a.queries) * a.grad.row;
        const T* out = a.out + row * a.value_width;
        A sum = A(0);
        for (u64 i = lane(); i < a.value_width; i += WARP) sum += acc(grad[i]) * acc(out[i]);
        sum = warp_reduce(sum, Sum());
        if (lane() == 0) a.dots[row] = sum;
    }
}

BLOCK_ENTRY(query_gradients, Attention) {
    SHARED_BYTES(shared);
    Block* rows = (Block*)shared;
    Tile* next = (Tile*)(rows + 2);
    Stage* stages = (Stage*)(next + 2 * STAGES);
    Place place(a, a.causal);
    Side q = side(a.q, place.head, a.queries, a.width), k = side(a.k, place.head, a.keys, a.width);
    Side v = side(a.v, place.head, a.keys, a.value_width);
    Side grad = side(a.grad, place.head, a.queries, a.value_width);
    Rule rule(a, place.head);
    int width = part<W>(a.width, place.column);
    bool is_narrow = a.width <= W && a.value_width <= W;
    A lse[R], dots[R], o[R][OF(W)];
    clear(o);
    for (int i = 0; i < R; i++) {
        u64 query = place.row + row_of(i), row = place.head * a.queries + query;
        lse[i] = query < a.queries ? a.lse[row] : A(0);
        dots[i] = query < a.queries ? a.dots[row] : A(0);
    }
    u64 end = keys_seen(a, place.row);
    if (is_narrow && end > 0) {
        load(rows[0], q, place.row, 0);
        load(rows[1], grad, place.row, 0);
    }
    // Loads the tiles of keys and values from `key`.
    auto load_next = [&](Tile* at, u64 key) {
        load(at[0], k, key, 0);
        load(at[1], v, key, 0);
    };
    if (is_narrow && STAGES == 2 && end > 0) load_next(next, 0);
    for (u64 key = 0; key < end; key += TILE) {
        Tile* now = STAGES == 2 && is_narrow ? next + key / TILE % 2 * 2 : next;
        if (is_narrow) {
            if (STAGES == 1) {
                __syncthreads();
                load_next(now, key);
            }
            wait_for_loads();
            __syncthreads();
            if (STAGES == 2 && key + TILE < end) load_next(next + (key / TILE + 1) % 2 * 2, key + TILE);
        }
        A s[R][OF(TILE)], ds[R][OF(TILE)];
        clear(s);
        clear(ds);
        add_all_dots(s, rows[0], now[0], q, place.row, k, key, is_narrow);
        add_all_dots(ds, rows[1], now[1], grad, place.row, v, key, is_narrow);
        if (!is_narrow) {
            __syncthreads();
            load(now[0], k, key, place.column);
            wait_for_loads();
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < R; i++) {
            u64 query = place.row + row_of(i);
            int seen = keys_of(a, query, key);
#pragma unroll
            for (int j = 0; j < OF(TILE); j++) {
                u64 at = key + column_of(j);
                A p = rule.probability(s[i][j], column_of(j) < seen, query, at, lse[i]);
                A d = a.dropout ? ds[i][j] * rule.keep(query, at) : ds[i][j];
                ds[i][j] = p * (d - dots[i]) * rule.scale;
            }
        }
        add_product(o, ds, now[0], width, stages);
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        u64 query = place.row + row_of(i);
        if (query >= a.queries) continue;
        T* row = a.dq + (place.head * a.queries + query) * a.width;
        store_row(row, place.column, a.width, o[i], A(1), false);
    }
}

// Rows are keys here, and columns are queries.
BLOCK_ENTRY(key_gradients, Attention) {
    SHARED_BYTES(shared);
    Block* rows = (Block*)shared;
    Tile* next = (Tile*)(rows + 2);
    // The log-sum-exp and the dot product of each query of a tile.
    A(*numbers)[2][TILE] = (A(*)[2][TILE])(next + 2 * STAGES);
    Stage* stages = (Stage*)(numbers + STAGES);
    Place place(a, false);
    Side q = side(a.q, place.head, a.queries, a.width), k = side(a.k, place.head, a.keys, a.width);
    Side v = side(a.v, place.head, a.keys, a.value_width);
    Side grad = side(a.grad, place.head, a.queries, a.value_width);
    Rule rule(a, place.head);
    // The width of this block's columns of both results; 0 beyond the last one.
    int width = part<W>(a.width, place.column);
    int value_width = part<W>(a.value_width, place.column);
    bool is_narrow = a.width <= W && a.value_width <= W;
    A dk[R][OF(W)], dv[R][OF(W)];
    clear(dk);
    clear(dv);
    u64 first = a.causal && place.row > a.first_query ? (place.row - a.first_query) / TILE * TILE : 0;
    // Loads the numbers of queries from `query`, and their tiles if these hold all columns.
    auto load_next = [&](Tile* at, A(*to)[TILE], u64 query) {
        for (int i = threadIdx.x; i < TILE; i += THREADS) {
            u64 row = place.head * a.queries + query + i;
            to[0][i] = query + i < a.queries ? a.lse[row] : A(0);
            to[1][i] = query + i < a.queries ? a.dots[row] : A(0);
        }
        if (is_narrow) {
            load(at[0], q, query, 0);
            load(at[1], grad, query, 0);
        }
    };
    if (is_narrow && first < a.queries) {
        load(rows[0], k, place.row, 0);
        load(rows[1], v, place.row, 0);
    }
    if (STAGES == 2 && first < a.queries) load_next(next, numbers[0], first);
    for (u64 query = first; query < a.queries; query += TILE) {
        int stage = STAGES == 2 ? (int)(query / TILE - first / TILE) % 2 : 0;
        Tile* now = next + (is_narrow ? 2 * stage : 0);
        const A *lse = numbers[stage][0], *dots = numbers[stage][1];
        if (STAGES == 1) {
            __syncthreads();
            load_next(now, numbers[0], query);
        }
        wait_for_loads();
        __syncthreads();
        if (STAGES == 2 && query + TILE < a.queries)
            load_next(next + 2 * (1 - stage), numbers[1 - stage], query + TILE);
        A p[R][OF(TILE)], ds[R][OF(TILE)];
        clear(p);
        clear(ds);
        add_all_dots(p, rows[0], now[0], k, place.row, q, query, is_narrow);
        add_all_dots(ds, rows[1], now[1], v, place.row, grad, query, is_narrow);
        if (!is_narrow) {
            __syncthreads();
            load(now[0], q, query, place.column);
            load(now[1], grad, query, place.column);
            wait_for_loads();
            __syncthreads();
        }
        // The queries of the tile that attend to each of the thread's keys.
        int from[R], end[R];
        for (int i = 0; i < R; i++) {
            u64 key = place.row + row_of(i);
            from[i] = a.causal ? in_tile((i64)key - (i64)(a.first_query + query)) : 0;
            end[i] = key < a.keys ? in_tile(a.queries - query) : 0;
        }
#pragma unroll
        for (int j = 0; j < OF(TILE); j++) {
            int column = column_of(j);
            u64 at = query + column;
            A shift = lse[column], dot = dots[column];
#pragma unroll
            for (int i = 0; i < R; i++) {
                u64 key = place.row + row_of(i);
                A x = rule.probability(p[i][j], column >= from[i] && column < end[i], at, key, shift);
                A factor = a.dropout ? rule.keep(at, key) : A(1);
                ds[i][j] = x * (ds[i][j] * factor - dot) * rule.scale;
                p[i][j] = x * factor;
            }
        }
        add_product(dv, p, now[1], value_width, stages);
        add_product(dk, ds, now[0], width, stages);
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        u64 key = place.row + row_of(i);
        if (key >= a.keys) continue;
        u64 row = place.head * a.keys + key;
        store_row(a.dk + row * a.width, place.column, a.width, dk[i], A(1), false);
        store_row(a.dv + row * a.value_width, place.column, a.value_width, dv[i], A(1), false);
    }
}
