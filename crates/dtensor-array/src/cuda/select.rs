//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn where_(cond: &Array, a: &Array, b: &Array) -> Result<Array> {
    super::kernel::missing("where_")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn masked_fill(x: &Array, mask: &Array, value: f64) -> Result<Array> {
    super::kernel::missing("masked_fill")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn triangle(x: &Array, diagonal: i64, lower: bool, first: (usize, usize)) -> Result<Array> {
    super::kernel::missing("triangle")
}
