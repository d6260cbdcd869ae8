//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::host::optim::{AdamStep, SgdStep};
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn sgd(
    step: &SgdStep,
    value: &mut Array,
    grad: &Array,
    momentum: Option<&mut Array>,
) -> Result<()> {
    super::kernel::missing("sgd")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn scale(x: &mut Array, by: f64) -> Result<()> {
    super::kernel::missing("scale")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn clamp(x: &mut Array, bound: f64) -> Result<()> {
    super::kernel::missing("clamp")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn adam(
    step: &AdamStep,
    value: &mut Array,
    grad: &Array,
    moments: [&mut Array; 2],
    largest: Option<&mut Array>,
) -> Result<()> {
    super::kernel::missing("adam")
}
