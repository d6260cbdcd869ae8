//! Layer norm and RMS norm of rows, and their gradients.
//!
//! If the mean is large compared to the deviation, its rounding error matters. Therefore the mean is stored as a sum of two numbers
//! and subtracted in two steps. In the forward pass these are the row's first element and the mean difference from it, in the
//! backward pass the rounded mean and its rounding error. The differences from the first element are usually small enough to
//! compute mean and variance in one pass. If they are not, a second pass computes the variance.

use std::mem::MaybeUninit;

use super::binary::{Binary, binary};
use super::cast::cast;
use super::rows::{sum_of, sums};
use super::{fill_vec, simd};
use crate::{Array, Elem, Float, Num, Real, with_float};
use crate::{DType, Element, Result};

/// The number of rows in one partial sum of the parameter gradients.
const BLOCK_ROWS: usize = 64;

/// Normalises rows to mean 0 and variance 1, then applies weight and bias. A row is the last `dims` dims of `x`.
pub(crate) fn layer_norm(
    x: &Array,
    dims: usize,
    weight: Option<&Array>,
    bias: Option<&Array>,
    eps: f64,
) -> Result<(Array, Array, Array)> {
    with_float!("layer_norm", x.dtype(), T => forward::<T, true>(x, dims, weight, bias, eps))
}

/// Divides rows by their root mean square, then applies the weight. A row is the last `dims` dims of `x`.
pub(crate) fn rms_norm(x: &Array, dims: usize, weight: Option<&Array>, eps: f64) -> Result<(Array, Array)> {
    let (y, _, rstd) =
        with_float!("rms_norm", x.dtype(), T => forward::<T, false>(x, dims, weight, None, eps))?;
    Ok((y, rstd))
}

/// Computes the gradients of [`layer_norm`]: of `x`, and of the weight and the bias if `need_weight` and `need_bias` give
/// a dtype for them. `addend` is added to the gradient of `x`.
#[allow(clippy::too_many_arguments)]
pub(crate) fn layer_norm_backward(
    dy: &Array,
    addend: Option<&Array>,
    x: &Array,
    mean: &Array,
    rstd: &Array,
    weight: Option<&Array>,
    dims: usize,
    need_weight: Option<DType>,
    need_bias: Option<DType>,
) -> Result<(Array, Option<Array>, Option<Array>)> {
    let dy = &cast(dy, x.dtype())?;
    let (dx, dweight, dbias) = with_float!("layer_norm", x.dtype(), T =>
        backward::<T, true>(dy, x, Some(mean), rstd, weight, dims, need_weight, need_bias))?;
    Ok((add(dx, addend)?, dweight, dbias))
}

/// Computes the gradients of [`rms_norm`]: of `x`, and of the weight if `need_weight` gives a dtype for it.
pub(crate) fn rms_norm_backward(
    dy: &Array,
    addend: Option<&Array>,
    x: &Array,
    rstd: &Array,
    weight: Option<&Array>,
    dims: usize,
    need_weight: Option<DType>,
) -> Result<(Array, Option<Array>)> {
    let dy = &cast(dy, x.dtype())?;
    let (dx, dweight, _) = with_float!("rms_norm", x.dtype(), T =>
        backward::<T, false>(dy, x, None, rstd, weight, dims, need_weight, None))?;
    Ok((add(dx, addend)?, dweight))
}

fn add(x: Array, addend: Option<&Array>) -> Result<Array> {
    addend.map_or(Ok(x.clone()), |addend| binary(Binary::Add, &x, addend))
}

/// Returns the number of rows and the number of elements in each.
fn row_count(shape: &[usize], dims: usize) -> (usize, usize) {
    let (lead, row) = shape.split_at(shape.len() - dims);
    (lead.iter().product(), row.iter().product())
}

