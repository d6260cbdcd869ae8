//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn sort(x: &Array, dim: usize, descending: bool) -> Result<(Array, Array)> {
    super::kernel::missing("sort")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn topk(x: &Array, k: usize, dim: usize, largest: bool) -> Result<(Array, Array)> {
    super::kernel::missing("topk")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn topk_part(x: &Array, k: usize, dim: usize, largest: bool) -> Result<(Array, Array)> {
    super::kernel::missing("topk_part")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn merge_top(
    values: &Array,
    indices: &Array,
    k: usize,
    dim: usize,
    largest: bool,
) -> Result<(Array, Array)> {
    super::kernel::missing("merge_top")
}
