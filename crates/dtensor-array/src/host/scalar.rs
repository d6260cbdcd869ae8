//! Arithmetic between an array and a number. The number is rounded to the accumulation type. For integer arrays it must be an
//! integer.

use super::binary::Power;
use super::formula;
use super::nest::{map, zip};
use super::unary::{Unary, unary};
use crate::{Array, Elem, Num, with_elem, with_float};
use crate::{Error, Result};

/// Computes `x · mul + add`. The product is rounded before the sum, so that the kernel gives exactly the result of a
/// separate product or sum.
pub(crate) fn affine(x: &Array, mul: f64, add: f64) -> Result<Array> {
    with_elem!(x.dtype(), T => {
        let (m, a) = (<T as Elem>::Acc::from_f64(mul), <T as Elem>::Acc::from_f64(add));
        // A step that changes nothing is left out, because adding +0 would turn −0 into +0.
        if add == 0.0 {
            map::<T>(x, move |x| x * m)
        } else if mul == 1.0 {
            map::<T>(x, move |x| x + a)
        } else {
            map::<T>(x, move |x| x * m + a)
        }
    })
}

/// Computes `x` to the power `e`. Integers wrap, and need an exponent that is a non-negative integer.
pub(crate) fn pow_scalar(x: &Array, e: f64) -> Result<Array> {
    if x.dtype().is_int() && !(e >= 0.0 && e.fract() == 0.0) {
        let why = format!("integers to the power {e} are not integers; cast to a floating-point dtype first");
        return Err(Error::argument("pow", why));
    }
    if e == 1.0 {
        return Ok(x.clone());
    } else if e == 0.5 {
        return unary(Unary::Sqrt, x);
    } else if e == -0.5 {
        return unary(Unary::Rsqrt, x);
    } else if e == -1.0 {
        return unary(Unary::Recip, x);
    } else if e == -2.0 {
        return with_float!("pow", x.dtype(), T => map::<T>(x, formula::inverse_square));
    }
    with_elem!(x.dtype(), T => {
        if e == 0.0 {
            map::<T>(x, formula::unit)
        } else if e == 2.0 {
            map::<T>(x, formula::square)
        } else if e == 3.0 {
            map::<T>(x, formula::cube)
        } else {
            let e = <T as Elem>::Acc::from_f64(e);
            map::<T>(x, move |x| x.power(e))
        }
    })
}

/// Returns the bounds in the accumulation type. A missing bound becomes one that no element exceeds.
fn bounds<A: Num>(lo: Option<f64>, hi: Option<f64>) -> (A, A) {
    (lo.map_or(A::LOWEST, A::from_f64), hi.map_or(A::HIGHEST, A::from_f64))
}

/// Clamps each element to `lo..=hi`. NaN stays NaN. If `lo` is above `hi`, the result is `hi`.
pub(crate) fn clamp(x: &Array, lo: Option<f64>, hi: Option<f64>) -> Result<Array> {
    with_elem!(x.dtype(), T => {
        let (lo, hi) = bounds::<<T as Elem>::Acc>(lo, hi);
        map::<T>(x, move |x| {
            let x = if x < lo { lo } else { x };
            if x > hi { hi } else { x }
        })
    })
}

