//! Arithmetic between an array and numbers.

use super::binary::POWER;
use super::kernel::{ALL, file, units};
use super::map::{Function, broadcast};
use super::unary::unary;
use super::{Unit, stream_of};
use crate::host::unary::Unary;
use crate::{Array, DType, Error, Result};

units! {
    static SCALAR: "scalar", [file!("map.cuh"), file!("pointwise.cuh"), file!("scalar.cuh")], ALL;
}

/// Returns a number in the type that kernels for a dtype compute in, as bits: `Number` in `kernels/pointwise.cuh`.
pub(super) fn number(dtype: DType, x: f64) -> u64 {
    match dtype {
        DType::U8 | DType::I64 => (x as i64) as u64,
        DType::F16 | DType::BF16 | DType::F32 => u64::from((x as f32).to_bits()),
        DType::F64 => x.to_bits(),
    }
}

/// Runs a kernel with two numbers.
fn run(unit: &'static Unit, name: &'static str, x: &Array, [a, b]: [u64; 2]) -> Result<Array> {
    let function = Function { unit, dtype: x.dtype(), name };
    stream_of(x)?.pointwise(function, (x.dtype(), x.shape().clone()), [x], [a, b, 0, 0, 0])
}

pub(crate) fn affine(x: &Array, mul: f64, add: f64) -> Result<Array> {
    // A step that changes nothing is left out, because adding +0 would turn −0 into +0.
    let name = match (mul, add) {
        (_, 0.0) => "scale",
        (1.0, _) => "shift",
        _ => "affine",
    };
    run(&SCALAR, name, x, [mul, add].map(|value| number(x.dtype(), value)))
}

pub(crate) fn pow_scalar(x: &Array, e: f64) -> Result<Array> {
    if x.dtype().is_int() && !(e >= 0.0 && e.fract() == 0.0) {
        let why = format!("integers to the power {e} are not integers; cast to a floating-point dtype first");
        return Err(Error::argument("pow", why));
    }
    let name = match e {
        1.0 => return Ok(x.clone()),
        0.5 => return unary(Unary::Sqrt, x),
        -0.5 => return unary(Unary::Rsqrt, x),
        -1.0 => return unary(Unary::Recip, x),
        -2.0 => "inverse_square",
        0.0 => "unit",
        2.0 => "square",
        3.0 => "cube",
        _ => "pow_scalar",
    };
    let unit = if name == "pow_scalar" { &POWER } else { &SCALAR };
    run(unit, name, x, [number(x.dtype(), e), 0])
}

/// Returns the bounds as numbers. A missing bound becomes one that no element exceeds.
fn bounds(dtype: DType, lo: Option<f64>, hi: Option<f64>) -> [u64; 2] {
    // As an integer, an infinity is the smallest or the largest one.
    [number(dtype, lo.unwrap_or(f64::NEG_INFINITY)), number(dtype, hi.unwrap_or(f64::INFINITY))]
}

pub(crate) fn clamp(x: &Array, lo: Option<f64>, hi: Option<f64>) -> Result<Array> {
    run(&SCALAR, "clamp", x, bounds(x.dtype(), lo, hi))
}

