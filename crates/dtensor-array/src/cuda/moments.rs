//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn variance(x: &Array, dims: &[usize], keepdim: bool, correction: f64) -> Result<Array> {
    super::kernel::missing("variance")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn deviation(x: &Array, dims: &[usize], keepdim: bool, correction: f64) -> Result<Array> {
    super::kernel::missing("deviation")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn moments_part(x: &Array, dims: &[usize], keepdim: bool) -> Result<Array> {
    super::kernel::missing("moments_part")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn merge_moments(parts: &Array, correction: f64, root: bool, dtype: DType) -> Result<Array> {
    super::kernel::missing("merge_moments")
}
