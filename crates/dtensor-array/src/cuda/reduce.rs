//! Sums, means, products, extrema and norms over any set of dims.

use super::fold::{self, Kernels, count, folded_shape, kernels};
use super::kernel::{ALL, FLOATS, file, units};
use super::stream_of;
use crate::host::reduce::Reduce;
use crate::{Array, DType, Error, Result};

units! {
    static REDUCE: "reduce", [file!("fold.cuh"), file!("reduce.cuh")], ALL;
    static NORM: "vector_norm", [file!("fold.cuh"), file!("vector_norm.cuh")], FLOATS;
}

pub(crate) fn reduce(f: Reduce, x: &Array, dims: &[usize], keepdim: bool) -> Result<Array> {
    let dtype = x.dtype();
    if f == Reduce::Mean {
        check_float("mean", dtype)?;
    }
    let (kernels, out) = match f {
        Reduce::Sum | Reduce::Mean => (kernels!("sum"), wide(dtype)),
        Reduce::Prod => (kernels!("prod"), wide(dtype)),
        Reduce::Max => (kernels!("max"), dtype),
        Reduce::Min => (kernels!("min"), dtype),
    };
    // A negative divisor counts as none.
    let divisor = if f == Reduce::Mean { count(x, dims) as f64 } else { -1.0 };
    let stream = stream_of(x)?;
    let out = stream.empty(out, &folded_shape(x, dims, keepdim))?;
    fold::fold(stream, &REDUCE, &kernels, x, dims, &out, None, [divisor, 0.0])?;
    Ok(out)
}

/// Returns the dtype of sums and products.
fn wide(dtype: DType) -> DType {
    if dtype == DType::U8 { DType::I64 } else { dtype }
}

/// Returns an error unless the dtype is a floating-point one.
pub(super) fn check_float(op: &'static str, dtype: DType) -> Result<()> {
    match dtype.is_float() {
        true => Ok(()),
        false => Err(Error::DType { op, dtype, why: "it needs a floating-point dtype" }),
    }
}