/// Returns a parameter in the accumulation dtype. A missing parameter becomes a constant one, so that one loop serves both cases.
fn widen_parameter<A: Real + Element>(
    parameter: Option<&Array>,
    size: usize,
    default: f64,
) -> Result<Vec<A>> {
    match parameter {
        None => Ok(vec![Num::from_f64(default); size]),
        Some(parameter) => cast(parameter, <A as Element>::DTYPE)?.copy_to_host(),
    }
}

fn forward<T: Float<Acc: Element> + Element, const CENTER: bool>(
    x: &Array,
    dims: usize,
    weight: Option<&Array>,
    bias: Option<&Array>,
    eps: f64,
) -> Result<(Array, Array, Array)> {
    let (rows, normalized) = row_count(x.dims(), dims);
    let x = x.contiguous()?;
    let read = x.read::<T>()?;
    let data = &read.data()[..x.numel()];
    let (weight, bias) = (widen_parameter(weight, normalized, 1.0)?, widen_parameter(bias, normalized, 0.0)?);
    let (mut means, mut rstds) = (vec![T::Acc::ZERO; rows], vec![T::Acc::ZERO; rows]);
    // SAFETY: `rows` rows of `normalized` elements cover the array, and each is written.
    let y = unsafe {
        fill_vec(data.len(), |out| {
            simd::<T, _>(
                #[inline(always)]
                || forward_rows::<T, CENTER>(data, &weight, &bias, eps, &mut means, &mut rstds, out),
            )
        })?
    };
    Ok((
        Array::from_vec::<T>(y, x.dims())?,
        Array::from_vec(means, &[rows])?,
        Array::from_vec(rstds, &[rows])?,
    ))
}

