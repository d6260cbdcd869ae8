//! Softmax over a sharded dim: the maxima and sums of each shard, and the shard of the result from those of the full rows.
//!
//! Maxima and sums are in the accumulation dtype, with size 1 in place of the dim. Half precision is widened before and rounded
//! after, so that these loops are compiled for only two types.

use std::cell::RefCell;

use super::super::cast::cast;
use super::*;
use crate::with_types;

/// Converts `x` to the accumulation dtype.
fn widen(x: &Array) -> Result<Array> {
    cast(x, with_float!("softmax", x.dtype(), T => Ok(<<T as Elem>::Acc as Element>::DTYPE))?)
}

/// Runs `body` with `$T` defined as the type of an array that [`widen`] has returned.
macro_rules! with_wide {
    ($x:expr, $T:ident => $body:expr) => {
        with_types!($x.dtype(), $T => $body, [F32: f32, F64: f64]
            dtype => unreachable!("{dtype} is not an accumulation dtype"))
    };
}

/// Returns the dims of an array with one number per row.
fn row_dims(dims: &[usize], dim: usize) -> Vec<usize> {
    let mut dims = dims.to_vec();
    if let Some(size) = dims.get_mut(dim) {
        *size = 1;
    }
    dims
}

/// Computes one number for each row of `[outer, size, inner]` along the middle dim: row by row if rows are contiguous, else for a
/// block of columns at a time. Call it only inside [`simd`].
#[inline(always)]
fn one_per_row<A: Num>(
    (outer, size, inner): (usize, usize, usize),
    mut row: impl FnMut(usize) -> A,
    mut block: impl FnMut(Columns) -> [A; COLUMNS],
) -> Vec<A> {
    let mut out = vec![A::ZERO; outer * inner];
    if inner == 1 {
        for (i, out) in out.iter_mut().enumerate() {
            *out = row(i);
        }
        return out;
    }
    Columns::each(
        outer,
        size,
        inner,
        #[inline(always)]
        |columns| {
            let numbers = block(columns);
            out[columns.first..][..columns.width].copy_from_slice(&numbers[..columns.width]);
        },
    );
    out
}

/// Finds the largest element of each row along `dim`; −∞ if the row is empty. The dim has size 1 in the result, which is
/// in the accumulation dtype.
pub(crate) fn maxima(x: &Array, dim: usize) -> Result<Array> {
    let x = &widen(x)?;
    with_wide!(x, T => maxima_of::<T>(x, dim))
}

fn maxima_of<T: Float<Acc: Element> + Element>(x: &Array, dim: usize) -> Result<Array> {
    let sizes @ (_, size, _) = split(x.dims(), dim);
    let shape = row_dims(x.dims(), dim);
    let x = x.contiguous()?;
    let read = x.read::<T>()?;
    let data = &read.data()[..x.numel()];
    let out = simd::<T, _>(
        #[inline(always)]
        || {
            one_per_row(
                sizes,
                #[inline(always)]
                |row| max_of(&data[row * size..][..size]),
                #[inline(always)]
                |block| block.max(data, size),
            )
        },
    );
    Array::from_vec(out, &shape)
}

/// Sums `exp(x − maxima)` over each row along `dim`.
pub(crate) fn exp_sums(x: &Array, maxima: &Array, dim: usize) -> Result<Array> {
    let x = &widen(x)?;
    with_wide!(x, T => exp_sums_of::<T>(x, maxima, dim))
}

fn exp_sums_of<T: Float<Acc: Element> + Element>(x: &Array, maxima: &Array, dim: usize) -> Result<Array> {
    let sizes @ (_, size, inner) = split(x.dims(), dim);
    let x = x.contiguous()?;
    let read = x.read::<T>()?;
    let data = &read.data()[..x.numel()];
    let max = maxima.copy_to_host::<T::Acc>()?;
    let exps = RefCell::new(vec![T::Acc::ZERO; size * inner.min(COLUMNS)]);
    let out = simd::<T, _>(
        #[inline(always)]
        || {
            one_per_row(
                sizes,
                #[inline(always)]
                |row| exp_row(&data[row * size..][..size], max[row], &mut exps.borrow_mut()),
                #[inline(always)]
                |block| block.exp(data, size, &max[block.first..][..block.width], &mut exps.borrow_mut()),
            )
        },
    );
    Array::from_vec(out, maxima.dims())
}

/// Computes this shard of [`softmax`], or of [`log_softmax`] if `log` is true, from the maxima and sums of exponentials
/// of the full rows.
pub(crate) fn normalised(x: &Array, maxima: &Array, sums: &Array, dim: usize, log: bool) -> Result<Array> {
    let wide = &widen(x)?;
    cast(&with_wide!(wide, T => normalised_of::<T>(wide, maxima, sums, dim, log))?, x.dtype())
}

