// The gradients of keys and values, after those of queries. Rows are keys here, and columns are queries.
//
// With three stages, the last products of a step run beside the first ones of the next.

//! kernels: key_gradients
PLAIN_ENTRY(key_gradients) {
    PLAIN_SHARED(shared);
    Tile<ROWS>* rows = (Tile<ROWS>*)shared;
    Tile<TILE>* tiles = (Tile<TILE>*)(rows + 2);
    float(*numbers)[2][TILE] = (float(*)[2][TILE])(tiles + 2 * STAGES);
    Place place(a, false);
    Side q = side(a.q, place.head, a.queries, a.width), k = side(a.k, place.head, a.keys, a.width);
    Side v = side(a.v, place.head, a.keys, a.value_width);
    Side grad = side(a.grad, place.head, a.queries, a.value_width);
    float scale = (float)a.scale, scale2 = scale * LOG2_E;
    int plane = padded(a);
    const float* planes = a.dots + place.head * 2 * plane;
    float dk[W / 8][4], dv[W / 8][4];
    clear(dk);
    clear(dv);
    // The first query that attends to the first key, and the one that attends to all keys of the block.
    i64 first = a.causal ? place.row - (i64)a.first_query : 0, whole = a.causal ? first + ROWS - 1 : 0;
    int query = first > 0 ? (int)(first / TILE * TILE) : 0;
    // Among queries from this one, the thread's column of its upper row's first query.
    int start = a.causal ? (int)(first + thread_row() - thread_column()) : 0;
    auto load_next = [&](int stage, int query) {
        load(tiles[2 * stage], q, query);
        load(tiles[2 * stage + 1], grad, query);
        int i = threadIdx.x % (TILE / 4) * 4, which = threadIdx.x / (TILE / 4);
        if (which < 2) load_pack((T*)&numbers[stage][which][i], (const T*)(planes + which * plane + query + i), true);
    };
    if (query < q.rows) {
        load(rows[0], k, place.row);
        load(rows[1], v, place.row);
        load_next(0, query);
        if (KEEPS) await_loads();
        Left keys, values;
        u32 p[TILE / 16][4], dp[TILE / 16][4];
        int stage = 0;
        float s[TILE / 8][4], ds[TILE / 8][4];
        clear(s);
        clear(ds);
        auto step = [&](auto is_masked) {
            await_loads();
            Tile<TILE>* now = tiles + 2 * stage;
            const float *shifts = numbers[stage][0] + thread_column(), *dots = numbers[stage][1] + thread_column();
            int next = stage == STAGES - 1 ? 0 : stage + 1;
            if (query + TILE < q.rows) load_next(next, query + TILE);
            start_dots(s, keys, now[0]);
            start_dots(ds, values, now[1]);
#if STAGES == 3
            await_products<2>();
            pin(dv);
            pin(dk);
#endif
            await_products<1>();
            pin(s);
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) {
                Pack<float, 2> shift = *(const Pack<float, 2>*)(shifts + 8 * j);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    bool is_seen = !decltype(is_masked)::value || j * 8 + e % 2 >= start - query + e / 2 * 8;
                    s[j][e] = is_seen ? exp2_of(fmaf(s[j][e], scale2, -shift.values[e % 2])) : 0.0f;
                }
            }
            to_left(p, s);
            await_products<0>();
            pin(ds);
            start_product(dv, p, now[1]);
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) {
                Pack<float, 2> dot = *(const Pack<float, 2>*)(dots + 8 * j);
#pragma unroll
                for (int e = 0; e < 4; e++) ds[j][e] = from_left(p, j, e) * (ds[j][e] - dot.values[e % 2]);
            }
            to_left(dp, ds);
            start_product(dk, dp, now[0]);
#if STAGES == 2
            await_products<0>();
            pin(dv);
            pin(dk);
#endif
            stage = next;
            query += TILE;
        };
        keys.load(rows[0]);
        values.load(rows[1]);
        while (query < q.rows && query < whole) step(Yes());
        while (query < q.rows) step(No());
#if STAGES == 3
        await_products<0>();
        pin(dv);
        pin(dk);
#endif
    }
    store(a.dk + place.head * a.keys * a.width, place.row, k.rows, k.columns, dk, scale, scale);
    store(a.dv + place.head * a.keys * a.value_width, place.row, v.rows, v.columns, dv, 1.0f, 1.0f);
}
