//! Arithmetic and comparison of two arrays, broadcast.

use std::num::Wrapping;

use super::math;
use super::nest::zip;
use crate::{Array, Num, Real, with_elem, with_float};
use crate::{DType, Error, Result};

/// An arithmetic function of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Binary {
    /// The sum.
    Add,
    /// The difference.
    Sub,
    /// The product.
    Mul,
    /// The quotient. Floating-point only.
    Div,
    /// The first to the power of the second.
    Pow,
    /// The larger of the two; NaN if either is NaN.
    Maximum,
    /// The smaller of the two; NaN if either is NaN.
    Minimum,
}

/// A comparison. All except `Ne` are false if either side is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compare {
    /// Equal.
    Eq,
    /// Not equal.
    Ne,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
}

/// A type with a power function.
pub(crate) trait Power: Num {
    /// Computes `self` to the power `e`.
    fn power(self, e: Self) -> Self;
}

impl Power for f32 {
    #[inline(always)]
    fn power(self, e: Self) -> Self {
        math::pow(self, e)
    }
}

impl Power for f64 {
    #[inline(always)]
    fn power(self, e: Self) -> Self {
        self.powf(e)
    }
}

impl Power for Wrapping<i64> {
    #[inline(always)]
    fn power(self, e: Self) -> Self {
        // A negative power of an integer is an integer only for 1 and −1. All others truncate to 0.
        if e.0 < 0 && self.0.unsigned_abs() != 1 {
            return Wrapping(0);
        }
        let (mut base, mut e, mut power) = (self, e.0.unsigned_abs(), Wrapping(1));
        while e > 0 {
            if e & 1 == 1 {
                power *= base;
            }
            base *= base;
            e >>= 1;
        }
        power
    }
}

#[inline(always)]
fn add<A: Num>(a: A, b: A) -> A {
    a + b
}
#[inline(always)]
fn sub<A: Num>(a: A, b: A) -> A {
    a - b
}
#[inline(always)]
fn mul<A: Num>(a: A, b: A) -> A {
    a * b
}
#[inline(always)]
fn div<A: Real>(a: A, b: A) -> A {
    a / b
}

fn same_dtype(op: &'static str, a: &Array, b: &Array) -> Result<DType> {
    let (left, right) = (a.dtype(), b.dtype());
    if left == right { Ok(left) } else { Err(Error::DTypeMismatch { op, left, right }) }
}

/// Computes `f` of `a` and `b`, broadcast. Integers wrap, and dividing them is an error.
pub(crate) fn binary(f: Binary, a: &Array, b: &Array) -> Result<Array> {
    let dtype = same_dtype("binary", a, b)?;
    if f == Binary::Div {
        return with_float!("div", dtype, T => zip::<T, T, _>(a, b, div));
    }
    with_elem!(dtype, T => match f {
        Binary::Add => zip::<T, T, _>(a, b, add),
        Binary::Sub => zip::<T, T, _>(a, b, sub),
        Binary::Mul => zip::<T, T, _>(a, b, mul),
        Binary::Pow => zip::<T, T, _>(a, b, Power::power),
        Binary::Maximum => zip::<T, T, _>(a, b, Num::max),
        Binary::Minimum => zip::<T, T, _>(a, b, Num::min),
        Binary::Div => unreachable!("handled above"),
    })
}

#[inline(always)]
fn eq<A: Num>(a: A, b: A) -> u8 {
    (a == b) as u8
}
#[inline(always)]
fn ne<A: Num>(a: A, b: A) -> u8 {
    (a != b) as u8
}
#[inline(always)]
fn lt<A: Num>(a: A, b: A) -> u8 {
    (a < b) as u8
}
#[inline(always)]
fn le<A: Num>(a: A, b: A) -> u8 {
    (a <= b) as u8
}