#[inline(always)]
fn forward_rows<T: Float, const CENTER: bool>(
    data: &[T],
    weight: &[T::Acc],
    bias: &[T::Acc],
    eps: f64,
    means: &mut [T::Acc],
    rstds: &mut [T::Acc],
    out: &mut [MaybeUninit<T>],
) {
    let n = weight.len();
    let count = T::Acc::from_f64(n as f64);
    for (row, (mean, rstd)) in means.iter_mut().zip(rstds).enumerate() {
        let (x, out) = (&data[row * n..][..n], &mut out[row * n..][..n]);
        let shift = if CENTER { x.first().map_or(T::Acc::ZERO, |x| x.acc()) } else { T::Acc::ZERO };
        let [sum, squares] = sums(
            x,
            x,
            x,
            #[inline(always)]
            |x, _, _| {
                let d = x.acc() - shift;
                [d, d * d]
            },
        );
        let rest = if CENTER { sum / count } else { T::Acc::ZERO };
        let mut variance = squares / count - rest * rest;
        // If the first element is far from the others, the difference above has lost precision, so compute it again.
        if CENTER && rest * rest > variance * T::Acc::from_f64(16.0) {
            let squares = sum_of(
                x,
                #[inline(always)]
                |x| {
                    let d = (x.acc() - shift) - rest;
                    d * d
                },
            );
            variance = squares / count;
        }
        *mean = shift + rest;
        *rstd = T::Acc::ONE / (variance + T::Acc::from_f64(eps)).sqrt();
        for (((out, x), &weight), &bias) in out.iter_mut().zip(x).zip(weight).zip(bias) {
            out.write(T::from_acc(((x.acc() - shift) - rest) * *rstd * weight + bias));
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn backward<T: Float<Acc: Element> + Element, const CENTER: bool>(
    dy: &Array,
    x: &Array,
    mean: Option<&Array>,
    rstd: &Array,
    weight: Option<&Array>,
    dims: usize,
    need_weight: Option<DType>,
    need_bias: Option<DType>,
) -> Result<(Array, Option<Array>, Option<Array>)> {
    let (rows, normalized) = row_count(x.dims(), dims);
    let (x, dy) = (x.contiguous()?, dy.contiguous()?);
    let (x_read, dy_read) = (x.read::<T>()?, dy.read::<T>()?);
    let weight = widen_parameter(weight, normalized, 1.0)?;
    let mean = mean.map_or_else(|| Ok(vec![T::Acc::ZERO; rows]), |mean| mean.copy_to_host())?;
    let rstd = rstd.copy_to_host()?;
    let rows = Rows {
        x: &x_read.data()[..x.numel()],
        dy: &dy_read.data()[..x.numel()],
        mean: &mean,
        rstd: &rstd,
        weight: &weight,
    };
    let (mut dweight, mut dbias) = (vec![0.0; normalized], vec![0.0; normalized]);
    // SAFETY: the rows cover the array, and each is written.
    let dx = unsafe {
        fill_vec(rows.x.len(), |out| {
            simd::<T, _>(
                #[inline(always)]
                || match (need_weight.is_some(), need_bias.is_some()) {
                    (false, false) => rows.backward::<CENTER, false, false>(&mut dweight, &mut dbias, out),
                    (true, false) => rows.backward::<CENTER, true, false>(&mut dweight, &mut dbias, out),
                    (_, true) => rows.backward::<CENTER, true, true>(&mut dweight, &mut dbias, out),
                },
            )
        })?
    };
    let narrow = |total: Vec<f64>, dtype: DType| cast(&Array::from_vec(total, &[normalized])?, dtype);
    Ok((
        Array::from_vec::<T>(dx, x.dims())?,
        need_weight.map(|dtype| narrow(dweight, dtype)).transpose()?,
        need_bias.map(|dtype| narrow(dbias, dtype)).transpose()?,
    ))
}

/// The inputs of the backward pass.
struct Rows<'a, T: Elem> {
    x: &'a [T],
    dy: &'a [T],
    mean: &'a [T::Acc],
    rstd: &'a [T::Acc],
    weight: &'a [T::Acc],
}

impl<T: Float> Rows<'_, T> {
    #[inline(always)]
    fn backward<const CENTER: bool, const WEIGHT: bool, const BIAS: bool>(
        &self,
        dweight: &mut [f64],
        dbias: &mut [f64],
        out: &mut [MaybeUninit<T>],
    ) {
        let n = self.weight.len();
        let count = T::Acc::from_f64(n as f64);
        let mut dweights = vec![T::Acc::ZERO; if WEIGHT { n } else { 0 }];
        let mut dbiases = vec![T::Acc::ZERO; if BIAS { n } else { 0 }];
        for (row, (&mean, &rstd)) in self.mean.iter().zip(self.rstd).enumerate() {
            let (x, dy, out) = (&self.x[row * n..][..n], &self.dy[row * n..][..n], &mut out[row * n..][..n]);
            // With g = dy·weight and x̂ the normalised row: dx = rstd·(g − mean(g) − x̂·mean(g·x̂)).
            let [rest, g_sum, g_d_sum] = sums(
                x,
                dy,
                self.weight,
                #[inline(always)]
                |x, dy, weight| {
                    let (d, g) = (x.acc() - mean, dy.acc() * weight);
                    [d, g, g * d]
                },
            );
            let (rest, g_mean) =
                if CENTER { (rest / count, g_sum / count) } else { (T::Acc::ZERO, T::Acc::ZERO) };
            let g_xhat_mean = (g_d_sum - rest * g_sum) * rstd / count;
            let one = Gradient { mean, rest, rstd, g_mean, g_xhat_mean };
            let rows = out.iter_mut().zip(x).zip(dy).zip(self.weight);
            if BIAS {
                for (((((out, &x), &dy), &weight), dweight), dbias) in
                    rows.zip(&mut dweights).zip(&mut dbiases)
                {
                    let (xhat, dx) = one.at(x, dy, weight);
                    *dweight = *dweight + dy.acc() * xhat;
                    *dbias = *dbias + dy.acc();
                    out.write(dx);
                }
            } else if WEIGHT {
                for ((((out, &x), &dy), &weight), dweight) in rows.zip(&mut dweights) {
                    let (xhat, dx) = one.at(x, dy, weight);
                    *dweight = *dweight + dy.acc() * xhat;
                    out.write(dx);
                }
            } else {
                for (((out, &x), &dy), &weight) in rows {
                    out.write(one.at(x, dy, weight).1);
                }
            }
            if (row + 1) % BLOCK_ROWS == 0 || row + 1 == self.mean.len() {
                flush(&mut dweights, dweight);
                flush(&mut dbiases, dbias);
            }
        }
    }
}

/// The values of a row that its gradient needs. The mean is `mean + rest`.
#[derive(Clone, Copy)]
struct Gradient<A> {
    mean: A,
    rest: A,
    rstd: A,
    g_mean: A,
    g_xhat_mean: A,
}

impl<A: Real> Gradient<A> {
    /// Returns the normalised element, and the gradient of `x`.
    #[inline(always)]
    fn at<T: Float<Acc = A>>(&self, x: T, dy: T, weight: A) -> (A, T) {
        let xhat = ((x.acc() - self.mean) - self.rest) * self.rstd;
        (xhat, T::from_acc(self.rstd * (dy.acc() * weight - self.g_mean - xhat * self.g_xhat_mean)))
    }
}

/// Adds partial sums to the totals and clears them. The totals are `f64`, so that any number of blocks can be added.
#[inline(always)]
fn flush<A: Num>(parts: &mut [A], totals: &mut [f64]) {
    for (part, total) in parts.iter_mut().zip(totals) {
        *total += part.to_f64();
        *part = A::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{FLOATS, assert_close, local, noise, strided, tolerance, values};
    use super::*;
    use crate::DType;

    const EPS: f64 = 1e-5;

    struct Reference {
        y: Vec<f64>,
        mean: Vec<f64>,
        rstd: Vec<f64>,
        dx: Vec<f64>,
        dw: Vec<f64>,
        db: Vec<f64>,
    }

    fn naive(x: &[f64], dy: &[f64], w: &[f64], b: &[f64], center: bool) -> Reference {
        let n = w.len();
        let mut r = Reference {
            y: vec![],
            mean: vec![],
            rstd: vec![],
            dx: vec![],
            dw: vec![0.0; n],
            db: vec![0.0; n],
        };
        for (x, dy) in x.chunks(n).zip(dy.chunks(n)) {
            let mean = if center { x.iter().sum::<f64>() / n as f64 } else { 0.0 };
            let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
            let rstd = 1.0 / (var + EPS).sqrt();
            let xhat: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
            let g: Vec<f64> = dy.iter().zip(w).map(|(dy, w)| dy * w).collect();
            let g_mean = if center { g.iter().sum::<f64>() / n as f64 } else { 0.0 };
            let gx_mean = g.iter().zip(&xhat).map(|(g, x)| g * x).sum::<f64>() / n as f64;
            for j in 0..n {
                r.y.push(xhat[j] * w[j] + b[j]);
                r.dx.push(rstd * (g[j] - g_mean - xhat[j] * gx_mean));
                r.dw[j] += dy[j] * xhat[j];
                r.db[j] += dy[j];
            }
            r.mean.push(mean);
            r.rstd.push(rstd);
        }
        r
    }

    #[test]
    fn norms_and_gradients_agree_with_the_formula() {
        for dtype in FLOATS {
            for shape in [[1, 1], [3, 7], [5, 64], [130, 33], [2, 5000], [0, 4]] {
                let (rows, n) = (shape[0], shape[1]);
                let make = |len, seed, shape: &[usize]| {
                    let x = local(dtype, &noise(len, seed), shape);
                    let values = values(&x);
                    (x, values)
                };
                let (x, xs) = make(rows * n, 1, &shape);
                let (dy, dys) = make(rows * n, 2, &shape);
                let (w, ws) = make(n, 3, &[n]);
                let (b, bs) = make(n, 4, &[n]);
                let tol = tolerance(dtype) * 4.0;
                for (weight, bias) in [(Some(&w), Some(&b)), (Some(&w), None), (None, None)] {
                    let ws = weight.map_or(vec![1.0; n], |_| ws.clone());
                    let bs = bias.map_or(vec![0.0; n], |_| bs.clone());
                    let want = naive(&xs, &dys, &ws, &bs, true);
                    let rms = naive(&xs, &dys, &ws, &vec![0.0; n], false);
                    for (x, dy) in [(x.clone(), dy.clone()), (strided(&x), strided(&dy))] {
                        let (y, mean, rstd) = layer_norm(&x, 1, weight, bias, EPS).unwrap();
                        assert_close(&y, &want.y, tol);
                        assert_close(&mean, &want.mean, 1e-5);
                        assert_close(&rstd, &want.rstd, 1e-4);
                        assert_eq!(mean.dtype(), if dtype == DType::F64 { dtype } else { DType::F32 });
                        let (dx, dw, db) = layer_norm_backward(
                            &dy,
                            None,
                            &x,
                            &mean,
                            &rstd,
                            weight,
                            1,
                            Some(dtype),
                            Some(dtype),
                        )
                        .unwrap();
                        // A row with one element is constant, so only eps determines its deviation.
                        let tol = if n == 1 { tol * 400.0 } else { tol };
                        assert_close(&dx, &want.dx, tol);
                        assert_close(&dw.unwrap(), &want.dw, tol);
                        assert_close(&db.unwrap(), &want.db, tol);
                        let (dx, dw, db) =
                            layer_norm_backward(&dy, None, &x, &mean, &rstd, weight, 1, None, None).unwrap();
                        assert_close(&dx, &want.dx, tol);
                        assert!(dw.is_none() && db.is_none());
                        let (_, dw, db) =
                            layer_norm_backward(&dy, None, &x, &mean, &rstd, weight, 1, None, Some(dtype))
                                .unwrap();
                        assert!(dw.is_none());
                        assert_close(&db.unwrap(), &want.db, tol);

                        let (y, rstd) = rms_norm(&x, 1, weight, EPS).unwrap();
                        assert_close(&y, &rms.y, tol);
                        let (dx, dw) =
                            rms_norm_backward(&dy, None, &x, &rstd, weight, 1, Some(dtype)).unwrap();
                        assert_close(&dx, &rms.dx, tol);
                        assert_close(&dw.unwrap(), &rms.dw, tol);
                        assert!(
                            rms_norm_backward(&dy, None, &x, &rstd, weight, 1, None).unwrap().1.is_none()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn parameters_may_have_other_dtypes() {
        let (rows, n) = (130, 33);
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let (x, dy) = (
                local(dtype, &noise(rows * n, 1), &[rows, n]),
                local(dtype, &noise(rows * n, 2), &[rows, n]),
            );
            for of in [DType::BF16, DType::F16, DType::F32] {
                let (w, b) = (local(of, &noise(n, 3), &[n]), local(of, &noise(n, 4), &[n]));
                let want = naive(&values(&x), &values(&dy), &values(&w), &values(&b), true);
                let (y, mean, rstd) = layer_norm(&x, 1, Some(&w), Some(&b), EPS).unwrap();
                assert_eq!(y.dtype(), dtype);
                assert_close(&y, &want.y, tolerance(dtype) * 4.0);
                let needs = (Some(of), Some(DType::F32));
                let (dx, dw, db) =
                    layer_norm_backward(&dy, None, &x, &mean, &rstd, Some(&w), 1, needs.0, needs.1).unwrap();
                let (dw, db) = (dw.unwrap(), db.unwrap());
                assert_eq!((dx.dtype(), dw.dtype(), db.dtype()), (dtype, of, DType::F32));
                assert_close(&dx, &want.dx, tolerance(dtype) * 4.0);
                assert_close(&dw, &want.dw, tolerance(of) * 4.0);
                // The gradient is not rounded to the dtype of x in between.
                assert_close(&db, &want.db, tolerance(DType::F32) * 4.0);
            }
        }
    }

    #[test]
    fn a_large_mean_costs_no_accuracy() {
        let x: Vec<f64> = noise(2 * 3000, 5).iter().map(|x| (1e4 + x) as f32 as f64).collect();
        let dy: Vec<f64> = noise(2 * 3000, 6).iter().map(|&x| x as f32 as f64).collect();
        let want = naive(&x, &dy, &[1.0; 3000], &[0.0; 3000], true);
        let (x, dy) = (local(DType::F32, &x, &[2, 3000]), local(DType::F32, &dy, &[2, 3000]));
        let (y, mean, rstd) = layer_norm(&x, 1, None, None, EPS).unwrap();
        assert_close(&y, &want.y, 1e-5);
        let (dx, dw, _) =
            layer_norm_backward(&dy, None, &x, &mean, &rstd, None, 1, Some(DType::F32), None).unwrap();
        assert_close(&dx, &want.dx, 1e-5);
        assert_close(&dw.unwrap(), &want.dw, 1e-5);
    }

    #[test]
    fn a_first_element_far_from_the_others_costs_no_accuracy() {
        for first in [1e3, 1e6] {
            let mut x: Vec<f64> = noise(3000, 5).iter().map(|&x| x as f32 as f64).collect();
            x[0] = first;
            let want = naive(&x, &x, &[1.0; 3000], &[0.0; 3000], true);
            let (y, _, rstd) = layer_norm(&local(DType::F32, &x, &[1, 3000]), 1, None, None, EPS).unwrap();
            assert_close(&y, &want.y, 1e-5);
            assert!((values(&rstd)[0] / want.rstd[0] - 1.0).abs() < 1e-5);
        }
    }

    #[test]
    fn gradients_of_many_rows_are_accurate() {
        let rows = 100_000;
        let dy = local(DType::F32, &vec![0.1; rows * 2], &[rows, 2]);
        let x = local(DType::F32, &[1.0, -1.0].repeat(rows), &[rows, 2]);
        let (_, mean, rstd) = layer_norm(&x, 1, None, None, 0.0).unwrap();
        let (_, dw, db) =
            layer_norm_backward(&dy, None, &x, &mean, &rstd, None, 1, Some(DType::F32), Some(DType::F32))
                .unwrap();
        assert_close(&dw.unwrap(), &[1e4, -1e4], 1e-6);
        assert_close(&db.unwrap(), &[1e4, 1e4], 1e-6);
    }

    #[test]
    fn nan_and_infinity_affect_only_their_row() {
        let x = local(DType::F32, &[f64::NAN, 0.0, 1.0, -1.0, f64::INFINITY, 2.0], &[3, 2]);
        let y = values(&layer_norm(&x, 1, None, None, 0.0).unwrap().0);
        assert!(y[0].is_nan() && y[1].is_nan() && y[4].is_nan() && y[5].is_nan());
        assert_eq!(y[2..4], [1.0, -1.0]);
    }

    #[test]
    fn empty_rows_are_counted() {
        // The number of elements does not determine the number of rows, so `dims` must.
        for (shape, dims, rows) in
            [(&[3, 0][..], 1, 3), (&[3, 0], 2, 1), (&[2, 3, 0], 2, 2), (&[2, 0, 3], 1, 0), (&[2, 0, 3], 2, 2)]
        {
            let x = local(DType::F32, &[], shape);
            let (y, mean, rstd) = layer_norm(&x, dims, None, None, EPS).unwrap();
            assert_eq!((y.dims(), mean.dims(), rstd.dims()), (shape, &[rows][..], &[rows][..]));
            let (dx, dw, _) = layer_norm_backward(
                &x,
                None,
                &x,
                &mean,
                &rstd,
                None,
                dims,
                Some(DType::F32),
                Some(DType::F32),
            )
            .unwrap();
            let row = shape[shape.len() - dims..].iter().product::<usize>();
            assert_eq!((dx.dims(), dw.unwrap().dims()), (shape, &[row][..]));
        }
    }
}
