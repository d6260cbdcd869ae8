//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::host::extremum::Extremum;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn extremum(f: Extremum, x: &Array, dim: usize, keepdim: bool) -> Result<(Array, Array)> {
    super::kernel::missing("extremum")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn merge(f: Extremum, values: &Array, indices: &Array) -> Result<(Array, Array)> {
    super::kernel::missing("merge")
}
