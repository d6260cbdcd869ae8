//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn matmul(a: &Array, b: &Array, bias: Option<&Array>) -> Result<Array> {
    super::kernel::missing("matmul")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn folded(a: &Array, b: &Array) -> Result<Array> {
    super::kernel::missing("folded")
}
