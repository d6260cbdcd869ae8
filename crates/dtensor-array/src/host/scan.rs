//! Cumulative sums along a dim.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::num::Wrapping;

use super::fold::Fold;
use super::{fill_array, simd};
use crate::DType;
use crate::{Array, Elem, Float, Num, with_float};
use crate::{Element, Result};

/// Computes the cumulative sum along `dim`: of each element and all before it, or all after it if `reverse` is true.
/// Floating-point elements are summed in `f64`. The result for `u8` is `i64`.
pub(crate) fn cumsum(x: &Array, dim: usize, reverse: bool) -> Result<Array> {
    match x.dtype() {
        DType::U8 => along(IntegerSum::<u8>(PhantomData), x, dim, reverse),
        DType::I64 => along(IntegerSum::<i64>(PhantomData), x, dim, reverse),
        dtype => with_float!("cumsum", dtype, T => along(FloatSum::<T>(PhantomData), x, dim, reverse)),
    }
}

fn along<F: Fold<Ctx = (), In: Elem, Out: Element>>(
    f: F,
    x: &Array,
    dim: usize,
    reverse: bool,
) -> Result<Array> {
    let x = x.contiguous()?;
    let sizes = x.dims();
    // A scalar accepts the dims of a 1-d array.
    let n = sizes.get(dim).copied().unwrap_or(1);
    let inner: usize = sizes.iter().skip(dim + 1).product();
    let read = x.read::<F::In>()?;
    let data = &read.data()[..x.numel()];
    // SAFETY: the chunks of `n × inner` elements cover the array, and `rows` and `columns` write every element of a chunk.
    unsafe {
        fill_array(sizes, |out| match (data.is_empty(), inner) {
            (true, _) => {}
            (_, 1) => simd::<F::In, _>(
                #[inline(always)]
                || rows(f, data, out, n, reverse),
            ),
            _ => simd::<F::In, _>(
                #[inline(always)]
                || {
                    let mut sums = vec![f.identity(); inner.min(COLUMNS)];
                    for (data, out) in data.chunks_exact(n * inner).zip(out.chunks_exact_mut(n * inner)) {
                        columns(f, data, out, inner, &mut sums, reverse);
                    }
                },
            ),
        })
    }
}

/// The number of rows summed together, so that their additions do not wait for each other.
const ROWS: usize = 8;
/// The number of elements of each row that are loaded and stored at once, because rows whose stride is a power of two evict each
/// other from the cache.
const STEP: usize = 16;

#[inline(always)]
fn rows<F: Fold<Ctx = ()>>(f: F, data: &[F::In], out: &mut [MaybeUninit<F::Out>], n: usize, reverse: bool) {
    let mut many = data.chunks_exact(n * ROWS);
    let mut many_out = out.chunks_exact_mut(n * ROWS);
    for (data, out) in (&mut many).zip(&mut many_out) {
        let mut sums = [f.identity(); ROWS];
        let mut tile = [[f.identity(); STEP]; ROWS];
        for step in 0..n.div_ceil(STEP) {
            // Steps are in the order of the sum, and the last one may be shorter.
            let (start, end) = (step * STEP, n.min((step + 1) * STEP));
            let (start, end) = if reverse { (n - end, n - start) } else { (start, end) };
            let w = end - start;
            for (row, tile) in tile.iter_mut().enumerate() {
                for (tile, &x) in tile.iter_mut().zip(&data[row * n + start..row * n + end]) {
                    *tile = f.lift(x, ());
                }
            }
            for i in 0..w {
                let i = if reverse { w - 1 - i } else { i };
                for row in 0..ROWS {
                    sums[row] = f.merge(sums[row], tile[row][i]);
                    tile[row][i] = sums[row];
                }
            }
            for (row, tile) in tile.iter().enumerate() {
                for (out, &sum) in out[row * n + start..row * n + end].iter_mut().zip(tile) {
                    out.write(f.finish(sum));
                }
            }
        }
    }
    for (data, out) in many.remainder().chunks_exact(n).zip(many_out.into_remainder().chunks_exact_mut(n)) {
        let mut sum = f.identity();
        for i in 0..n {
            let i = if reverse { n - 1 - i } else { i };
            sum = f.merge(sum, f.lift(data[i], ()));
            out[i].write(f.finish(sum));
        }
    }
}

/// The number of columns summed together.
const COLUMNS: usize = 1024;

