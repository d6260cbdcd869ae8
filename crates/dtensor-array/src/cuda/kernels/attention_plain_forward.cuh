// The forward pass of attention, with a running maximum and sum of each query (online softmax). It starts with the last keys, as only
// these tiles have keys that a query does not attend to.
//
// With three stages, the groups of a block wait for each other in two places with work between them, so that the products of one run
// during the softmax of another.

//! kernels: forward
PLAIN_ENTRY(forward) {
    PLAIN_SHARED(shared);
    Tile<ROWS>& queries = *(Tile<ROWS>*)shared;
    Tile<TILE>* keys = (Tile<TILE>*)(&queries + 1);
    Tile<TILE>* values = keys + STAGES;
    Place place(a, a.causal);
    Side q = side(a.q, place.head, a.queries, a.width), k = side(a.k, place.head, a.keys, a.width);
    Side v = side(a.v, place.head, a.keys, a.value_width);
    float scale = (float)a.scale, scale2 = scale * LOG2_E;
    float most[2] = {lowest<float>(), lowest<float>()}, sums[2] = {0.0f, 0.0f};
    float o[W / 8][4];
    clear(o);
    int last = place.row + ROWS < q.rows ? place.row + ROWS : q.rows;
    int key = (end_of_keys(a, last - 1) + TILE - 1) / TILE * TILE, seen_by_all = end_of_keys(a, place.row);
    if (key > 0) {
        // The thread's columns of a tile before this one, plus the tile's first key, are those that its rows attend to.
        int ends[2] = {end_of_keys(a, place.row + thread_row()) - thread_column(),
                       end_of_keys(a, place.row + thread_row() + 8) - thread_column()};
        u32 p[TILE / 16][4];
        Left left;
        int stage = 0;
        key -= TILE;
        load(queries, q, place.row);
        load(keys[0], k, key);
#if STAGES == 3
        // The operands of a step are there, and all groups are done with those of the step before.
        SplitBarrier *is_full = (SplitBarrier*)(values + STAGES), *is_free = is_full + 1;
        u32 parity = 0;
        if (threadIdx.x == 0) {
            is_full->init(THREADS / WARP);
            is_free->init(THREADS / WARP);
        }
        __syncthreads();
        end_loads();
        if (key > 0) load(keys[1], k, key - TILE);
        load(values[0], v, key);
        end_loads();
        await_own_loads<1>();
        is_full->arrive();
#endif
        // The product of a tile's probabilities and values runs during the softmax of the next tile.
        auto step = [&](auto is_first, auto is_masked) {
            int before = stage == 0 ? STAGES - 1 : stage - 1, next = stage == STAGES - 1 ? 0 : stage + 1;
#if STAGES == 3
            is_full->await(parity);
            is_free->arrive();
#else
            await_loads();
            load(values[stage], v, key);
            if (key > 0) load(keys[next], k, key - TILE);
#endif
            if (decltype(is_first)::value) left.load(queries);
            float s[TILE / 8][4];
            start_dots(s, left, keys[stage]);
            if (decltype(is_first)::value) {
                await_products<0>();
            } else {
                start_product(o, p, values[before]);
                await_products<1>();
            }
            pin(s);
#if STAGES == 3
            await_own_loads<0>();
            is_full->arrive();
            is_free->await(parity);
            parity ^= 1;
            if (key > TILE) load(keys[before], k, key - 2 * TILE);
            if (key > 0) load(values[next], v, key - TILE);
            end_loads();
#endif
            float factors[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float highest = most[i], sum = 0.0f;
                int end = ends[i] - key;
#pragma unroll
                for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& x = s[j][2 * i + e];
                        if (decltype(is_masked)::value && j * 8 + e >= end) x = lowest<float>();
                        highest = fmaxf(highest, x);
                    }
                highest = fmaxf(highest, shuffle_xor(highest, 1));
                highest = fmaxf(highest, shuffle_xor(highest, 2));
                // If all logits are −∞ so far, a shift of 0 gives probabilities of 0.
                float shift = highest == lowest<float>() ? 0.0f : highest * scale2;
                factors[i] = exp2_of(fmaf(most[i], scale2, -shift));
                most[i] = highest;
#pragma unroll
                for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& x = s[j][2 * i + e];
                        x = exp2_of(fmaf(x, scale2, -shift));
                        sum += x;
                    }
                sums[i] = fmaf(sums[i], factors[i], sum);
            }
            compute_before_wait(float_to_bits(sums[0] + sums[1]) & 0x80000000u);
            if (!decltype(is_first)::value) {
                await_products<0>();
                pin(o);
                // After the first tiles, the maxima rarely change.
                if (__any_sync(FULL_WARP, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
                    for (int j = 0; j < W / 8; j++)
#pragma unroll
                        for (int e = 0; e < 4; e++) o[j][e] *= factors[e / 2];
                }
            }
            to_left(p, s);
            stage = next;
            key -= TILE;
        };
        step(Yes(), Yes());
        while (key >= 0 && key + TILE > seen_by_all) step(No(), Yes());
        while (key >= 0) step(No(), No());
#if STAGES == 3
        is_full->await(parity);
#else
        await_loads();
#endif
        start_product(o, p, values[stage == 0 ? STAGES - 1 : stage - 1]);
        await_products<0>();
        pin(o);
    }
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sums[i] += shuffle_xor(sums[i], 1);
        sums[i] += shuffle_xor(sums[i], 2);
        bool is_zero = sums[i] == 0.0f;
        factors[i] = is_zero ? 0.0f : 1.0f / sums[i];
        int row = place.row + thread_row() + 8 * i;
        if (lane() % 4 == 0 && row < q.rows)
            a.lse[place.head * a.queries + row] = is_zero ? lowest<float>() : fmaf(most[i], scale, logf(sums[i]));
    }
    store(a.out + place.head * a.queries * a.value_width, place.row, q.rows, v.columns, o, factors[0], factors[1]);
}
