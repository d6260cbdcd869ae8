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
    Tile* tiles = (Tile*)shared;
    Stage* stages = (Stage*)(tiles + 4);
    Place place(a, a.causal);
    Side q = side(a.q, place.head, a.queries, a.width), k = side(a.k, place.head, a.keys, a.width);
    Side v = side(a.v, place.head, a.keys, a.value_width);
    Side grad = side(a.grad, place.head, a.queries, a.value_width);
    Rule rule(a, place.head);
    int width = part(a.width, place.column);
    A lse[R], dots[R], o[R][OF(W)];
    clear(o);
    for (int i = 0; i < R; i++) {
        u64 query = place.row + row_of(i), row = place.head * a.queries + query;
        lse[i] = query < a.queries ? a.lse[row] : A(0);
        dots[i] = query < a.queries ? a.dots[row] : A(0);
    }
    u64 end = keys_seen(a, place.row);
    for (u64 key = 0; key < end; key += TILE) {
        A s[R][OF(TILE)], ds[R][OF(TILE)];
        clear(s);
        clear(ds);
        add_all_dots(s, tiles[0], tiles[1], q, place.row, k, key, key > 0);
        add_all_dots(ds, tiles[2], tiles[3], grad, place.row, v, key, key > 0);
        if (a.width > W) {
            __syncthreads();
            load(tiles[1], k, key, place.column);
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
                ds[i][j] = p * (d - dots[i]) * (A)a.scale;
            }
        }
        add_product(o, ds, tiles[1], width, stages);
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
    Tile* tiles = (Tile*)shared;
    A* lse = (A*)(tiles + 4);
    A* dots = lse + TILE;
    Stage* stages = (Stage*)(dots + TILE);
    Place place(a, false);
    Side q = side(a.q, place.head, a.queries, a.width), k = side(a.k, place.head, a.keys, a.width);
    Side v = side(a.v, place.head, a.keys, a.value_width);
    Side grad = side(a.grad, place.head, a.queries, a.value_width);
    Rule rule(a, place.head);
    // The width of this block's columns of both results; 0 beyond the last one.
    int width = place.column < a.width ? part(a.width, place.column) : 0;
    int value_width = place.column < a.value_width ? part(a.value_width, place.column) : 0;
    A dk[R][OF(W)], dv[R][OF(W)];
    clear(dk);
    clear(dv);
    u64 first = a.causal && place.row > a.first_query ? (place.row - a.first_query) / TILE * TILE : 0;
    for (u64 query = first; query < a.queries; query += TILE) {
        A p[R][OF(TILE)], ds[R][OF(TILE)];
        clear(p);
        clear(ds);
        __syncthreads();
        for (int i = threadIdx.x; i < TILE; i += THREADS) {
            u64 row = place.head * a.queries + query + i;
            lse[i] = query + i < a.queries ? a.lse[row] : A(0);
            dots[i] = query + i < a.queries ? a.dots[row] : A(0);
        }
        add_all_dots(p, tiles[0], tiles[1], k, place.row, q, query, query > first);
        add_all_dots(ds, tiles[2], tiles[3], v, place.row, grad, query, query > first);
        if (a.width > W || a.value_width > W) {
            __syncthreads();
            load(tiles[1], q, query, place.column);
            load(tiles[3], grad, query, place.column);
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
                ds[i][j] = x * (ds[i][j] * factor - dot) * (A)a.scale;
                p[i][j] = x * factor;
            }
        }
        add_product(dv, p, tiles[3], value_width, stages);
        add_product(dk, ds, tiles[1], width, stages);
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
