//! Conversion between dtypes.

use super::kernel::{ALL, file, units};
use super::map::{Function, NONE};
use super::stream_of;
use crate::{Array, DType, Result};

units! {
    static CAST: "cast", [file!("map.cuh"), file!("pointwise.cuh"), file!("cast.cuh")], ALL;
}

/// Returns the name of the kernel that casts to a dtype.
pub(super) fn name(to: DType) -> &'static str {
    match to {
        DType::U8 => "to_u8",
        DType::I64 => "to_i64",
        DType::F16 => "to_f16",
        DType::BF16 => "to_bf16",
        DType::F32 => "to_f32",
        DType::F64 => "to_f64",
    }
}

pub(crate) fn cast(x: &Array, to: DType) -> Result<Array> {
    if x.dtype() == to {
        return Ok(x.clone());
    }
    let function = Function { unit: &CAST, dtype: x.dtype(), name: name(to) };
    stream_of(x)?.pointwise(function, (to, x.shape().clone()), [x], NONE)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers};
    use super::*;
    use crate::kernels::cast as kernels;

    fn to_all(x: &Array) -> Result<Vec<Array>> {
        DType::ALL.into_iter().map(|to| kernels::cast(x, to)).collect()
    }

    #[test]
    fn every_pair_of_dtypes() {
        for from in DType::ALL {
            for n in [0, 5, 64, 20_005] {
                compare(&[numbers(n, from, 1)], 0.0, |x| to_all(&x[0]));
            }
            compare(&[numbers(35 * 4, from, 1)], 0.0, |x| to_all(&x[0].reshape(&[35, 4])?.transpose(0, 1)?));
            compare(&[numbers(80, from, 1)], 0.0, |x| to_all(&x[0].reshape(&[8, 10])?.narrow(1, 3, 5)?));
        }
    }

    #[test]
    fn special_values() {
        let (tiny, inf) = (2f64.powi(-24), f64::INFINITY);
        let mut x =
            vec![0.0, -0.0, 0.9, 254.5, 255.0, 255.9, 256.0, 300.0, 1e300, 9.3e18, 65519.9, 65520.0, inf];
        x.extend([tiny, tiny / 2.0, 1.5 * tiny, 1e-40, 1e-46, 1e-300, f64::NAN, 2f64.powi(63)]);
        // Ties between two halves, and numbers just beside them.
        for (at, step) in [(2f64.powi(-8), 2f64.powi(-40)), (2f64.powi(-11), 2f64.powi(-45))] {
            x.extend([1.0 + at, 1.0 + at + step, 1.0 + 3.0 * at - step, 1.0 + 3.0 * at]);
        }
        let x: Vec<f64> = x.iter().flat_map(|&x| [x, -x]).collect();
        let n = x.len();
        let x = Array::from_vec(x, &[n]).unwrap();
        for from in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            compare(&[crate::host::cast::cast(&x, from).unwrap()], 0.0, |x| to_all(&x[0]));
        }
        let tie = (1i64 << 60) + (1 << 52);
        let x =
            vec![i64::MAX, i64::MIN, -1, 257, 65519, 65520, -70000, tie, tie + 1, tie - 1, -tie, -tie - 1];
        let n = x.len();
        compare(&[Array::from_vec(x, &[n]).unwrap()], 0.0, |x| to_all(&x[0]));
    }
}
