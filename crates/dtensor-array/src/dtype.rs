//! Element types.

use std::fmt;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of a tensor's elements. Booleans are stored as 0 or 1 in [`U8`](DType::U8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DType {
    /// 8-bit unsigned integer; also the dtype of masks and of the results of comparisons.
    U8,
    /// 64-bit signed integer; the dtype of indices.
    I64,
    /// IEEE half precision.
    F16,
    /// Brain float: the range of `f32` with 8 bits of precision.
    BF16,
    /// IEEE single precision; the default.
    F32,
    /// IEEE double precision.
    F64,
}

impl DType {
    /// All dtypes.
    pub const ALL: [DType; 6] = [DType::U8, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];

    /// Returns true for floating-point dtypes. Only these can have gradients.
    #[inline]
    pub fn is_float(self) -> bool {
        !self.is_int()
    }

    /// Returns true for integer dtypes.
    #[inline]
    pub fn is_int(self) -> bool {
        matches!(self, DType::U8 | DType::I64)
    }

    /// Returns the number of bytes per element.
    pub fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    /// Returns the short name, such as `"f32"`.
    pub fn name(self) -> &'static str {
        match self {
            DType::U8 => "u8",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }
}

impl fmt::Display for DType {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that can be an element of a tensor.
pub trait Element: crate::elem::Elem {
    /// The dtype of this type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),*) => {$(
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
elements!(u8 => U8, i64 => I64, f16 => F16, bf16 => BF16, f32 => F32, f64 => F64);
