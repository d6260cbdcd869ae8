//! Arithmetic and comparison of two arrays, broadcast.

use super::kernel::{ALL, file, units};
use super::map::{Function, NONE, broadcast};
use super::scalar::number;
use super::stream_of;
use crate::host::binary::{Binary, Compare};
use crate::{Array, DType, Error, Result};

units! {
    static BINARY: "binary", [file!("map.cuh"), file!("pointwise.cuh"), file!("binary.cuh")], ALL;
    // The code of powers is long, so they are compiled only where they are used.
    static POWER: "power", [file!("map.cuh"), file!("pointwise.cuh"), file!("power.cuh")], ALL;
    static COMPARE: "compare", [file!("map.cuh"), file!("pointwise.cuh"), file!("compare.cuh")], ALL;
}

fn same_dtype(op: &'static str, a: &Array, b: &Array) -> Result<DType> {
    let (left, right) = (a.dtype(), b.dtype());
    if left == right { Ok(left) } else { Err(Error::DTypeMismatch { op, left, right }) }
}

pub(crate) fn binary(f: Binary, a: &Array, b: &Array) -> Result<Array> {
    let dtype = same_dtype("binary", a, b)?;
    if f == Binary::Div && dtype.is_int() {
        return Err(Error::DType { op: "div", dtype, why: "it needs a floating-point dtype" });
    }
    let name = match f {
        Binary::Add => "add",
        Binary::Sub => "sub",
        Binary::Mul => "mul",
        Binary::Div => "div",
        Binary::Pow => "pow",
        Binary::Maximum => "maximum",
        Binary::Minimum => "minimum",
    };
    let unit = if f == Binary::Pow { &POWER } else { &BINARY };
    let function = Function { unit, dtype, name };
    stream_of(a)?.pointwise(function, (dtype, broadcast(&[a, b])), [a, b], NONE)
}

pub(crate) fn compare(f: Compare, a: &Array, b: &Array) -> Result<Array> {
    let dtype = same_dtype("compare", a, b)?;
    let (name, operands) = match f {
        Compare::Eq => ("eq", [a, b]),
        Compare::Ne => ("ne", [a, b]),
        Compare::Lt => ("lt", [a, b]),
        Compare::Le => ("le", [a, b]),
        Compare::Gt => ("lt", [b, a]),
        Compare::Ge => ("le", [b, a]),
    };
    let function = Function { unit: &COMPARE, dtype, name };
    stream_of(a)?.pointwise(function, (DType::U8, broadcast(&operands)), operands, NONE)
}