#[inline(always)]
fn columns<F: Fold<Ctx = ()>>(
    f: F,
    data: &[F::In],
    out: &mut [MaybeUninit<F::Out>],
    width: usize,
    sums: &mut [F::Acc],
    reverse: bool,
) {
    let n = data.len() / width;
    for first in (0..width).step_by(COLUMNS) {
        let w = (width - first).min(COLUMNS);
        let sums = &mut sums[..w];
        sums.fill(f.identity());
        for i in 0..n {
            let at = (if reverse { n - 1 - i } else { i }) * width + first;
            let (data, out) = (&data[at..at + w], &mut out[at..at + w]);
            for j in 0..w {
                sums[j] = f.merge(sums[j], f.lift(data[j], ()));
                out[j].write(f.finish(sums[j]));
            }
        }
    }
}

/// A wrapping sum of integers.
#[derive(Clone, Copy)]
struct IntegerSum<T>(PhantomData<T>);

impl<T: Elem<Acc = Wrapping<i64>>> Fold for IntegerSum<T> {
    type In = T;
    type Ctx = ();
    type Acc = Wrapping<i64>;
    type Out = i64;
    #[inline(always)]
    fn identity(self) -> Self::Acc {
        Wrapping(0)
    }
    #[inline(always)]
    fn lift(self, x: T, (): ()) -> Self::Acc {
        x.acc()
    }
    #[inline(always)]
    fn merge(self, a: Self::Acc, b: Self::Acc) -> Self::Acc {
        a + b
    }
    #[inline(always)]
    fn finish(self, acc: Self::Acc) -> i64 {
        acc.0
    }
}

/// A sum of floating-point numbers in `f64`.
#[derive(Clone, Copy)]
struct FloatSum<T>(PhantomData<T>);

impl<T: Float> Fold for FloatSum<T> {
    type In = T;
    type Ctx = ();
    type Acc = f64;
    type Out = T;
    #[inline(always)]
    fn identity(self) -> f64 {
        0.0
    }
    #[inline(always)]
    fn lift(self, x: T, (): ()) -> f64 {
        x.acc().to_f64()
    }
    #[inline(always)]
    fn merge(self, a: f64, b: f64) -> f64 {
        a + b
    }
    #[inline(always)]
    fn finish(self, acc: f64) -> T {
        T::from_acc(Num::from_f64(acc))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{small, values};

    fn naive(x: &Array, dim: usize, reverse: bool) -> Vec<f64> {
        let (n, inner) = (x.dims()[dim], x.dims()[dim + 1..].iter().product::<usize>());
        let mut out = values(x);
        for start in (0..out.len()).filter(|at| at / inner % n == 0) {
            for i in 1..n {
                let (i, before) = if reverse { (n - 1 - i, n - i) } else { (i, i - 1) };
                out[start + i * inner] += out[start + before * inner];
            }
        }
        out
    }

    #[test]
    fn sums_run_along_any_dim_both_ways() {
        for dtype in DType::ALL {
            for shape in
                [[1, 1, 1], [2, 3, 5], [9, 1, 17], [3, 20, 2], [2, 8, 33], [1, 3, 1100], [0, 2, 3], [2, 0, 3]]
            {
                // Every dtype holds these sums exactly, except half precision for the longest rows.
                if shape[2] > 100 && dtype.size() == 2 {
                    continue;
                }
                let x = small(dtype, &shape);
                let transposed = x.transpose(0, 2).unwrap();
                for x in [&x, &transposed] {
                    for (dim, reverse) in
                        [(0, false), (0, true), (1, false), (1, true), (2, false), (2, true)]
                    {
                        let y = cumsum(x, dim, reverse).unwrap();
                        assert_eq!(y.dims(), x.dims());
                        assert_eq!(values(&y), naive(x, dim, reverse), "{x:?} {dim} {reverse}");
                        assert_eq!(y.dtype(), if dtype == DType::U8 { DType::I64 } else { dtype });
                    }
                }
            }
        }
        assert_eq!(values(&cumsum(&small(DType::F32, &[]), 0, false).unwrap()), [0.0]);
    }

    #[test]
    fn long_sums_are_accurate_and_nan_propagates() {
        let x = Array::from_vec(vec![0.1f32; 1_000_000], &[1_000_000]).unwrap();
        let y = values(&cumsum(&x, 0, false).unwrap());
        assert!((y[999_999] / 1e5 - 1.0).abs() < 1e-6);
        let x = Array::from_vec(vec![1.0f32, f32::INFINITY, f32::NAN, 1.0], &[4]).unwrap();
        let y = values(&cumsum(&x, 0, false).unwrap());
        assert!(y[0] == 1.0 && y[1] == f64::INFINITY && y[2].is_nan() && y[3].is_nan());
    }
}
