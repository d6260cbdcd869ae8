//! The two loops of a fold, which determine the order of the additions.

use std::mem::MaybeUninit;

use super::super::layout::{Axis, Walk};
use super::super::wide::Source;
use super::{Fold, Plan};

/// The number of terms that one level of a cascade sums before it passes them to the next.
const RADIX: usize = 16;
/// The number of levels of a cascade. The last one sums any number of terms.
const LEVELS: usize = 6;
/// The number of elements of a row that independent lanes fold into one term of the cascade.
const BLOCK: usize = 4096;
/// The number of columns accumulated together: two levels of `f32` accumulators fit in the L1 cache.
const COLUMNS: usize = 2048;
/// The number of rows that are merged before they are added to the accumulators.
const GROUP: usize = 8;
/// Rows narrower than this are processed several at a time.
const NARROW: usize = 64;

/// A running fold whose rounding error grows with the logarithm of the number of terms.
struct Cascade<F: Fold> {
    f: F,
    levels: [F::Acc; LEVELS],
    terms: usize,
}

impl<F: Fold> Cascade<F> {
    #[inline(always)]
    fn new(f: F) -> Self {
        Cascade { f, levels: [f.identity(); LEVELS], terms: 0 }
    }

    #[inline(always)]
    fn push(&mut self, term: F::Acc) {
        self.levels[0] = self.f.merge(self.levels[0], term);
        self.terms += 1;
        let (mut terms, mut level) = (self.terms, 0);
        while terms % RADIX == 0 && level + 1 < LEVELS {
            self.levels[level + 1] = self.f.merge(self.levels[level + 1], self.levels[level]);
            self.levels[level] = self.f.identity();
            (terms, level) = (terms / RADIX, level + 1);
        }
    }

    #[inline(always)]
    fn total(self) -> F::Acc {
        let mut total = self.levels[0];
        for &level in &self.levels[1..] {
            total = self.f.merge(total, level);
        }
        total
    }
}

/// Folds the innermost axis: one result for each row.
#[inline(always)]
pub(super) fn rows<F: Fold>(
    f: F,
    plan: &Plan,
    data: Source<F::In>,
    ctx: &[F::Ctx],
    out: &mut [MaybeUninit<F::Out>],
) {
    let run = plan.run;
    // The innermost of the outer axes is a plain loop, because there may be very many short rows.
    let (many, outer) = split_last(&plan.outer);
    let mut index = 0;
    let mut buffer = buffer(data, run.min(BLOCK));
    for [start] in Walk::new(outer) {
        for i in 0..many.size {
            let at = start + i * many.strides[0];
            let ctx = ctx[index];
            let acc = if plan.folded.is_empty() && run <= BLOCK {
                block(f, data.run(at, run, &mut buffer), ctx)
            } else {
                let mut cascade = Cascade::new(f);
                let (mut lanes, mut ends, mut fed) = (empty_lanes(f), [f.identity(); LANES], 0);
                for [offset] in Walk::new(&plan.folded) {
                    for first in (0..run).step_by(BLOCK) {
                        let part = data.run(at + offset + first, (run - first).min(BLOCK), &mut buffer);
                        let rest = feed(f, &mut lanes, part, ctx);
                        for (end, &x) in ends.iter_mut().zip(rest) {
                            *end = f.merge(*end, f.lift(x, ctx));
                        }
                        fed += part.len();
                        if fed >= BLOCK {
                            merge_into(f, &mut lanes[0], &ends);
                            cascade.push(merge_lanes(f, lanes));
                            (lanes, ends, fed) = (empty_lanes(f), [f.identity(); LANES], 0);
                        }
                    }
                }
                merge_into(f, &mut lanes[0], &ends);
                cascade.push(merge_lanes(f, lanes));
                cascade.total()
            };
            out[index].write(f.finish(acc));
            index += 1;
        }
    }
}

/// Allocates a buffer for `len` elements, if they have to be widened.
#[inline(always)]
fn buffer<A: Copy + Default>(data: Source<A>, len: usize) -> Vec<A> {
    if data.is_narrow() { vec![A::default(); len] } else { Vec::new() }
}

/// Returns the innermost axis and the others. If there is none, returns an axis of size 1.
#[inline(always)]
fn split_last(axes: &[Axis<1>]) -> (Axis<1>, &[Axis<1>]) {
    match axes.split_last() {
        Some((&last, outer)) => (last, outer),
        None => (Axis { size: 1, strides: [0] }, &[]),
    }
}

