//! [`Meta`]: the description of an array without its value.

use serde::{Deserialize, Serialize};

use crate::{DType, Device, Error, Result, Shape};

/// Shape, dtype and device of an array.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Meta {
    /// The size of each dim.
    pub shape: Shape,
    /// The element type.
    pub dtype: DType,
    /// The device that holds the value.
    pub device: Device,
}

impl Shape {
    /// Returns the number of elements, or an error if their size in bytes overflows. A dim of size 0 counts as 1 in this check,
    /// so it does not excuse a dim that is too large.
    #[inline]
    pub fn checked_numel(&self, op: &'static str) -> Result<usize> {
        // The largest dtypes have 8 bytes per element.
        self.iter()
            .try_fold(8usize, |n, &size| n.checked_mul(size.max(1)))
            .filter(|&bytes| bytes <= isize::MAX as usize)
            .map(|_| self.numel())
            .ok_or_else(|| Error::argument(op, format!("shape {self} has too many elements")))
    }
}