/// Computes the gradient of [`clamp`]: `dy` where `x` is strictly between `lo` and `hi`, else 0.
pub(crate) fn clamp_grad(x: &Array, lo: Option<f64>, hi: Option<f64>, dy: &Array) -> Result<Array> {
    let (left, right) = (x.dtype(), dy.dtype());
    if left != right {
        return Err(Error::DTypeMismatch { op: "clamp", left, right });
    }
    with_float!("clamp", left, T => {
        // An infinite element is inside if there is no bound on its side, but not strictly inside an infinite bound.
        let (no_lo, no_hi) = (lo.is_none(), hi.is_none());
        let (lo, hi) = bounds::<<T as Elem>::Acc>(lo, hi);
        zip::<T, T, _>(x, dy, move |x, dy| {
            if (no_lo | (x > lo)) & (no_hi | (x < hi)) { dy } else { <T as Elem>::Acc::ZERO }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::cast::cast;
    use super::*;
    use crate::DType;

    fn local(x: &[f64], dtype: DType) -> Array {
        cast(&Array::from_vec(x.to_vec(), &[x.len()]).unwrap(), dtype).unwrap()
    }

    fn doubles(x: Result<Array>) -> Vec<f64> {
        cast(&x.unwrap(), DType::F64).unwrap().copy_to_host().unwrap()
    }

    #[test]
    fn every_dtype_is_supported() {
        for dtype in DType::ALL {
            let x = local(&[1.0, 2.0, 4.0, 3.0], dtype);
            assert_eq!(doubles(affine(&x, 3.0, 2.0)), [5.0, 8.0, 14.0, 11.0]);
            assert_eq!(doubles(affine(&x, 3.0, 0.0)), [3.0, 6.0, 12.0, 9.0]);
            assert_eq!(doubles(affine(&x, 1.0, 2.0)), [3.0, 4.0, 6.0, 5.0]);
            assert_eq!(doubles(clamp(&x, Some(2.0), Some(3.0))), [2.0, 2.0, 3.0, 3.0]);
            assert_eq!(doubles(clamp(&x, None, Some(2.0))), [1.0, 2.0, 2.0, 2.0]);
            assert_eq!(doubles(clamp(&x, Some(2.0), None)), [2.0, 2.0, 4.0, 3.0]);
            for (e, want) in [(0.0, 1.0), (1.0, 3.0), (2.0, 9.0), (3.0, 27.0), (5.0, 243.0)] {
                assert_eq!(doubles(pow_scalar(&x, e))[3], want);
            }
            if dtype.is_float() {
                assert_eq!(doubles(pow_scalar(&x, -1.0))[..3], [1.0, 0.5, 0.25]);
                assert_eq!(doubles(pow_scalar(&x, -2.0))[..3], [1.0, 0.25, 0.0625]);
                assert_eq!(doubles(pow_scalar(&x, 0.5))[2], 2.0);
                assert_eq!(doubles(pow_scalar(&x, -0.5))[2], 0.5);
                assert_eq!(doubles(pow_scalar(&x, 1.5))[2], 8.0);
                let dy = local(&[7.0; 4], dtype);
                assert_eq!(doubles(clamp_grad(&x, Some(1.0), Some(4.0), &dy)), [0.0, 7.0, 0.0, 7.0]);
                assert_eq!(doubles(clamp_grad(&x, None, Some(2.0), &dy)), [7.0, 0.0, 0.0, 0.0]);
            } else {
                assert!(pow_scalar(&x, -1.0).is_err() && pow_scalar(&x, 0.5).is_err());
                assert!(pow_scalar(&x, f64::NAN).is_err());
            }
            let none = local(&[], dtype);
            assert!(
                doubles(affine(&none, 2.0, 1.0)).is_empty() && doubles(clamp(&none, None, None)).is_empty()
            );
        }
    }

    #[test]
    fn each_step_rounds() {
        // A fused multiply-add would keep bits of the product that rounding drops.
        let x = 1.0f32 + 2f32.powi(-12);
        let got: Vec<f32> =
            affine(&local(&[x as f64], DType::F32), x as f64, -1.0).unwrap().copy_to_host().unwrap();
        assert_eq!(got, [x * x - 1.0]);
        assert_ne!(got[0], x.mul_add(x, -1.0));
        assert_eq!(doubles(affine(&local(&[-0.0], DType::F32), 1.0, 0.0))[0].to_bits(), (-0.0f64).to_bits());
    }

    #[test]
    fn special_values() {
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let x = local(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY], dtype);
            let got = doubles(clamp(&x, Some(-1.0), Some(1.0)));
            assert!(got[0].is_nan());
            assert_eq!(got[1..], [1.0, -1.0]);
            let got = doubles(clamp(&x, None, None));
            assert!(got[0].is_nan());
            assert_eq!(got[1..], [f64::INFINITY, f64::NEG_INFINITY]);
            assert_eq!(doubles(clamp_grad(&x, Some(-1.0), Some(1.0), &local(&[1.0; 3], dtype))), [0.0; 3]);
        }
        let x = Array::from_vec(vec![i64::MAX], &[1]).unwrap();
        assert_eq!(affine(&x, 1.0, 1.0).unwrap().copy_to_host::<i64>().unwrap(), [i64::MIN]);
        assert_eq!(affine(&x, 2.0, 0.0).unwrap().copy_to_host::<i64>().unwrap(), [-2]);
    }
}
