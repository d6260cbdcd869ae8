//! Element-wise functions of one array, and their derivatives.

use super::kernel::{ALL, file, units};
use super::map::broadcast;
use super::stream_of;
use crate::host::formula;
use crate::host::unary::Unary;
use crate::{Array, Error, Result};

units! {
    static UNARY: "unary", [formula::cuda_source, file!("map.cuh"), source], ALL;
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
    let forward = |name: &str, formula: &str| {
        format!(
            "struct F_{name} {{ DEVICE A operator()(A x) const {{ return formula::{formula}(x); }} }};\n\
             ENTRY({name}, Map<1>) {{ map1<T, T>(a, widened(F_{name}())); }}\n"
        )
    };
    let mut source = String::from("#if DTYPE >= 2\n");
    for &f in Unary::ALL {
        let [formula, gradient] = f.formulas();
        let name = f.name();
        source += &forward(name, formula);
        source += &format!(
            "struct G_{name} {{ DEVICE A operator()(A x, A dy) const {{ return formula::{gradient}(x, dy); }} }};\n\
             ENTRY({name}_grad, Map<2>) {{ map2<T, T, T>(a, widened(G_{name}())); }}\n"
        );
    }
    source += "#else\n";
    for &f in Unary::ALL {
        if let Some(formula) = for_integers(f) {
            source += &forward(f.name(), formula);
        }
    }
    source + "#endif\n"
}

pub(crate) fn unary(f: Unary, x: &Array) -> Result<Array> {
    let dtype = x.dtype();
    if dtype.is_int() && for_integers(f).is_none() {
        return Err(Error::DType { op: f.name(), dtype, why: "it needs a floating-point dtype" });
    }
    stream_of(x)?.map(&UNARY, dtype, f.name(), (dtype, x.dims()), [x], ())
}

pub(crate) fn unary_grad(f: Unary, saved: &Array, dy: &Array) -> Result<Array> {
    let (left, right) = (saved.dtype(), dy.dtype());
    if left != right {
        return Err(Error::DTypeMismatch { op: f.name(), left, right });
    }
    if left.is_int() {
        return Err(Error::DType { op: f.name(), dtype: left, why: "it needs a floating-point dtype" });
    }
    let shape = broadcast(&[saved, dy]);
    stream_of(saved)?.map(&UNARY, left, f.kernels()[1], (left, &shape), [saved, dy], ())
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
                for view in [0, 1, 2, 3] {
                    let of = |x: &Array| match view {
                        0 => x.reshape(&[6, 35]),
                        1 => x.reshape(&[6, 35])?.transpose(0, 1),
                        2 => x.narrow(0, 3, 0),
                        _ => x.narrow(0, 1, 33)?.reshape(&[33, 1])?.expand(&[3, 33, 2]),
                    };
                    compare(std::slice::from_ref(&x), tolerance, |x| {
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
