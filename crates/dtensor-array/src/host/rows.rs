//! What the kernels over rows and columns of an array share: reductions in independent lanes, which the
//! compiler turns into vectors, and a second level of blocks above them, which keeps rounding errors small.

#![allow(clippy::needless_range_loop)] // one index runs over the lanes of several arrays

use crate::{Elem, Float, Num, Real};

/// Independent accumulators of a sum or maximum.
const LANES: usize = 16;
/// What one turn of a loop takes in: eight elements for each lane, combined in a tree before they meet the
/// lane. With that much to do per lane the compiler makes a loop over lanes, which it vectorises; with less
/// it unrolls the lanes into scalars, which it then often fails to join again.
const TURN: usize = 8 * LANES;
/// Elements added up before a partial sum is put aside.
const BLOCK: usize = 4096;
/// Rows added up before a partial sum over rows is put aside.
const BLOCK_ROWS: usize = 64;
/// Columns that a kernel walks down side by side.
pub(crate) const COLUMNS: usize = 64;

/// An array as `[outer, size of dim, inner]`; a scalar is one row of one element.
pub(crate) fn split(dims: &[usize], dim: usize) -> (usize, usize, usize) {
    match dims {
        [] => (1, 1, 1),
        _ => (dims[..dim].iter().product(), dims[dim], dims[dim + 1..].iter().product()),
    }
}

#[inline(always)]
fn reduce_lanes<A: Copy>(mut lanes: [A; LANES], f: impl Fn(A, A) -> A) -> A {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Eight values for one lane, in a tree.
#[inline(always)]
fn tree<A: Copy>(t: [A; 8], f: impl Fn(A, A) -> A) -> A {
    f(f(f(t[0], t[1]), f(t[2], t[3])), f(f(t[4], t[5]), f(t[6], t[7])))
}

/// Lane `i`'s elements in a turn.
#[inline(always)]
fn lane<X: Copy>(x: &[X; TURN], i: usize) -> [X; 8] {
    [0, 1, 2, 3, 4, 5, 6, 7].map(
        #[inline(always)]
        |r| x[i + r * LANES],
    )
}

/// Several sums at once of terms of three rows of equal length. Give a row twice where two will do.
#[inline(always)]
pub(crate) fn sums<X: Copy, Y: Copy, Z: Copy, A: Num, const K: usize>(
    x: &[X],
    y: &[Y],
    z: &[Z],
    f: impl Fn(X, Y, Z) -> [A; K],
) -> [A; K] {
    let (y, z) = (&y[..x.len()], &z[..x.len()]);
    let mut totals = [A::ZERO; K];
    for ((x, y), z) in x.chunks(BLOCK).zip(y.chunks(BLOCK)).zip(z.chunks(BLOCK)) {
        let mut lanes = [[A::ZERO; LANES]; K];
        let ((x, x_rest), (y, y_rest), (z, z_rest)) = (x.as_chunks(), y.as_chunks(), z.as_chunks());
        for ((x, y), z) in x.iter().zip(y).zip(z) {
            for i in 0..LANES {
                let (x, y, z) = (lane(x, i), lane(y, i), lane(z, i));
                let mut terms = [[A::ZERO; 8]; K];
                for r in 0..8 {
                    let term = f(x[r], y[r], z[r]);
                    for k in 0..K {
                        terms[k][r] = term[k];
                    }
                }
                for k in 0..K {
                    lanes[k][i] = lanes[k][i] + tree(terms[k], add);
                }
            }
        }
        let ((x, x_rest), (y, y_rest), (z, z_rest)) =
            (x_rest.as_chunks(), y_rest.as_chunks(), z_rest.as_chunks());
        for ((x, y), z) in x.iter().zip(y).zip(z) {
            let (x, y, z): (&[X; LANES], &[Y; LANES], &[Z; LANES]) = (x, y, z);
            for i in 0..LANES {
                let term = f(x[i], y[i], z[i]);
                for k in 0..K {
                    lanes[k][i] = lanes[k][i] + term[k];
                }
            }
        }
        for ((&x, &y), &z) in x_rest.iter().zip(y_rest).zip(z_rest) {
            let term = f(x, y, z);
            for k in 0..K {
                totals[k] = totals[k] + term[k];
            }
        }
        for k in 0..K {
            totals[k] = totals[k] + reduce_lanes(lanes[k], add);
        }
    }
    totals
}

#[inline(always)]
fn add<A: Num>(a: A, b: A) -> A {
    a + b
}

/// The sum of `f` over a row.
#[inline(always)]
pub(crate) fn sum_of<X: Copy, A: Num>(x: &[X], f: impl Fn(X) -> A) -> A {
    sums(
        x,
        x,
        x,
        #[inline(always)]
        |x, _, _| [f(x)],
    )[0]
}

/// The largest number of a row, −∞ if there is none; NaNs are passed over.
#[inline(always)]
pub(crate) fn max_of<T: Elem>(x: &[T]) -> T::Acc {
    #[inline(always)]
    fn larger<A: Num>(a: A, b: A) -> A {
        if b > a { b } else { a }
    }
    let mut lanes = [T::Acc::LOWEST; LANES];
    let (turns, rest) = x.as_chunks();
    for turn in turns {
        for i in 0..LANES {
            let values = lane(turn, i).map(
                #[inline(always)]
                |x| x.acc(),
            );
            lanes[i] = larger(lanes[i], tree(values, larger));
        }
    }
    let (chunks, rest) = rest.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], chunk[i].acc());
        }
    }
    let mut max = reduce_lanes(lanes, larger);
    for x in rest {
        max = larger(max, x.acc());
    }
    max
}

