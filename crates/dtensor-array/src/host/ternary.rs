//! Floating-point functions of three arrays, broadcast.

use super::formula;
use super::nest::zip3;
use crate::{Array, Error, Result, with_float};

/// A floating-point function of three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ternary {
    /// Linear interpolation from the first to the second, by the third.
    Lerp,
}

/// Computes `f` of three arrays, broadcast. They must have the same floating-point dtype.
pub(crate) fn ternary(f: Ternary, a: &Array, b: &Array, c: &Array) -> Result<Array> {
    for other in [b, c] {
        let (left, right) = (a.dtype(), other.dtype());
        if left != right {
            return Err(Error::DTypeMismatch { op: "ternary", left, right });
        }
    }
    with_float!("ternary", a.dtype(), T => match f {
        Ternary::Lerp => zip3::<T, T, _>([a, b, c], formula::lerp),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::host::cast::cast;
    use crate::host::testing::values;

    #[test]
    fn lerp_is_exact_at_both_ends() {
        let (a, b) = ([1e9, 0.1, -3.0, 2.0, 0.0], [0.1, 1e9, 5.0, 2.0, 1.0]);
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let local = |x: &[f64]| cast(&Array::from_vec(x.to_vec(), &[x.len()]).unwrap(), dtype).unwrap();
            // 1e9 is infinite in `f16`.
            let (a, b) = if dtype == DType::F16 { (&a[2..], &b[2..]) } else { (&a[..], &b[..]) };
            let (x, y) = (local(a), local(b));
            let at = |w: f64| ternary(Ternary::Lerp, &x, &y, &local(&[w])).unwrap();
            assert_eq!(values(&at(0.0)), values(&x), "{dtype}");
            assert_eq!(values(&at(1.0)), values(&y), "{dtype}");
            let near = values(&at(0.25));
            assert_eq!(near[near.len() - 3..], [-1.0, 2.0, 0.25], "{dtype}");
            let beyond = values(&at(2.0));
            assert_eq!(beyond[beyond.len() - 3..], [13.0, 2.0, 2.0], "{dtype}");
        }
    }

    #[test]
    fn dtypes_must_be_one_float() {
        let (x, y) =
            (Array::from_vec(vec![1.0f32], &[1]).unwrap(), Array::from_vec(vec![1.0f64], &[1]).unwrap());
        assert!(matches!(ternary(Ternary::Lerp, &x, &x, &y), Err(Error::DTypeMismatch { .. })));
        let whole = Array::from_vec(vec![1i64], &[1]).unwrap();
        assert!(matches!(ternary(Ternary::Lerp, &whole, &whole, &whole), Err(Error::DType { .. })));
    }
}