/// The number of lanes in each of the four accumulators of a row.
const LANES: usize = 16;

/// Independent accumulators: enough of them that no addition waits for the previous one.
type Lanes<A> = [[A; LANES]; 4];

#[inline(always)]
fn empty_lanes<F: Fold>(f: F) -> Lanes<F::Acc> {
    [[f.identity(); LANES]; 4]
}

/// Folds at most a few thousand elements.
#[inline(always)]
fn block<F: Fold>(f: F, xs: &[F::In], ctx: F::Ctx) -> F::Acc {
    let (mut acc, mut rest) = (f.identity(), xs);
    if xs.len() >= LANES {
        let mut lanes = empty_lanes(f);
        rest = feed(f, &mut lanes, xs, ctx);
        acc = merge_lanes(f, lanes);
    }
    for &x in rest {
        acc = f.merge(acc, f.lift(x, ctx));
    }
    acc
}

/// Folds elements into the lanes and returns the last few, which do not fill all lanes. The lanes are indexed only by
/// constants, so that the compiler keeps them in registers.
#[inline(always)]
fn feed<'a, F: Fold>(f: F, lanes: &mut Lanes<F::Acc>, xs: &'a [F::In], ctx: F::Ctx) -> &'a [F::In] {
    let [mut a, mut b, mut c, mut d] = *lanes;
    let (chunks, rest) = xs.as_chunks::<{ 4 * LANES }>();
    for chunk in chunks {
        for i in 0..LANES {
            a[i] = f.merge(a[i], f.lift(chunk[i], ctx));
        }
        for i in 0..LANES {
            b[i] = f.merge(b[i], f.lift(chunk[LANES + i], ctx));
        }
        for i in 0..LANES {
            c[i] = f.merge(c[i], f.lift(chunk[2 * LANES + i], ctx));
        }
        for i in 0..LANES {
            d[i] = f.merge(d[i], f.lift(chunk[3 * LANES + i], ctx));
        }
    }
    let (chunks, rest) = rest.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            b[i] = f.merge(b[i], f.lift(chunk[i], ctx));
        }
    }
    *lanes = [a, b, c, d];
    rest
}

#[inline(always)]
fn merge_into<F: Fold>(f: F, to: &mut [F::Acc; LANES], from: &[F::Acc; LANES]) {
    for i in 0..LANES {
        to[i] = f.merge(to[i], from[i]);
    }
}

/// Merges the lanes in a tree.
#[inline(always)]
fn merge_lanes<F: Fold>(f: F, [mut a, b, c, d]: Lanes<F::Acc>) -> F::Acc {
    for i in 0..LANES {
        a[i] = f.merge(f.merge(a[i], b[i]), f.merge(c[i], d[i]));
    }
    // Without this barrier the compiler rearranges the lanes for this tree, and no longer keeps them in wide registers.
    let mut a = std::hint::black_box(a);
    for i in 0..8 {
        a[i] = f.merge(a[i], a[i + 8]);
    }
    for i in 0..4 {
        a[i] = f.merge(a[i], a[i + 4]);
    }
    f.merge(f.merge(a[0], a[2]), f.merge(a[1], a[3]))
}

/// Folds all axes but the innermost: one result for each column.
#[inline(always)]
pub(super) fn columns<F: Fold>(
    f: F,
    plan: &Plan,
    data: Source<F::In>,
    ctx: &[F::Ctx],
    out: &mut [MaybeUninit<F::Out>],
) {
    let (inner, outer) = split_last(&plan.folded);
    let run = plan.run;
    // Narrow contiguous rows are processed `fan` at a time, as one wide row.
    let fan = if outer.is_empty() && run < NARROW && inner.strides == [run] { NARROW / run } else { 1 };
    let fan = if inner.size >= 4 * fan { fan } else { 1 };
    let wide = Axis { size: inner.size / fan, strides: [inner.strides[0] * fan] };
    let terms = plan.count / fan;
    let levels = (1..LEVELS).take_while(|&level| terms >= RADIX.pow(level as u32)).count() + 1;
    let width = (run * fan).min(COLUMNS);
    let mut acc = vec![f.identity(); width * levels];
    let mut repeated = Vec::new();
    let mut buffer = buffer(data, width * GROUP);
    for (index, [at]) in Walk::new(&plan.outer).enumerate() {
        for first in (0..run).step_by(COLUMNS) {
            let w = (run - first).min(COLUMNS);
            let place = index * run + first;
            let ctx = &ctx[place..place + w];
            let at = at + first;
            repeated.clear();
            if fan > 1 {
                for _ in 0..fan {
                    repeated.extend_from_slice(ctx);
                }
            }
            let fanned = if fan > 1 { &repeated[..] } else { ctx };
            accumulate(f, data, at, outer, wide, fanned, &mut acc, levels, &mut buffer);
            for part in 1..fan {
                for j in 0..w {
                    acc[j] = f.merge(acc[j], acc[part * w + j]);
                }
            }
            if fan > 1 {
                for row in wide.size * fan..inner.size {
                    add_row(f, &mut acc[..w], data.run(at + row * w, w, &mut buffer), ctx);
                }
            }
            for (out, &acc) in out[place..place + w].iter_mut().zip(&acc[..w]) {
                out.write(f.finish(acc));
            }
        }
    }
}

