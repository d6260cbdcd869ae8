//! [`Meta`]: shape, dtype and device, without a value.

use serde::{Deserialize, Serialize};

use crate::{DType, Device, Error, Result, Shape};

/// Shape, dtype and device of an array.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Meta {
    /// The size of each dim.
    pub shape: Shape,
    /// The element type.
    pub dtype: DType,
    /// Where the value is.
    pub device: Device,
}

impl Shape {
    /// Returns the number of elements, or an error if their bytes cannot be counted. Sizes of 0 do not hide others.
    #[inline]
    pub fn checked_numel(&self, op: &'static str) -> Result<usize> {
        self.iter()
            .try_fold(8usize, |n, &size| n.checked_mul(size.max(1)))
            .filter(|&bytes| bytes <= isize::MAX as usize)
            .map(|_| self.numel())
            .ok_or_else(|| Error::argument(op, format!("shape {self} has too many elements")))
    }
}
