//! Softmax and log-softmax along any dim, and their gradients.
//!
//! Along the last dim, a row is reduced in lanes. Along another dim, a block of neighbouring columns is processed together. The
//! exponentials stay in a small buffer until their sum is known, so the result is written once and half precision is rounded once.

use std::mem::MaybeUninit;

use super::rows::{COLUMNS, Columns, exp_row, max_of, split, sum_of, sums};
use super::{fill_array, simd};
use crate::{Array, Elem, Float, Num, Real, with_float};
use crate::{Element, Result};

mod parts;

pub(crate) use parts::{backward_sums, backward_with, exp_sums, maxima, normalised};

/// Computes the softmax `exp(x) / Σ exp(x)` along `dim`.
pub(crate) fn softmax(x: &Array, dim: usize) -> Result<Array> {
    with_float!("softmax", x.dtype(), T => forward::<T, false>(x, dim))
}

/// Computes the logarithm of [`softmax`].
pub(crate) fn log_softmax(x: &Array, dim: usize) -> Result<Array> {
    with_float!("log_softmax", x.dtype(), T => forward::<T, true>(x, dim))
}

/// Computes the gradient of [`softmax`] from its result `y`.
pub(crate) fn softmax_backward(y: &Array, dy: &Array, dim: usize) -> Result<Array> {
    with_float!("softmax", y.dtype(), T => backward::<T, false>(y, dy, dim))
}

/// Computes the gradient of [`log_softmax`] from its result `y`.
pub(crate) fn log_softmax_backward(y: &Array, dy: &Array, dim: usize) -> Result<Array> {
    with_float!("log_softmax", y.dtype(), T => backward::<T, true>(y, dy, dim))
}

fn forward<T: Float + Element, const LOG: bool>(x: &Array, dim: usize) -> Result<Array> {
    let (outer, size, inner) = split(x.dims(), dim);
    let x = x.contiguous()?;
    let read = x.read::<T>()?;
    let data = &read.data()[..x.numel()];
    let mut exps = vec![T::Acc::ZERO; size * inner.min(COLUMNS)];
    let fill = |out: &mut [_]| {
        simd::<T, _>(
            #[inline(always)]
            || match inner {
                1 => forward_rows::<T, LOG>(data, &mut exps, out),
                _ => forward_columns::<T, LOG>(data, outer, size, inner, &mut exps, out),
            },
        )
    };
    // SAFETY: both functions write rows, or blocks of columns, that cover the array.
    unsafe { fill_array(x.dims(), fill) }
}

#[inline(always)]
fn forward_rows<T: Float, const LOG: bool>(data: &[T], exps: &mut [T::Acc], out: &mut [MaybeUninit<T>]) {
    let size = exps.len().max(1);
    for (x, out) in data.chunks_exact(size).zip(out.chunks_exact_mut(size)) {
        // If the row contains NaN or +∞, or only −∞, the sum is NaN, and so is every element of the result.
        let max = max_of(x);
        let sum = exp_row(x, max, exps);
        if LOG {
            let log = sum.ln();
            for (out, x) in out.iter_mut().zip(x) {
                out.write(T::from_acc((x.acc() - max) - log));
            }
        } else {
            let scale = T::Acc::ONE / sum;
            for (out, &e) in out.iter_mut().zip(&*exps) {
                out.write(T::from_acc(e * scale));
            }
        }
    }
}

#[inline(always)]
fn forward_columns<T: Float, const LOG: bool>(
    data: &[T],
    outer: usize,
    size: usize,
    inner: usize,
    exps: &mut [T::Acc],
    out: &mut [MaybeUninit<T>],
) {
    Columns::each(
        outer,
        size,
        inner,
        #[inline(always)]
        |block| {
            let max = block.max(data, size);
            let mut factor = block.exp(data, size, &max, exps);
            for sum in &mut factor {
                *sum = if LOG { sum.ln() } else { T::Acc::ONE / *sum };
            }
            for j in 0..size {
                let out = block.row_mut(out, j).iter_mut();
                if LOG {
                    for (((out, x), &max), &log) in out.zip(block.row(data, j)).zip(&max).zip(&factor) {
                        out.write(T::from_acc((x.acc() - max) - log));
                    }
                } else {
                    for ((out, &e), &scale) in out.zip(&exps[j * block.width..]).zip(&factor) {
                        out.write(T::from_acc(e * scale));
                    }
                }
            }
        },
    );
}

