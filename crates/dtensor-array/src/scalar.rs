//! [`Scalar`]: a Rust number as an operand.

use crate::{DType, Error, Result};

/// A Rust number used as an operand. It takes the dtype of the tensor it is combined with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A floating-point number.
    Float(f64),
    /// An integer.
    Int(i64),
}

impl Scalar {
    /// Returns the number as `f64`, rounded to the nearest.
    #[inline]
    pub fn as_f64(self) -> f64 {
        match self {
            Scalar::Float(x) => x,
            Scalar::Int(x) => x as f64,
        }
    }

    /// Returns the number as `f64`. Returns an error if a tensor of `dtype` cannot hold it.
    pub fn for_dtype(self, op: &'static str, dtype: DType) -> Result<f64> {
        let x = self.for_arithmetic(op, dtype)?;
        let range = match dtype {
            DType::U8 => 0.0..256.0,
            DType::I64 => i64::MIN as f64..-(i64::MIN as f64),
            _ => return Ok(x),
        };
        // An integer near 2⁶³ may round up to 2⁶³ as `f64`, which is outside the range, although `i64` can hold it.
        if range.contains(&x) || (dtype == DType::I64 && matches!(self, Scalar::Int(_))) {
            Ok(x)
        } else {
            Err(Error::argument(op, format!("the scalar {x} is out of range for dtype {dtype}")))
        }
    }

    /// Returns the number as `f64` for arithmetic with a tensor of `dtype`, where integers wrap. Returns an error if the result
    /// would need another dtype: a fraction with an integer tensor.
    pub fn for_arithmetic(self, op: &'static str, dtype: DType) -> Result<f64> {
        match self {
            Scalar::Float(x) if dtype.is_int() && x.fract() != 0.0 => Err(Error::argument(
                op,
                format!("the scalar {x} is not an integer, and the tensor's dtype is {dtype}"),
            )),
            _ => Ok(self.as_f64()),
        }
    }

    /// Returns true if a tensor of `dtype` can hold this number but `f64` cannot: some integers beyond 2⁵³.
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

impl From<usize> for Scalar {
    /// Converts a size or an index. No size exceeds `i64::MAX`; a larger number becomes that.
    #[inline]
    fn from(x: usize) -> Self {
        Scalar::Int(i64::try_from(x).unwrap_or(i64::MAX))
    }
}
