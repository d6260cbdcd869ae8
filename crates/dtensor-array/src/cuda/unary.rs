//! Element-wise functions of one array, and their derivatives.

use super::kernel::{ALL, file, units};
use super::map::{Function, NONE, broadcast};
use super::stream_of;
use crate::host::formula;
use crate::host::unary::Unary;
use crate::{Array, Error, Result};

units! {
    static UNARY: "unary", [file!("map.cuh"), file!("pointwise.cuh"), formula::cuda_source, source], ALL;
}

/// Returns the functions that are defined for integers, with their formulas.
fn for_integers(f: Unary) -> Option<&'static str> {
    match f {
        Unary::Abs => Some("magnitude_int"),
        Unary::Neg | Unary::Sign | Unary::Relu => Some(f.formulas()[0]),
        _ => None,
    }
}

/// Returns the kernels: one for each function and one for each derivative.
fn source() -> String {
    let mut source = String::from("#if DTYPE >= 2\n");
    for &f in Unary::ALL {
        let ([formula, gradient], [name, grad_name]) = (f.formulas(), f.kernels());
        source += &format!("//! kernels: {name} {grad_name}\nPOINTWISE1({name}, formula::{formula}(x))\n");
        source += &format!("POINTWISE2({grad_name}, formula::{gradient}(x, y))\n");
    }
    source += "#else\n";
    for &f in Unary::ALL {
        if let Some(formula) = for_integers(f) {
            source += &format!("POINTWISE1({}, formula::{formula}(x))\n", f.name());
        }
    }
    source + "#endif\n"
}

pub(crate) fn unary(f: Unary, x: &Array) -> Result<Array> {
    let dtype = x.dtype();
    if dtype.is_int() && for_integers(f).is_none() {
        return Err(Error::DType { op: f.name(), dtype, why: "it needs a floating-point dtype" });
    }
    let function = Function { unit: &UNARY, dtype, name: f.name() };
    stream_of(x)?.pointwise(function, (dtype, x.shape().clone()), [x], NONE)
}

pub(crate) fn unary_grad(f: Unary, saved: &Array, dy: &Array) -> Result<Array> {
    let (left, right) = (saved.dtype(), dy.dtype());
    if left != right {
        return Err(Error::DTypeMismatch { op: f.name(), left, right });
    }
    if left.is_int() {
        return Err(Error::DType { op: f.name(), dtype: left, why: "it needs a floating-point dtype" });
    }
    let function = Function { unit: &UNARY, dtype: left, name: f.kernels()[1] };
    stream_of(saved)?.pointwise(function, (left, broadcast(&[saved, dy])), [saved, dy], NONE)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, rounding};
    use super::*;
    use crate::DType;
    use crate::kernels;

    #[test]
    fn every_function_of_every_dtype() {
        for dtype in DType::ALL {
            for &f in Unary::ALL {
                if dtype.is_int() && for_integers(f).is_none() {
                    let x = numbers(3, dtype, 0).to_device(crate::Device::Cuda(0)).unwrap();
                    assert!(matches!(unary(f, &x), Err(Error::DType { .. })));
                    continue;
                }
                let x = numbers(6 * 35, dtype, 1);
                let x = match f {
                    Unary::Sqrt | Unary::Rsqrt | Unary::Ln => kernels::unary::unary(Unary::Exp, &x).unwrap(),
                    _ => x,
                };
                // The host's functions are accurate to about 2 ulp, and so are those of the GPU.
                let tolerance = if dtype.is_int() { 0.0 } else { 3.0 * rounding(dtype) };
                // GELU is computed by the same steps.
                let is_same = f == Unary::Gelu && dtype != DType::F64;
                for view in [0, 1, 2, 3] {
                    let of = |x: &Array| match view {
                        0 => x.reshape(&[6, 35]),
                        1 => x.reshape(&[6, 35])?.transpose(0, 1),
                        2 => x.narrow(0, 3, 0),
                        _ => x.narrow(0, 1, 33)?.reshape(&[33, 1])?.expand(&[3, 33, 2]),
                    };
                    compare(std::slice::from_ref(&x), if is_same { 0.0 } else { tolerance }, |x| {
                        Ok(vec![kernels::unary::unary(f, &of(&x[0])?)?])
                    });
                    if !dtype.is_int() {
                        let dy = numbers(6 * 35, dtype, 2);
                        compare(&[x.clone(), dy], 4.0 * tolerance, |x| {
                            Ok(vec![kernels::unary::unary_grad(f, &of(&x[0])?, &of(&x[1])?)?])
                        });
                    }
                }
            }
        }
    }
}
