//! Numbers that take the dtype of what they meet.

use crate::{DType, Error, Result};

/// A number that takes the dtype of the tensor it meets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A real number.
    Float(f64),
    /// A whole number.
    Int(i64),
}

impl Scalar {
    /// As a double.
    #[inline]
    pub fn as_f64(self) -> f64 {
        match self {
            Scalar::Float(x) => x,
            Scalar::Int(x) => x as f64,
        }
    }

    /// As a double, if a tensor of `dtype` can hold it.
    pub fn for_dtype(self, op: &'static str, dtype: DType) -> Result<f64> {
        let x = self.for_arithmetic(op, dtype)?;
        let range = match dtype {
            DType::U8 => 0.0..256.0,
            DType::I64 => i64::MIN as f64..-(i64::MIN as f64),
            _ => return Ok(x),
        };
        // Of whole numbers given as such, those that `i64` holds are held exactly or wrongly rounded up to 2⁶³.
        if range.contains(&x) || (dtype == DType::I64 && matches!(self, Scalar::Int(_))) {
            Ok(x)
        } else {
            Err(Error::argument(op, format!("the scalar {x} is out of range for dtype {dtype}")))
        }
    }

    /// As a double, if a tensor of `dtype` can take part in arithmetic with it without changing dtype. Integers wrap.
    pub fn for_arithmetic(self, op: &'static str, dtype: DType) -> Result<f64> {
        match self {
            Scalar::Float(x) if dtype.is_int() && x.fract() != 0.0 => Err(Error::argument(
                op,
                format!("the scalar {x} is not a whole number, and the tensor's dtype is {dtype}"),
            )),
            _ => Ok(self.as_f64()),
        }
    }

    /// Whether a tensor of `dtype` holds this number and a double does not: some whole numbers beyond 2⁵³.
    #[inline]
    pub fn exceeds_f64(self, dtype: DType) -> bool {
        matches!(self, Scalar::Int(x) if dtype.is_int() && x as f64 as i128 != i128::from(x))
    }
}

macro_rules! scalar_from {
    ($($rust:ty => $variant:ident),*) => {$(
        impl From<$rust> for Scalar {
            #[inline]
            fn from(x: $rust) -> Self {
                Scalar::$variant(x.into())
            }
        }
    )*};
}
scalar_from!(f64 => Float, f32 => Float, i64 => Int, i32 => Int, u8 => Int);
