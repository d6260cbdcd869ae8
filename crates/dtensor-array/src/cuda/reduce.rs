//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::host::reduce::Reduce;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn reduce(f: Reduce, x: &Array, dims: &[usize], keepdim: bool) -> Result<Array> {
    super::kernel::missing("reduce")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn norm(x: &Array, p: f64, dims: &[usize], keepdim: bool) -> Result<Array> {
    super::kernel::missing("norm")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn merge_norm(parts: &Array, p: f64) -> Result<Array> {
    super::kernel::missing("merge_norm")
}
