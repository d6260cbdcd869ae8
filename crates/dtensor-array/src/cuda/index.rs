//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::host::index::DimShard;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn index_select(
    op: &'static str,
    x: &Array,
    dim: usize,
    ids: &Array,
    part: DimShard,
) -> Result<Array> {
    super::kernel::missing("index_select")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn index_add(
    ids: &Array,
    dy: &Array,
    dim: usize,
    size: usize,
    padding: Option<i64>,
    part: DimShard,
) -> Result<Array> {
    super::kernel::missing("index_add")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn gather(x: &Array, dim: usize, ids: &Array, part: DimShard) -> Result<Array> {
    super::kernel::missing("gather")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn scatter_add(x: &Array, dim: usize, ids: &Array, src: &Array, part: DimShard) -> Result<Array> {
    super::kernel::missing("scatter_add")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn slice_step(x: &Array, dim: usize, start: usize, len: usize, step: usize) -> Result<Array> {
    super::kernel::missing("slice_step")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn slice_step_backward(
    dy: &Array,
    dim: usize,
    start: usize,
    step: usize,
    size: usize,
) -> Result<Array> {
    super::kernel::missing("slice_step_backward")
}
