//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn affine(x: &Array, mul: f64, add: f64) -> Result<Array> {
    super::kernel::missing("affine")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn pow_scalar(x: &Array, e: f64) -> Result<Array> {
    super::kernel::missing("pow_scalar")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn clamp(x: &Array, lo: Option<f64>, hi: Option<f64>) -> Result<Array> {
    super::kernel::missing("clamp")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn clamp_grad(x: &Array, lo: Option<f64>, hi: Option<f64>, dy: &Array) -> Result<Array> {
    super::kernel::missing("clamp_grad")
}