pub(crate) fn clamp_grad(x: &Array, lo: Option<f64>, hi: Option<f64>, dy: &Array) -> Result<Array> {
    let (left, right) = (x.dtype(), dy.dtype());
    if left != right {
        return Err(Error::DTypeMismatch { op: "clamp", left, right });
    }
    if left.is_int() {
        return Err(Error::DType { op: "clamp", dtype: left, why: "it needs a floating-point dtype" });
    }
    let [low, high] = bounds(left, lo, hi);
    let missing = u64::from(lo.is_none()) | u64::from(hi.is_none()) << 1;
    let function = Function { unit: &SCALAR, dtype: left, name: "clamp_grad" };
    stream_of(x)?.pointwise(function, (left, broadcast(&[x, dy])), [x, dy], [low, high, missing, 0, 0])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, rounding};
    use super::*;
    use crate::Device;
    use crate::host::testing::local;
    use crate::kernels::scalar as kernels;

    fn views(x: &Array) -> Result<Vec<Array>> {
        let n = x.numel() / 5;
        let matrix = x.reshape(&[5, n])?;
        Ok(vec![x.clone(), matrix.transpose(0, 1)?, matrix.narrow(1, 0, n.min(3))?, x.narrow(0, 0, 0)?])
    }

    #[test]
    fn every_dtype_and_view() {
        for dtype in DType::ALL {
            for n in [5, 320, 20_005] {
                compare(&[numbers(n, dtype, 1)], 0.0, |x| {
                    let mut all = vec![];
                    for x in views(&x[0])? {
                        for (mul, add) in [(3.0, 2.0), (3.0, 0.0), (1.0, 2.0), (-1.0, 1e30), (1.0, 0.0)] {
                            all.push(kernels::affine(&x, mul, add)?);
                        }
                        for e in [0.0, 1.0, 2.0, 3.0] {
                            all.push(kernels::pow_scalar(&x, e)?);
                        }
                        for lo in [None, Some(-1.0), Some(2.0)] {
                            for hi in [None, Some(1.0), Some(2.0)] {
                                all.push(kernels::clamp(&x, lo, hi)?);
                                if dtype.is_float() {
                                    all.push(kernels::clamp_grad(&x, lo, hi, &x)?);
                                }
                            }
                        }
                    }
                    Ok(all)
                });
            }
            let tolerance = if dtype.is_int() { 0.0 } else { 4.0 * rounding(dtype) };
            compare(&[numbers(300, dtype, 2)], tolerance, |x| {
                let powers: &[f64] = if dtype.is_int() {
                    &[5.0, 64.0]
                } else {
                    &[5.0, 64.0, -1.0, -2.0, 0.5, -0.5, 1.5, -3.0]
                };
                powers.iter().map(|&e| kernels::pow_scalar(&x[0], e)).collect()
            });
        }
    }

    #[test]
    fn special_values() {
        let inf = f64::INFINITY;
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let x = local(dtype, &[f64::NAN, inf, -inf, -0.0, 0.0], &[5]);
            compare(&[x], 0.0, |x| {
                let x = &x[0];
                Ok(vec![
                    kernels::affine(x, 1.0, 0.0)?,
                    kernels::affine(x, 0.0, 1.0)?,
                    kernels::clamp(x, None, None)?,
                    kernels::clamp(x, Some(f64::NAN), Some(1.0))?,
                    kernels::clamp_grad(x, None, Some(1.0), x)?,
                    kernels::clamp_grad(x, Some(-inf), Some(inf), x)?,
                    kernels::pow_scalar(x, 2.0)?,
                    kernels::pow_scalar(x, 0.0)?,
                ])
            });
        }
        let x = Array::from_vec(vec![i64::MAX, i64::MIN], &[2]).unwrap();
        compare(&[x], 0.0, |x| {
            Ok(vec![
                kernels::affine(&x[0], 1.0, 1.0)?,
                kernels::affine(&x[0], 2.0, 0.0)?,
                kernels::clamp(&x[0], None, None)?,
                kernels::clamp(&x[0], Some(1e300), None)?,
            ])
        });
    }

    #[test]
    fn unsupported_arguments_are_errors() {
        let x = numbers(3, DType::I64, 1).to_device(Device::Cuda(0)).unwrap();
        let y = numbers(3, DType::F32, 1).to_device(Device::Cuda(0)).unwrap();
        assert!(pow_scalar(&x, -1.0).is_err() && pow_scalar(&x, f64::NAN).is_err());
        assert!(matches!(clamp_grad(&x, None, None, &x), Err(Error::DType { .. })));
        assert!(matches!(clamp_grad(&x, None, None, &y), Err(Error::DTypeMismatch { .. })));
    }
}