pub(crate) fn between(a: &Array, b: &Array, weight: f64) -> Result<Array> {
    let dtype = same_dtype("between", a, b)?;
    if dtype.is_int() {
        return Err(Error::DType { op: "between", dtype, why: "it needs a floating-point dtype" });
    }
    let numbers = [number(dtype, weight), number(dtype, 1.0 - weight), 0, 0, 0];
    let function = Function { unit: &BINARY, dtype, name: "between" };
    stream_of(a)?.pointwise(function, (dtype, broadcast(&[a, b])), [a, b], numbers)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare as same, numbers, rounding};
    use super::*;
    use crate::host::testing::local;
    use crate::{Device, kernels::binary as kernels};

    const BINARIES: [Binary; 6] =
        [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Maximum, Binary::Minimum];
    const COMPARISONS: [Compare; 6] =
        [Compare::Eq, Compare::Ne, Compare::Lt, Compare::Le, Compare::Gt, Compare::Ge];

    /// Runs every function on two arrays, or views of them.
    fn check(a: &Array, b: &Array, of: impl Fn(&[Array]) -> Result<[Array; 2]>) {
        same(&[a.clone(), b.clone()], 0.0, |x| {
            let [a, b] = &of(x)?;
            let fs = BINARIES.into_iter().filter(|&f| f != Binary::Div || a.dtype().is_float());
            let mut all = fs.map(|f| kernels::binary(f, a, b)).collect::<Result<Vec<_>>>()?;
            for f in COMPARISONS {
                all.push(kernels::compare(f, a, b)?);
            }
            if a.dtype().is_float() {
                all.push(kernels::between(a, b, 0.3)?);
                all.push(kernels::between(a, b, 0.75)?);
            }
            Ok(all)
        });
    }

    #[test]
    fn every_function_of_every_dtype_broadcasts() {
        let cases: [(&[usize], &[usize]); 9] = [
            (&[37], &[37]),
            (&[5, 68], &[68]),
            (&[5, 67], &[5, 1]),
            (&[5, 64], &[]),
            (&[], &[]),
            (&[4, 1], &[1, 33]),
            (&[2, 1, 3, 1], &[4, 1, 5]),
            (&[2, 0, 3], &[3]),
            (&[20_000], &[1]),
        ];
        for dtype in DType::ALL {
            for (a, b) in cases {
                let [x, y] = [(a, 1), (b, 2)].map(|(dims, seed)| numbers(dims.iter().product(), dtype, seed));
                check(&x, &y, |x| Ok([x[0].reshape(a)?, x[1].reshape(b)?]));
                check(&y, &x, |x| Ok([x[0].reshape(b)?, x[1].reshape(a)?]));
            }
        }
    }

    #[test]
    fn operands_may_be_views() {
        for dtype in DType::ALL {
            let (a, b) = (numbers(40 * 32, dtype, 3), numbers(40 * 32, dtype, 4));
            check(&a, &b, |x| Ok([x[0].reshape(&[40, 32])?, x[1].reshape(&[32, 40])?.transpose(0, 1)?]));
            check(&a, &b, |x| {
                let narrow = x[0].reshape(&[40, 32])?.narrow(0, 3, 8)?.narrow(1, 16, 16)?;
                Ok([narrow, x[1].narrow(0, 7, 1)?.expand(&[8, 16])?])
            });
        }
    }

    #[test]
    fn special_values() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let a = local(dtype, &[nan, 1.0, inf, -inf, 0.0, -0.0, 0.0, 6e4, -inf], &[9]);
            let b = local(dtype, &[1.0, nan, 1.0, 2.0, -0.0, 0.0, 0.0, -6e4, inf], &[9]);
            check(&a, &b, |x| Ok([x[0].clone(), x[1].clone()]));
        }
        for dtype in [DType::U8, DType::I64] {
            let a = local(dtype, &[200.0, 255.0, 0.0, 9e18], &[4]);
            let b = local(dtype, &[100.0, 255.0, 1.0, 9e18], &[4]);
            check(&a, &b, |x| Ok([x[0].clone(), x[1].clone()]));
        }
    }

    #[test]
    fn powers() {
        for dtype in DType::ALL {
            let x = numbers(500, dtype, 1);
            let e = numbers(500, dtype, 7);
            let tolerance = if dtype.is_int() { 0.0 } else { 4.0 * rounding(dtype) };
            same(&[x, e], tolerance, |x| Ok(vec![kernels::binary(Binary::Pow, &x[0], &x[1])?]));
        }
        let base = local(DType::I64, &[2.0, -3.0, 0.0, 0.0, 10.0, 1.0, -1.0, -1.0, 5.0, 3.0], &[10]);
        let power = local(DType::I64, &[10.0, 3.0, 0.0, 5.0, 19.0, -2.0, -3.0, -4.0, -1.0, 64.0], &[10]);
        same(&[base, power], 0.0, |x| Ok(vec![kernels::binary(Binary::Pow, &x[0], &x[1])?]));
    }

    #[test]
    fn unsupported_dtypes_are_errors() {
        let on_gpu = |dtype| numbers(2, dtype, 0).to_device(Device::Cuda(0)).unwrap();
        let (a, b) = (on_gpu(DType::I64), on_gpu(DType::F32));
        assert!(matches!(kernels::binary(Binary::Div, &a, &a), Err(Error::DType { .. })));
        assert!(matches!(kernels::between(&a, &a, 0.5), Err(Error::DType { .. })));
        assert!(matches!(kernels::binary(Binary::Add, &a, &b), Err(Error::DTypeMismatch { .. })));
        assert!(matches!(kernels::compare(Compare::Eq, &a, &b), Err(Error::DTypeMismatch { .. })));
    }
}