/// Compares `a` and `b`, broadcast: 1 where `f` holds, else 0. The dtype is [`DType::U8`].
pub(crate) fn compare(f: Compare, a: &Array, b: &Array) -> Result<Array> {
    with_elem!(same_dtype("compare", a, b)?, T => match f {
        Compare::Eq => zip::<T, u8, u8>(a, b, eq),
        Compare::Ne => zip::<T, u8, u8>(a, b, ne),
        Compare::Lt => zip::<T, u8, u8>(a, b, lt),
        Compare::Le => zip::<T, u8, u8>(a, b, le),
        Compare::Gt => zip::<T, u8, u8>(b, a, lt),
        Compare::Ge => zip::<T, u8, u8>(b, a, le),
    })
}

/// Interpolates: `a + weight · (b − a)` for a weight between 0 and 1. The result is never outside `a` and `b`, and it is
/// correct if the difference overflows.
pub(crate) fn between(a: &Array, b: &Array, weight: f64) -> Result<Array> {
    with_float!("between", a.dtype(), T => {
        type Acc = <T as crate::Elem>::Acc;
        let (w, rest) = (Acc::from_f64(weight), Acc::from_f64(1.0 - weight));
        zip::<T, T, _>(
            a,
            b,
            #[inline(always)]
            move |a, b| {
                let difference = b - a;
                // Counted from the nearer end, so that the result is never outside.
                let near = if w + w < Acc::ONE { a + w * difference } else { b - rest * difference };
                let finite = difference * Acc::ZERO == Acc::ZERO;
                if a == b {
                    a
                } else if finite {
                    near
                } else {
                    rest * a + w * b
                }
            },
        )
    })
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::cast::cast;
    use super::*;
    use crate::Element;
    use crate::host::testing::values;

    const NAN: f64 = f64::NAN;
    const INF: f64 = f64::INFINITY;

    /// Returns small integers. Every dtype holds them, their sums and their products exactly.
    fn array(dims: &[usize], dtype: DType, seed: usize) -> Array {
        let n = dims.iter().product();
        let data: Vec<f64> = (0..n).map(|i| ((i * 7 + seed) % 11 + 1) as f64).collect();
        cast(&Array::from_vec(data, dims).unwrap(), dtype).unwrap()
    }

    /// Returns the elements of `x` broadcast to `shape`, by the definition of broadcasting.
    fn expanded(x: &Array, shape: &[usize]) -> Vec<f64> {
        let data = values(x);
        let dims = x.dims();
        let mut out = Vec::new();
        for flat in 0..shape.iter().product() {
            let (mut rest, mut stride, mut at) = (flat, 1, 0);
            for i in (0..shape.len()).rev() {
                let index = rest % shape[i];
                rest /= shape[i];
                if let Some(own) = (i + dims.len()).checked_sub(shape.len()) {
                    at += if dims[own] == 1 { 0 } else { index * stride };
                    stride *= dims[own];
                }
            }
            out.push(data[at]);
        }
        out
    }

    fn check(a: &Array, b: &Array, shape: &[usize]) {
        let (x, y) = (expanded(a, shape), expanded(b, shape));
        let close = |got: &Array, want: &dyn Fn(f64, f64) -> f64| {
            assert_eq!(got.dims(), shape);
            let tolerance = match a.dtype() {
                DType::BF16 => 1.0 / 256.0,
                DType::F16 => 1.0 / 2048.0,
                _ => 1e-7,
            };
            for ((got, &x), &y) in values(got).into_iter().zip(&x).zip(&y) {
                let want = want(x, y);
                assert!((got - want).abs() <= want.abs() * tolerance, "{x} and {y} give {want}, not {got}");
            }
        };
        let of = |f| binary(f, a, b).unwrap();
        close(&of(Binary::Add), &|x, y| x + y);
        close(&of(Binary::Mul), &|x, y| x * y);
        close(&of(Binary::Maximum), &f64::max);
        close(&of(Binary::Minimum), &f64::min);
        if a.dtype() != DType::U8 {
            close(&of(Binary::Sub), &|x, y| x - y);
        }
        if a.dtype().is_float() {
            close(&of(Binary::Div), &|x, y| x / y);
        }
        let of = |f| compare(f, a, b).unwrap();
        close(&of(Compare::Eq), &|x, y| (x == y) as u8 as f64);
        close(&of(Compare::Ne), &|x, y| (x != y) as u8 as f64);
        close(&of(Compare::Lt), &|x, y| (x < y) as u8 as f64);
        close(&of(Compare::Le), &|x, y| (x <= y) as u8 as f64);
        close(&of(Compare::Gt), &|x, y| (x > y) as u8 as f64);
        close(&of(Compare::Ge), &|x, y| (x >= y) as u8 as f64);
        assert_eq!(of(Compare::Ge).dtype(), DType::U8);
    }

    #[test]
    fn every_dtype_broadcasts() {
        let cases: [(&[usize], &[usize], &[usize]); 14] = [
            (&[37], &[37], &[37]),
            (&[5, 67], &[67], &[5, 67]),
            (&[5, 67], &[5, 1], &[5, 67]),
            (&[5, 67], &[], &[5, 67]),
            (&[], &[3, 2], &[3, 2]),
            (&[], &[], &[]),
            (&[1, 1], &[1], &[1, 1]),
            (&[4, 1], &[1, 33], &[4, 33]),
            (&[2, 1, 3, 1], &[4, 1, 5], &[2, 4, 3, 5]),
            (&[3, 1, 40], &[2, 1], &[3, 2, 40]),
            (&[0], &[1], &[0]),
            (&[2, 0, 3], &[3], &[2, 0, 3]),
            (&[1, 3], &[0, 1], &[0, 3]),
            (&[2, 3, 4, 2, 1, 2], &[4, 1, 3, 2], &[2, 3, 4, 2, 3, 2]),
        ];
        for dtype in DType::ALL {
            for (a, b, shape) in cases {
                let (a, b) = (array(a, dtype, 0), array(b, dtype, 5));
                check(&a, &b, shape);
                check(&b, &a, shape);
            }
        }
    }

    #[test]
    fn operands_may_be_views() {
        for dtype in DType::ALL {
            for (n, m) in [(3, 5), (40, 33)] {
                let a = array(&[n, m], dtype, 3);
                let transposed = array(&[m, n], dtype, 1).transpose(0, 1).unwrap();
                let expanded = array(&[n, 1], dtype, 2).expand(&[n, m]).unwrap();
                let narrow =
                    array(&[n + 2, m + 3], dtype, 4).narrow(0, 1, n).and_then(|t| t.narrow(1, 2, m)).unwrap();
                let column = array(&[n, m], dtype, 6).narrow(1, 1, 1).unwrap();
                for b in [&transposed, &expanded, &narrow, &column] {
                    check(&a, b, &[n, m]);
                    check(b, &a, &[n, m]);
                    check(b, &transposed, &[n, m]);
                    check(&narrow, b, &[n, m]);
                }
            }
        }
    }

    fn on<T: Element>(f: Binary, a: &[T], b: &[T]) -> Vec<T> {
        let [a, b] = [a, b].map(|x| Array::from_vec(x.to_vec(), &[x.len()]).unwrap());
        binary(f, &a, &b).unwrap().copy_to_host().unwrap()
    }

    #[test]
    fn nan_and_infinity() {
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let local = |x: &[f64]| cast(&Array::from_vec(x.to_vec(), &[x.len()]).unwrap(), dtype).unwrap();
            let (a, b) = (local(&[NAN, 1.0, NAN, INF, -INF]), local(&[1.0, NAN, NAN, 1.0, 2.0]));
            for (f, want) in [(Binary::Maximum, [INF, 2.0]), (Binary::Minimum, [1.0, -INF])] {
                let got = values(&binary(f, &a, &b).unwrap());
                assert!(got[..3].iter().all(|x| x.is_nan()), "{got:?}");
                assert_eq!(got[3..], want);
            }
            let holds = |f| compare(f, &a, &b).unwrap().copy_to_host::<u8>().unwrap();
            assert_eq!(holds(Compare::Eq), [0, 0, 0, 0, 0]);
            assert_eq!(holds(Compare::Ne), [1, 1, 1, 1, 1]);
            assert_eq!(holds(Compare::Lt), [0, 0, 0, 0, 1]);
            assert_eq!(holds(Compare::Ge), [0, 0, 0, 1, 0]);
            let got = values(&binary(Binary::Div, &local(&[1.0, -1.0, 0.0]), &local(&[0.0; 3])).unwrap());
            assert_eq!(got[..2], [INF, -INF]);
            assert!(got[2].is_nan());
        }
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(on(Binary::Add, &[i64::MAX, 200], &[1, 100]), [i64::MIN, 300]);
        assert_eq!(on(Binary::Add, &[200u8, 1], &[100, 1]), [44, 2]);
        assert_eq!(on(Binary::Sub, &[1u8], &[2]), [255]);
        assert_eq!(on(Binary::Mul, &[16u8, i8::MAX as u8], &[16, 2]), [0, 254]);
        let base = [2i64, -3, 0, 0, 10, 1, -1, -1, 5, 3];
        let power = [10i64, 3, 0, 5, 19, -2, -3, -4, -1, 64];
        let got = on(Binary::Pow, &base, &power);
        assert_eq!(got[..4], [1024, -27, 1, 0]);
        assert_eq!(got[4], 10i64.wrapping_pow(19));
        assert_eq!(got[5..], [1, -1, 1, 0, 3i64.wrapping_pow(64)]);
        assert_eq!(on(Binary::Pow, &[3u8, 2], &[5, 8]), [243, 0]);
    }

    #[test]
    fn floating_point_powers() {
        assert_eq!(on(Binary::Pow, &[2.0f32, -2.0, 4.0], &[10.0, 3.0, 0.5]), [1024.0, -8.0, 2.0]);
        assert_eq!(on(Binary::Pow, &[2.0f64, 9.0], &[-1.0, 0.5]), [0.5, 3.0]);
        let two = [bf16::from_f32(2.0)];
        assert_eq!(on(Binary::Pow, &two, &two), [bf16::from_f32(4.0)]);
        let two = [f16::from_f32(2.0)];
        assert_eq!(on(Binary::Pow, &two, &two), [f16::from_f32(4.0)]);
    }

    #[test]
    fn unsupported_dtypes_are_errors() {
        let a = array(&[2], DType::I64, 0);
        assert!(matches!(binary(Binary::Div, &a, &a), Err(Error::DType { .. })));
        let b = array(&[2], DType::F32, 0);
        assert!(matches!(binary(Binary::Add, &a, &b), Err(Error::DTypeMismatch { .. })));
        assert!(matches!(compare(Compare::Eq, &a, &b), Err(Error::DTypeMismatch { .. })));
    }

    #[test]
    fn between_stays_inside_its_ends() {
        use crate::host::testing::{FLOATS, assert_close, local, tolerance, values};
        let inf = f64::INFINITY;
        for dtype in FLOATS {
            let a = local(dtype, &[1.0, 2.0, -inf, 1.0, inf, -inf, -inf, f64::NAN, 1.0], &[9]);
            let b = local(dtype, &[3.0, 2.0, 1.0, inf, inf, -inf, inf, 1.0, f64::NAN], &[9]);
            for w in [0.25, 0.5, 0.75] {
                let want = [1.0 + 2.0 * w, 2.0, -inf, inf, inf, -inf, f64::NAN, f64::NAN, f64::NAN];
                assert_close(&between(&a, &b, w).unwrap(), &want, tolerance(dtype));
            }
        }
        // A difference that overflows, and equal numbers.
        let (low, high) = (local(DType::F32, &[-3e38, 0.1], &[2]), local(DType::F32, &[3e38, 0.1], &[2]));
        assert_eq!(values(&between(&low, &high, 0.5).unwrap()), [0.0, f64::from(0.1f32)]);
        assert_eq!(values(&between(&low, &high, 0.3).unwrap())[1], f64::from(0.1f32));
    }
}
