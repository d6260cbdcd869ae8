//! Reductions over rows and columns of an array, for the fused kernels. Independent lanes let the compiler vectorise them, and
//! blocks above the lanes keep rounding errors small.

#![allow(clippy::needless_range_loop)] // one index runs over the lanes of several arrays

use crate::{Elem, Float, Num, Real};

/// The number of independent accumulators of a sum or maximum.
const LANES: usize = 16;
/// The number of elements in one iteration: eight for each lane, combined in a tree before they are added to the lane. With
/// that much work for each lane the compiler vectorises the loop over lanes. With less it unrolls the lanes into scalars, and
/// often fails to vectorise those.
const TURN: usize = 8 * LANES;
/// The number of elements in one partial sum.
const BLOCK: usize = 4096;
/// The number of rows in one partial sum over rows.
const BLOCK_ROWS: usize = 64;
/// The number of neighbouring columns that a kernel processes together.
pub(crate) const COLUMNS: usize = 64;

/// Returns the sizes of an array viewed as `[outer, size of dim, inner]`. A scalar is one row of one element.
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

/// Combines eight values in a tree.
#[inline(always)]
fn tree<A: Copy>(t: [A; 8], f: impl Fn(A, A) -> A) -> A {
    f(f(f(t[0], t[1]), f(t[2], t[3])), f(f(t[4], t[5]), f(t[6], t[7])))
}

/// Returns the elements of lane `i` in one iteration.
#[inline(always)]
fn lane<X: Copy>(x: &[X; TURN], i: usize) -> [X; 8] {
    [0, 1, 2, 3, 4, 5, 6, 7].map(
        #[inline(always)]
        |r| x[i + r * LANES],
    )
}

/// Computes `K` sums at once, of terms that depend on the elements of three rows of equal length. Pass a row twice if two rows
/// are enough.
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

/// Sums `f` over a row.
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

/// Returns the largest number of a row, or −∞ if it is empty. Ignores NaN.
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

/// Writes `exp(x − shift)` for a row and returns the sum. The exponentials are a separate loop because they vectorise best so.
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
    /// The index of the block's first element.
    pub(crate) start: usize,
    /// The number of columns.
    pub(crate) width: usize,
    /// The index of the first column among the `outer × inner` columns.
    pub(crate) first: usize,
    stride: usize,
}

impl Columns {
    /// Calls `body` for every block of an `[outer, size, inner]` array.
    #[inline(always)]
    pub(crate) fn each(outer: usize, size: usize, inner: usize, mut body: impl FnMut(Columns)) {
        for o in 0..outer {
            for c in (0..inner).step_by(COLUMNS) {
                let width = COLUMNS.min(inner - c);
                body(Columns { start: o * size * inner + c, width, first: o * inner + c, stride: inner });
            }
        }
    }

    /// Returns row `j` of the block.
    #[inline(always)]
    pub(crate) fn row<'a, T>(&self, data: &'a [T], j: usize) -> &'a [T] {
        &data[self.start + j * self.stride..][..self.width]
    }

    /// Returns row `j` of the block for writing.
    #[inline(always)]
    pub(crate) fn row_mut<'a, T>(&self, data: &'a mut [T], j: usize) -> &'a mut [T] {
        &mut data[self.start + j * self.stride..][..self.width]
    }

    /// Returns the largest number of each column. Ignores NaN.
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

    /// Sums along the columns: `add(j, sums)` adds the terms of row `j`.
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

    /// Writes `exp(x − shift)` for the block, row by row, and returns the sum of each column.
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
