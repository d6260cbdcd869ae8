//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn cumsum(x: &Array, dim: usize, reverse: bool) -> Result<Array> {
    super::kernel::missing("cumsum")
}
