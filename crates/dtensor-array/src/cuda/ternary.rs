//! Floating-point functions of three arrays, broadcast.

use super::kernel::{FLOATS, file, units};
use super::map::{Function, NONE, broadcast};
use super::stream_of;
use crate::host::formula;
use crate::host::ternary::Ternary;
use crate::{Array, Error, Result};

units! {
    static TERNARY: "ternary", [file!("map.cuh"), file!("pointwise.cuh"), formula::cuda_source, file!("ternary.cuh")], FLOATS;
}

pub(crate) fn ternary(f: Ternary, a: &Array, b: &Array, c: &Array) -> Result<Array> {
    let dtype = a.dtype();
    for other in [b, c] {
        if other.dtype() != dtype {
            return Err(Error::DTypeMismatch { op: "ternary", left: dtype, right: other.dtype() });
        }
    }
    if dtype.is_int() {
        return Err(Error::DType { op: "ternary", dtype, why: "it needs a floating-point dtype" });
    }
    let name = match f {
        Ternary::Lerp => "lerp",
    };
    let function = Function { unit: &TERNARY, dtype, name };
    stream_of(a)?.pointwise(function, (dtype, broadcast(&[a, b, c])), [a, b, c], NONE)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, rounding};
    use super::*;
    use crate::DType;
    use crate::kernels::ternary::ternary;

    #[test]
    fn three_arrays_are_broadcast() {
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let inputs = [numbers(35, dtype, 1), numbers(5, dtype, 2), numbers(7, dtype, 3)];
            compare(&inputs, 4.0 * rounding(dtype), |x| {
                let (a, b, c) = (x[0].reshape(&[7, 5])?, &x[1], x[2].reshape(&[7, 1])?);
                Ok(vec![
                    ternary(Ternary::Lerp, &a, b, &c)?,
                    ternary(Ternary::Lerp, &a.narrow(0, 0, 0)?, b, &c.narrow(0, 0, 0)?)?,
                ])
            });
        }
    }
}