/// Returns the dtype that values of a floating-point dtype are computed in.
pub(super) fn accumulation(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Sums all elements of a floating-point array, without rounding the sum to its dtype.
pub(super) fn total(x: &Array) -> Result<Array> {
    let stream = stream_of(x)?;
    let out = stream.empty(accumulation(x.dtype()), &[])?;
    let dims: Vec<usize> = (0..x.dims().len()).collect();
    fold::fold(stream, &REDUCE, &kernels!("total"), x, &dims, &out, None, [0.0; 2])?;
    Ok(out)
}

pub(crate) fn norm(x: &Array, p: f64, dims: &[usize], keepdim: bool) -> Result<Array> {
    check_float("norm", x.dtype())?;
    let kernels: Kernels = match p {
        1.0 => kernels!("magnitudes"),
        2.0 => kernels!("squares"),
        f64::INFINITY => kernels!("largest"),
        f64::NEG_INFINITY => kernels!("smallest"),
        _ => kernels!("powers"),
    };
    let stream = stream_of(x)?;
    let out = stream.empty(x.dtype(), &folded_shape(x, dims, keepdim))?;
    fold::fold(stream, &NORM, &kernels, x, dims, &out, None, [p, 0.0])?;
    Ok(out)
}

pub(crate) fn merge_norm(parts: &Array, p: f64) -> Result<Array> {
    // The 0-norm is a count, so the counts of the shards are summed.
    if p == 0.0 { reduce(Reduce::Sum, parts, &[0], false) } else { norm(parts, p, &[0], false) }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::super::testing::{compare, numbers, rounding, same_error};
    use super::*;
    use crate::host::testing::{local, small};
    use crate::kernels;

    const FUNCTIONS: [Reduce; 5] = [Reduce::Sum, Reduce::Mean, Reduce::Max, Reduce::Min, Reduce::Prod];

    /// Compares all reductions of `dims` of a view of `x`.
    fn check(x: &Array, dims: &[usize], view: impl Fn(&Array) -> Result<Array>) {
        for f in FUNCTIONS {
            if f == Reduce::Mean && x.dtype().is_int() {
                continue;
            }
            // Sums of small integers are exact, if they are not too large for the dtype.
            let is_exact = f != Reduce::Mean && f != Reduce::Prod;
            let tolerance = if is_exact { 0.0 } else { 2.0 * rounding(x.dtype()) };
            for keepdim in [false, true] {
                compare(from_ref(x), tolerance, |x| {
                    Ok(vec![kernels::reduce::reduce(f, &view(&x[0])?, dims, keepdim)?])
                });
            }
        }
    }

    #[test]
    fn any_dims_of_any_layout() {
        for dtype in DType::ALL {
            for shape in [[2, 3, 4, 8], [1, 7, 2, 3], [3, 1, 16, 5], [0, 2, 3, 2], [2, 3, 0, 2]] {
                let x = small(dtype, &shape);
                for set in [0, 1, 2, 4, 8, 5, 10, 12, 3, 9, 15] {
                    let dims: Vec<usize> = (0..4).filter(|d| set >> d & 1 == 1).collect();
                    check(&x, &dims, |x| Ok(x.clone()));
                    check(&x, &dims, |x| x.permute(&[2, 0, 3, 1]));
                    if !shape.contains(&0) {
                        check(&x, &dims, |x| x.narrow(3, shape[3] - 1, 1));
                        check(&x, &dims, |x| {
                            x.narrow(1, shape[1] / 2, 1)?.narrow(3, 1, 1)?.expand(&[shape[0], 3, shape[2], 4])
                        });
                    }
                }
            }
            check(&small(dtype, &[]), &[0], |x| Ok(x.clone()));
            check(&small(dtype, &[0]), &[0], |x| Ok(x.clone()));
        }
    }

    #[test]
    fn long_and_wide_arrays() {
        for dtype in [DType::F32, DType::F16, DType::U8, DType::F64] {
            for shape in [
                [1, 40_000],
                [300, 136],
                [2000, 3],
                [3, 5000],
                [9, 4097],
                [2500, 65],
                [70_000, 1],
                [17, 2048],
            ] {
                let n = shape[0] * shape[1];
                // Sums stay below 2¹¹, so that they are exact in half precision.
                let data: Vec<f64> = (0..n)
                    .map(|i| f64::from(u8::from(i % 97 == 5)) + f64::from(u8::from(i % 101 == 7)))
                    .collect();
                let x = local(dtype, &data, &shape);
                for f in [Reduce::Sum, Reduce::Max, Reduce::Min] {
                    for dims in [&[0][..], &[1], &[0, 1]] {
                        compare(from_ref(&x), 0.0, |x| {
                            let turned = x[0].transpose(0, 1)?;
                            Ok(vec![
                                kernels::reduce::reduce(f, &x[0], dims, false)?,
                                kernels::reduce::reduce(f, &turned, dims, true)?,
                            ])
                        });
                    }
                }
            }
        }
    }

    #[test]
    fn sums_are_accurate() {
        for (shape, dims) in [([1_000_000, 1], 0), ([250_000, 4], 0), ([2, 500_000], 1)] {
            let x = Array::from_vec(vec![0.1f32; 1_000_000], &shape).unwrap();
            compare(&[x], 1e-6, |x| Ok(vec![kernels::reduce::reduce(Reduce::Mean, &x[0], &[dims], false)?]));
        }
    }

    #[test]
    fn nan_wins_and_zeros_have_an_order() {
        for n in [1, 5, 64, 3000] {
            for at in [0, n / 2, n - 1] {
                let data: Vec<f32> =
                    (0..3 * n).map(|i| if i % n == at { f32::NAN } else { i as f32 }).collect();
                let zeros: Vec<f32> = (0..3 * n).map(|i| if i % n == at { 0.0 } else { -0.0 }).collect();
                for data in [data, zeros.clone(), zeros.iter().map(|x| -x).collect()] {
                    let x = Array::from_vec(data, &[3, n]).unwrap();
                    for f in [Reduce::Max, Reduce::Min] {
                        compare(from_ref(&x), 0.0, |x| {
                            let turned = x[0].transpose(0, 1)?.contiguous()?;
                            Ok(vec![
                                kernels::reduce::reduce(f, &x[0], &[1], false)?,
                                kernels::reduce::reduce(f, &turned, &[0], false)?,
                            ])
                        });
                    }
                }
            }
        }
    }

    #[test]
    fn integers_wrap_and_their_means_are_errors() {
        let x = Array::from_vec(vec![i64::MAX, 2, 3, i64::MIN, -1, 5], &[2, 3]).unwrap();
        check(&x, &[0], |x| Ok(x.clone()));
        check(&x, &[1], |x| Ok(x.clone()));
        same_error(from_ref(&x), |x| kernels::reduce::reduce(Reduce::Mean, &x[0], &[0], false));
        same_error(&[x], |x| kernels::reduce::norm(&x[0], 2.0, &[0], false));
    }

    #[test]
    fn norms() {
        for dtype in FLOATS {
            for p in [0.0, 1.0, 2.0, 3.0, 0.5, -1.5, f64::INFINITY, f64::NEG_INFINITY] {
                let x = numbers(2 * 35 * 3, *dtype, 3);
                for dims in [&[0][..], &[1], &[2], &[0, 2], &[0, 1, 2]] {
                    // Half precision is rounded from `f64` once or twice.
                    compare(from_ref(&x), 2.0 * rounding(*dtype), |x| {
                        let x = x[0].reshape(&[2, 35, 3])?;
                        Ok(vec![
                            kernels::reduce::norm(&x, p, dims, false)?,
                            kernels::reduce::norm(&x.transpose(0, 2)?, p, dims, true)?,
                            kernels::reduce::norm(&x.narrow(1, 3, 0)?, p, dims, true)?,
                        ])
                    });
                }
                compare(&[x], 4.0 * rounding(*dtype), |x| {
                    Ok(vec![kernels::reduce::merge_norm(&x[0].reshape(&[7, 30])?, p)?])
                });
            }
        }
        let special =
            Array::from_vec(vec![3e30f32, -4e30, 1.0, f32::NAN, f32::INFINITY, 0.0], &[3, 2]).unwrap();
        for p in [1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY] {
            compare(from_ref(&special), 1e-6, |x| Ok(vec![kernels::reduce::norm(&x[0], p, &[1], false)?]));
        }
    }
}