/// Writes `exp(x − shift)` for a row, and gives the sum. In a loop of its own the function vectorises best.
#[inline(always)]
pub(crate) fn exp_row<T: Float>(x: &[T], shift: T::Acc, exps: &mut [T::Acc]) -> T::Acc {
    for (e, &x) in exps.iter_mut().zip(x) {
        *e = (x.acc() - shift).exp();
    }
    sum_of(
        &exps[..x.len()],
        #[inline(always)]
        |e| e,
    )
}

/// A block of at most [`COLUMNS`] neighbouring columns of a contiguous `[outer, size, inner]` array.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    /// Where the block's first row starts.
    pub(crate) start: usize,
    /// How many columns there are.
    pub(crate) width: usize,
    /// The first column's place among the `outer × inner` columns.
    pub(crate) first: usize,
    stride: usize,
}

impl Columns {
    /// Calls `body` for every block.
    #[inline(always)]
    pub(crate) fn each(outer: usize, size: usize, inner: usize, mut body: impl FnMut(Columns)) {
        for o in 0..outer {
            for c in (0..inner).step_by(COLUMNS) {
                let width = COLUMNS.min(inner - c);
                body(Columns { start: o * size * inner + c, width, first: o * inner + c, stride: inner });
            }
        }
    }

    /// Row `j` of the block.
    #[inline(always)]
    pub(crate) fn row<'a, T>(&self, data: &'a [T], j: usize) -> &'a [T] {
        &data[self.start + j * self.stride..][..self.width]
    }

    /// Row `j` of the block, to write to.
    #[inline(always)]
    pub(crate) fn row_mut<'a, T>(&self, data: &'a mut [T], j: usize) -> &'a mut [T] {
        &mut data[self.start + j * self.stride..][..self.width]
    }

    /// Each column's largest number; NaNs are passed over.
    #[inline(always)]
    pub(crate) fn max<T: Elem>(&self, data: &[T], size: usize) -> [T::Acc; COLUMNS] {
        let mut max = [T::Acc::LOWEST; COLUMNS];
        for j in 0..size {
            for (max, x) in max.iter_mut().zip(self.row(data, j)) {
                *max = if x.acc() > *max { x.acc() } else { *max };
            }
        }
        max
    }

    /// Sums down the columns: `add(j, sums)` adds row `j`'s terms.
    #[inline(always)]
    pub(crate) fn sum<A: Num>(&self, size: usize, mut add: impl FnMut(usize, &mut [A])) -> [A; COLUMNS] {
        let mut totals = [A::ZERO; COLUMNS];
        for block in (0..size).step_by(BLOCK_ROWS) {
            let mut part = [A::ZERO; COLUMNS];
            for j in block..size.min(block + BLOCK_ROWS) {
                add(j, &mut part[..self.width]);
            }
            for (total, part) in totals.iter_mut().zip(part) {
                *total = *total + part;
            }
        }
        totals
    }

    /// Writes `exp(x − shift)` for the block, row after row, and gives each column's sum.
    #[inline(always)]
    pub(crate) fn exp<T: Float>(
        &self,
        data: &[T],
        size: usize,
        shift: &[T::Acc],
        exps: &mut [T::Acc],
    ) -> [T::Acc; COLUMNS] {
        self.sum(
            size,
            #[inline(always)]
            |j, sums| {
                let exps = &mut exps[j * self.width..][..self.width];
                for ((e, x), &shift) in exps.iter_mut().zip(self.row(data, j)).zip(shift) {
                    *e = (x.acc() - shift).exp();
                }
                for (sum, &e) in sums.iter_mut().zip(&*exps) {
                    *sum = *sum + e;
                }
            },
        )
    }
}