fn backward<T: Float + Element, const LOG: bool>(y: &Array, dy: &Array, dim: usize) -> Result<Array> {
    let (outer, size, inner) = split(y.dims(), dim);
    let (y, dy) = (y.contiguous()?, dy.contiguous()?);
    let (y_read, dy_read) = (y.read::<T>()?, dy.read::<T>()?);
    let (y_data, dy_data) = (&y_read.data()[..y.numel()], &dy_read.data()[..y.numel()]);
    let fill = |out: &mut [_]| {
        simd::<T, _>(
            #[inline(always)]
            || match inner {
                1 => backward_rows::<T, LOG>(y_data, dy_data, size.max(1), out),
                _ => backward_columns::<T, LOG>(y_data, dy_data, outer, size, inner, out),
            },
        )
    };
    // SAFETY: both functions write rows, or blocks of columns, that cover the array.
    unsafe { fill_array(y.dims(), fill) }
}

/// Returns the term that [`backward_one`] needs summed over the dim.
#[inline(always)]
fn backward_term<T: Float, const LOG: bool>(y: T, dy: T) -> T::Acc {
    if LOG { dy.acc() } else { y.acc() * dy.acc() }
}

/// Computes one element of the gradient, from the sum of the [`backward_term`]s.
#[inline(always)]
fn backward_one<T: Float, const LOG: bool>(y: T, dy: T, sum: T::Acc) -> T {
    T::from_acc(if LOG { dy.acc() - y.acc().exp() * sum } else { y.acc() * (dy.acc() - sum) })
}

/// Sums the [`backward_term`]s of a row.
#[inline(always)]
fn backward_row_sum<T: Float, const LOG: bool>(y: &[T], dy: &[T]) -> T::Acc {
    if LOG {
        return sum_of(
            dy,
            #[inline(always)]
            |dy| dy.acc(),
        );
    }
    sums(
        y,
        dy,
        dy,
        #[inline(always)]
        |y, dy, _| [backward_term::<T, LOG>(y, dy)],
    )[0]
}

/// Sums the [`backward_term`]s of each column of a block.
#[inline(always)]
fn backward_column_sums<T: Float, const LOG: bool>(
    block: &Columns,
    y: &[T],
    dy: &[T],
    size: usize,
) -> [T::Acc; COLUMNS] {
    block.sum(
        size,
        #[inline(always)]
        |j, sums| {
            for ((sum, &y), &dy) in sums.iter_mut().zip(block.row(y, j)).zip(block.row(dy, j)) {
                *sum = *sum + backward_term::<T, LOG>(y, dy);
            }
        },
    )
}

#[inline(always)]
fn backward_rows<T: Float, const LOG: bool>(y: &[T], dy: &[T], size: usize, out: &mut [MaybeUninit<T>]) {
    for ((y, dy), out) in y.chunks_exact(size).zip(dy.chunks_exact(size)).zip(out.chunks_exact_mut(size)) {
        let sum = backward_row_sum::<T, LOG>(y, dy);
        for ((out, &y), &dy) in out.iter_mut().zip(y).zip(dy) {
            out.write(backward_one::<T, LOG>(y, dy, sum));
        }
    }
}

