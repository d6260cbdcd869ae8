// The gradients of queries, and the numbers of each query that the gradients of keys need too.

//! kernels: query_gradients
PLAIN_ENTRY(query_gradients) {
    PLAIN_SHARED(shared);
    Tile<ROWS>* rows = (Tile<ROWS>*)shared;
    Tile<TILE>* tiles = (Tile<TILE>*)(rows + 2);
    Place place(a, a.causal);
    Side q = side(a.q, place.head, a.queries, a.width), k = side(a.k, place.head, a.keys, a.width);
    Side v = side(a.v, place.head, a.keys, a.value_width);
    Side grad = side(a.grad, place.head, a.queries, a.value_width);
    float scale = (float)a.scale, scale2 = scale * LOG2_E;
    float o[W / 8][4];
    clear(o);
    int last = place.row + ROWS < q.rows ? place.row + ROWS : q.rows;
    int end = end_of_keys(a, last - 1), seen_by_all = end_of_keys(a, place.row);
    if (end > 0) {
        load(rows[0], q, place.row);
        load(rows[1], grad, place.row);
        load(tiles[0], k, 0);
        load(tiles[1], v, 0);
    }
    float shifts[2], dots[2];
    int ends[2], plane = padded(a);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int query = place.row + thread_row() + 8 * i;
        u64 at = place.head * a.queries + query;
        float lse = lowest<float>(), dot = 0.0f;
        if (query < q.rows) {
            lse = a.lse[at];
#pragma unroll
            for (int c = lane() % 4 * V; c < W; c += 4 * V) {
                if (c >= grad.columns) break;
                Pack<T, V> x = *(const Pack<T, V>*)(grad.at + query * grad.stride + c);
                Pack<T, V> y = *(const Pack<T, V>*)(a.out + at * grad.columns + c);
#pragma unroll
                for (int e = 0; e < V; e++) dot = fmaf(acc(x.values[e]), acc(y.values[e]), dot);
            }
        }
        dot += shuffle_xor(dot, 1);
        dot += shuffle_xor(dot, 2);
        // A query that attends to no key, and one beyond the last, get probabilities of 0.
        shifts[i] = lse == lowest<float>() ? highest<float>() : lse * LOG2_E;
        dots[i] = dot;
        ends[i] = end_of_keys(a, query) - thread_column();
        if (lane() % 4 == 0 && query < plane) {
            float* to = a.dots + place.head * 2 * plane + query;
            to[0] = shifts[i];
            to[plane] = dots[i];
        }
    }
    if (end > 0) {
        if (KEEPS) await_loads();
        Left queries, grads;
        u32 p[TILE / 16][4];
        int stage = 0, key = 0;
        auto step = [&](auto is_masked) {
            await_loads();
            Tile<TILE>* now = tiles + 2 * stage;
            if (key + TILE < end) {
                load(tiles[2 - 2 * stage], k, key + TILE);
                load(tiles[3 - 2 * stage], v, key + TILE);
            }
            float s[TILE / 8][4], ds[TILE / 8][4];
            start_dots(s, queries, now[0]);
            start_dots(ds, grads, now[1]);
            await_products<1>();
            pin(s);
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    bool is_seen = !decltype(is_masked)::value || j * 8 + e % 2 < ends[e / 2] - key;
                    s[j][e] = is_seen ? exp2_of(fmaf(s[j][e], scale2, -shifts[e / 2])) : 0.0f;
                }
            await_products<0>();
            pin(ds);
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[j][e] *= ds[j][e] - dots[e / 2];
            to_left(p, s);
            start_product(o, p, now[0]);
            await_products<0>();
            pin(o);
            stage = 1 - stage;
            key += TILE;
        };
        queries.load(rows[0]);
        grads.load(rows[1]);
        while (key + TILE <= seen_by_all) step(No());
        while (key < end) step(Yes());
    }
    store(a.dq + place.head * a.queries * a.width, place.row, q.rows, q.columns, o, scale, scale);
}