fn normalised_of<T: Float<Acc: Element> + Element>(
    x: &Array,
    maxima: &Array,
    sums: &Array,
    dim: usize,
    log: bool,
) -> Result<Array> {
    let (max, sum) = (maxima.copy_to_host::<T::Acc>()?, sums.copy_to_host::<T::Acc>()?);
    if log {
        let logs: Vec<T::Acc> = sum.into_iter().map(Real::ln).collect();
        return map_with_rows::<T>(
            x,
            x,
            &max,
            &logs,
            dim,
            #[inline(always)]
            |x, _, max, log| T::from_acc((x.acc() - max) - log),
        );
    }
    let scales: Vec<T::Acc> = sum.into_iter().map(|sum| T::Acc::ONE / sum).collect();
    map_with_rows::<T>(
        x,
        x,
        &max,
        &scales,
        dim,
        #[inline(always)]
        |x, _, max, scale| T::from_acc((x.acc() - max).exp() * scale),
    )
}

/// Sums the terms of the gradient over each row along `dim`: `y · dy`, or `dy` if `log` is true.
pub(crate) fn backward_sums(y: &Array, dy: &Array, dim: usize, log: bool) -> Result<Array> {
    let (y, dy) = (&widen(y)?, &widen(dy)?);
    with_wide!(y, T => {
        if log { backward_totals::<T, true>(y, dy, dim) } else { backward_totals::<T, false>(y, dy, dim) }
    })
}

fn backward_totals<T: Float<Acc: Element> + Element, const LOG: bool>(
    y: &Array,
    dy: &Array,
    dim: usize,
) -> Result<Array> {
    let sizes @ (_, size, _) = split(y.dims(), dim);
    let shape = row_dims(y.dims(), dim);
    let (y, dy) = (y.contiguous()?, dy.contiguous()?);
    let (y_read, dy_read) = (y.read::<T>()?, dy.read::<T>()?);
    let (y_data, dy_data) = (&y_read.data()[..y.numel()], &dy_read.data()[..y.numel()]);
    let out = simd::<T, _>(
        #[inline(always)]
        || {
            one_per_row(
                sizes,
                #[inline(always)]
                |row| {
                    let row = row * size..(row + 1) * size;
                    backward_row_sum::<T, LOG>(&y_data[row.clone()], &dy_data[row])
                },
                #[inline(always)]
                |block| backward_column_sums::<T, LOG>(&block, y_data, dy_data, size),
            )
        },
    );
    Array::from_vec(out, &shape)
}

/// Computes this shard of the gradient, from the [`backward_sums`] of the full rows.
pub(crate) fn backward_with(y: &Array, dy: &Array, sums: &Array, dim: usize, log: bool) -> Result<Array> {
    let dtype = y.dtype();
    let (y, dy) = (&widen(y)?, &widen(dy)?);
    let dx = with_wide!(y, T => {
        if log { backward_of::<T, true>(y, dy, sums, dim) } else { backward_of::<T, false>(y, dy, sums, dim) }
    })?;
    cast(&dx, dtype)
}

fn backward_of<T: Float<Acc: Element> + Element, const LOG: bool>(
    y: &Array,
    dy: &Array,
    sums: &Array,
    dim: usize,
) -> Result<Array> {
    let sums = sums.copy_to_host::<T::Acc>()?;
    map_with_rows::<T>(
        y,
        dy,
        &sums,
        &sums,
        dim,
        #[inline(always)]
        |y, dy, sum, _| backward_one::<T, LOG>(y, dy, sum),
    )
}

/// Applies `f` to the elements of two arrays and to two numbers of their row.
fn map_with_rows<T: Float + Element>(
    x: &Array,
    y: &Array,
    a: &[T::Acc],
    b: &[T::Acc],
    dim: usize,
    f: impl Fn(T, T, T::Acc, T::Acc) -> T,
) -> Result<Array> {
    let (outer, size, inner) = split(x.dims(), dim);
    let (x, y) = (x.contiguous()?, y.contiguous()?);
    let (x_read, y_read) = (x.read::<T>()?, y.read::<T>()?);
    let (xs, ys) = (&x_read.data()[..x.numel()], &y_read.data()[..x.numel()]);
    let fill = |out: &mut [MaybeUninit<T>]| {
        simd::<T, _>(
            #[inline(always)]
            || {
                for o in 0..outer {
                    let (a, b) = (&a[o * inner..][..inner], &b[o * inner..][..inner]);
                    let rows = o * size * inner..(o + 1) * size * inner;
                    let (xs, ys, out) = (&xs[rows.clone()], &ys[rows.clone()], &mut out[rows]);
                    if let ([a], [b]) = (a, b) {
                        for ((out, &x), &y) in out.iter_mut().zip(xs).zip(ys) {
                            out.write(f(x, y, *a, *b));
                        }
                        continue;
                    }
                    for j in 0..size {
                        let at = j * inner..(j + 1) * inner;
                        let (xs, ys, out) = (&xs[at.clone()], &ys[at.clone()], &mut out[at]);
                        for ((((out, &x), &y), &a), &b) in out.iter_mut().zip(xs).zip(ys).zip(a).zip(b) {
                            out.write(f(x, y, a, b));
                        }
                    }
                }
            },
        )
    };
    // SAFETY: every row of every outer index is written.
    unsafe { fill_array(x.dims(), fill) }
}