#[inline(always)]
fn backward_columns<T: Float, const LOG: bool>(
    y: &[T],
    dy: &[T],
    outer: usize,
    size: usize,
    inner: usize,
    out: &mut [MaybeUninit<T>],
) {
    Columns::each(
        outer,
        size,
        inner,
        #[inline(always)]
        |block| {
            let totals = backward_column_sums::<T, LOG>(&block, y, dy, size);
            for j in 0..size {
                let ys = block.row(y, j).iter().zip(block.row(dy, j));
                for ((out, (&y, &dy)), &sum) in block.row_mut(out, j).iter_mut().zip(ys).zip(&totals) {
                    out.write(backward_one::<T, LOG>(y, dy, sum));
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::testing::{FLOATS, assert_close, local, noise, strided, tolerance, values};
    use super::*;
    use crate::DType;

    /// Applies `f` to every row of `[outer, size, inner]` along the middle dim.
    fn by_rows(x: &[f64], dims: (usize, usize, usize), f: impl Fn(&[f64], usize) -> Vec<f64>) -> Vec<f64> {
        let (outer, size, inner) = dims;
        let mut out = vec![0.0; x.len()];
        for (o, i) in (0..outer).flat_map(|o| (0..inner).map(move |i| (o, i))) {
            let at = |j: usize| (o * size + j) * inner + i;
            let row: Vec<f64> = (0..size).map(|j| x[at(j)]).collect();
            for (j, y) in f(&row, o * inner + i).into_iter().enumerate() {
                out[at(j)] = y;
            }
        }
        out
    }

    fn naive(row: &[f64]) -> Vec<f64> {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        row.iter().map(|x| (x - max).exp() / sum).collect()
    }

    fn shapes() -> Vec<(Vec<usize>, usize)> {
        let mut all = vec![(vec![], 0), (vec![1], 0), (vec![0], 0), (vec![3, 0], 0), (vec![3, 0], 1)];
        for shape in [vec![5, 7], vec![1, 1], vec![3, 129], vec![200, 3], vec![4, 70, 65], vec![2, 3, 4, 5]] {
            all.extend((0..shape.len()).map(|dim| (shape.clone(), dim)));
        }
        all
    }

    #[test]
    fn values_and_gradients_agree_with_the_formula() {
        for dtype in FLOATS {
            for (shape, dim) in shapes() {
                let dims = split(&shape, dim);
                let n = shape.iter().product();
                let x = local(dtype, &noise(n, 1).iter().map(|x| x * 4.0).collect::<Vec<_>>(), &shape);
                let dy = local(dtype, &noise(n, 2), &shape);
                let (xs, dys) = (values(&x), values(&dy));
                let p = by_rows(&xs, dims, |row, _| naive(row));
                let log_p: Vec<f64> = p.iter().map(|p| p.ln()).collect();
                for x in [x.clone(), strided(&x)] {
                    assert_close(&softmax(&x, dim).unwrap(), &p, tolerance(dtype));
                    assert_close(&log_softmax(&x, dim).unwrap(), &log_p, tolerance(dtype));
                }
                // The expected gradients are computed from the rounded results, like those of the kernel.
                let (y, log_y) = (softmax(&x, dim).unwrap(), log_softmax(&x, dim).unwrap());
                let products: Vec<f64> = values(&y).iter().zip(&dys).map(|(y, dy)| y * dy).collect();
                let sums = by_rows(&products, dims, |row, _| vec![row.iter().sum(); row.len()]);
                let dys_sums = by_rows(&dys, dims, |row, _| vec![row.iter().sum(); row.len()]);
                let each = |f: &dyn Fn(usize) -> f64| (0..n).map(f).collect::<Vec<f64>>();
                let (ys, log_ys) = (values(&y), values(&log_y));
                let want = each(&|i| ys[i] * (dys[i] - sums[i]));
                let log_want = each(&|i| dys[i] - log_ys[i].exp() * dys_sums[i]);
                for dy in [dy.clone(), strided(&dy)] {
                    let dx = softmax_backward(&y, &dy, dim).unwrap();
                    assert_close(&dx, &want, tolerance(dtype));
                    assert_eq!(dx.dims(), &shape[..]);
                    let dx = log_softmax_backward(&log_y, &dy, dim).unwrap();
                    assert_close(&dx, &log_want, tolerance(dtype) * 2.0);
                }
            }
        }
    }

    #[test]
    fn infinities_and_nan_follow_ieee() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        // One case in each row: along dim 1 of `[4, 3]` and, transposed, along dim 0 of `[3, 4]`.
        let x = [-inf, -inf, -inf, inf, 0.0, 1.0, nan, 0.0, 0.0, -inf, 0.0, 0.0];
        let want = [nan, nan, nan, nan, nan, nan, nan, nan, nan, 0.0, 0.5, 0.5];
        let log_want = [nan, nan, nan, nan, nan, nan, nan, nan, nan, -inf, -(2f64.ln()), -(2f64.ln())];
        let transpose = |v: &[f64]| (0..12).map(|i| v[i % 4 * 3 + i / 4]).collect::<Vec<f64>>();
        for dtype in FLOATS {
            let rows = local(dtype, &x, &[4, 3]);
            assert_close(&softmax(&rows, 1).unwrap(), &want, tolerance(dtype));
            assert_close(&log_softmax(&rows, 1).unwrap(), &log_want, tolerance(dtype));
            assert_eq!(values(&softmax(&rows, 1).unwrap())[9], 0.0);
            let columns = local(dtype, &transpose(&x), &[3, 4]);
            assert_close(&softmax(&columns, 0).unwrap(), &transpose(&want), tolerance(dtype));
            assert_close(&log_softmax(&columns, 0).unwrap(), &transpose(&log_want), tolerance(dtype));
        }
        // Large values do not overflow.
        let large = local(DType::F32, &[1e4, 1e4, -1e4], &[3]);
        assert_close(&softmax(&large, 0).unwrap(), &[0.5, 0.5, 0.0], 1e-6);
    }

    #[test]
    fn the_gradient_may_be_broadcast() {
        let y = softmax(&local(DType::F32, &noise(6, 3), &[2, 3]), 1).unwrap();
        let dy = local(DType::F32, &[1.0], &[1, 1]).expand(&[2, 3]).unwrap();
        assert_close(&softmax_backward(&y, &dy, 1).unwrap(), &[0.0; 6], 1e-6);
    }

    #[test]
    fn integers_are_errors() {
        assert!(softmax(&local(DType::I64, &[1.0], &[1]), 0).is_err());
    }
}
