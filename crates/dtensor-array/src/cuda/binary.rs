//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::host::binary::{Binary, Compare};
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn binary(f: Binary, a: &Array, b: &Array) -> Result<Array> {
    super::kernel::missing("binary")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn compare(f: Compare, a: &Array, b: &Array) -> Result<Array> {
    super::kernel::missing("compare")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn between(a: &Array, b: &Array, weight: f64) -> Result<Array> {
    super::kernel::missing("between")
}
