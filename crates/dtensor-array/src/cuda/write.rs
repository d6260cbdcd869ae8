//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn slice_write(x: &Array, source: &Array, dim: usize, start: usize, step: usize) -> Result<Array> {
    super::kernel::missing("slice_write")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn index_write(
    x: &Array,
    ids: &Array,
    source: &Array,
    dim: usize,
    part: crate::host::index::DimShard,
) -> Result<Array> {
    super::kernel::missing("index_write")
}
