//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::host::loss::ClassTargets;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn nll_forward(logp: &Array, goal: &ClassTargets<'_>) -> Result<(Array, Array)> {
    super::kernel::missing("nll_forward")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn cross_entropy_forward(logits: &Array, goal: &ClassTargets<'_>) -> Result<[Array; 4]> {
    super::kernel::missing("cross_entropy_forward")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn cross_entropy_picked(logits: &Array, maxima: &Array, goal: &ClassTargets<'_>) -> Result<Array> {
    super::kernel::missing("cross_entropy_picked")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn nll_backward(scale: &Array, dims: [usize; 3], goal: &ClassTargets<'_>) -> Result<Array> {
    super::kernel::missing("nll_backward")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn cross_entropy_backward(
    logits: &Array,
    sums: [&Array; 2],
    scale: &Array,
    goal: &ClassTargets<'_>,
) -> Result<Array> {
    super::kernel::missing("cross_entropy_backward")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn cross_entropy_losses(
    like: &Array,
    found: [&Array; 3],
    goal: &ClassTargets<'_>,
) -> Result<[Array; 4]> {
    super::kernel::missing("cross_entropy_losses")
}