/// Folds rows into the first `ctx.len()` elements of `acc`, which has that many accumulators for each level of the cascade.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn accumulate<F: Fold>(
    f: F,
    data: Source<F::In>,
    start: usize,
    outer: &[Axis<1>],
    inner: Axis<1>,
    ctx: &[F::Ctx],
    acc: &mut [F::Acc],
    levels: usize,
    buffer: &mut [F::In],
) {
    let (w, n, [stride]) = (ctx.len(), inner.size, inner.strides);
    acc[..w * levels].fill(f.identity());
    let mut terms = 0;
    for [offset] in Walk::new(outer) {
        let at = start + offset;
        let mut i = 0;
        while i < n {
            if i + GROUP <= n {
                match data {
                    Source::Same(data) => add_group(f, &mut acc[..w], &data[at + i * stride..], stride, ctx),
                    Source::Narrow(data) => {
                        for (k, row) in buffer[..GROUP * w].chunks_exact_mut(w).enumerate() {
                            data.widen(at + (i + k) * stride, row);
                        }
                        add_group(f, &mut acc[..w], buffer, w, ctx);
                    }
                }
                i += GROUP;
            } else {
                add_row(f, &mut acc[..w], data.run(at + i * stride, w, buffer), ctx);
                i += 1;
            }
            terms += 1;
            let (mut left, mut level) = (terms, 0);
            while left % RADIX == 0 && level + 1 < levels {
                let (low, high) = acc[level * w..(level + 2) * w].split_at_mut(w);
                for j in 0..w {
                    high[j] = f.merge(high[j], low[j]);
                    low[j] = f.identity();
                }
                (left, level) = (left / RADIX, level + 1);
            }
        }
    }
    for level in 1..levels {
        let (low, high) = acc.split_at_mut(level * w);
        for j in 0..w {
            low[j] = f.merge(low[j], high[j]);
        }
    }
}

#[inline(always)]
fn add_row<F: Fold>(f: F, acc: &mut [F::Acc], row: &[F::In], ctx: &[F::Ctx]) {
    for ((acc, &x), &ctx) in acc.iter_mut().zip(row).zip(ctx) {
        *acc = f.merge(*acc, f.lift(x, ctx));
    }
}

/// Adds [`GROUP`] rows, and loads and stores the accumulators only once.
#[inline(always)]
fn add_group<F: Fold>(f: F, acc: &mut [F::Acc], data: &[F::In], stride: usize, ctx: &[F::Ctx]) {
    let w = acc.len();
    let ctx = &ctx[..w];
    let mut rows: [&[F::In]; GROUP] = [&[]; GROUP];
    for (k, row) in rows.iter_mut().enumerate() {
        *row = &data[k * stride..k * stride + w];
    }
    let [a, b, c, d, e, g, h, i] = rows;
    for j in 0..w {
        let t = ctx[j];
        let ab = f.merge(f.lift(a[j], t), f.lift(b[j], t));
        let cd = f.merge(f.lift(c[j], t), f.lift(d[j], t));
        let eg = f.merge(f.lift(e[j], t), f.lift(g[j], t));
        let hi = f.merge(f.lift(h[j], t), f.lift(i[j], t));
        acc[j] = f.merge(acc[j], f.merge(f.merge(ab, cd), f.merge(eg, hi)));
    }
}
