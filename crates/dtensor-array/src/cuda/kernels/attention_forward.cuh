// The forward pass of attention, with a running maximum and sum of each query (online softmax).

BLOCK_ENTRY(forward, Attention) {
    SHARED_BYTES(shared);
    Block& queries = *(Block*)shared;
    Tile* tiles = (Tile*)(&queries + 1);
    Stage* stages = (Stage*)(tiles + 2);
    Place place(a, a.causal);
    Side q = side(a.q, place.head, a.queries, a.width), k = side(a.k, place.head, a.keys, a.width);
    Side v = side(a.v, place.head, a.keys, a.value_width);
    Rule rule(a, place.head);
    int width = part<W>(a.value_width, place.column);
    bool is_narrow = a.width <= W;
    A most[R], sums[R], o[R][OF(W)];
    clear(o);
    for (int i = 0; i < R; i++) {
        most[i] = lowest<A>();
        sums[i] = A(0);
    }
    u64 end = keys_seen(a, place.row);
    if (is_narrow && end > 0) {
        load(queries, q, place.row, 0);
        load(tiles[0], k, 0, 0);
    }
    for (u64 key = 0; key < end; key += TILE) {
        A s[R][OF(TILE)];
        clear(s);
        wait_for_loads();
        __syncthreads();
        load(tiles[1], v, key, place.column);
        add_all_dots(s, queries, tiles[0], q, place.row, k, key, is_narrow);
#pragma unroll
        for (int i = 0; i < R; i++) {
            u64 query = place.row + row_of(i);
            int seen = keys_of(a, query, key);
            A highest = most[i];
#pragma unroll
            for (int j = 0; j < OF(TILE); j++) {
                s[i][j] = rule.logit(s[i][j], column_of(j) < seen, query, key + column_of(j));
                highest = s[i][j] > highest ? s[i][j] : highest;
            }
            highest = row_reduce(highest, Greater());
            // If all logits are −∞ so far, a shift of 0 gives probabilities of 0, and NaN stays NaN.
            A shift = highest == lowest<A>() ? A(0) : highest;
            A factor = exponential(most[i] - shift), sum = A(0);
            most[i] = highest;
#pragma unroll
            for (int j = 0; j < OF(TILE); j++) {
                s[i][j] = exponential(s[i][j] - shift);
                sum += s[i][j];
                if (a.dropout) s[i][j] = s[i][j] * rule.keep(query, key + column_of(j));
            }
            sums[i] = sums[i] * factor + sum;
#pragma unroll
            for (int j = 0; j < OF(W); j++) o[i][j] = o[i][j] * factor;
        }
        wait_for_loads();
        __syncthreads();
        if (is_narrow && key + TILE < end) load(tiles[0], k, key + TILE, 0);
        add_product(o, s, tiles[1], width, stages);
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        u64 query = place.row + row_of(i);
        A sum = row_reduce(sums[i], Sum());
        if (query >= a.queries) continue;
        u64 row = place.head * a.queries + query;
        bool is_zero = sum == A(0);
        if (lane() % GROUP == 0 && place.column == 0)
            a.lse[row] = is_zero ? lowest<A>() : most[i] + logarithm(sum);
        store_row(a.out + row * a.value_width, place.column, a.value_width, o[i], A(1) / sum, is_zero);
    }
}
