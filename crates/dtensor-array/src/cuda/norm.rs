//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn layer_norm(
    x: &Array,
    dims: usize,
    weight: Option<&Array>,
    bias: Option<&Array>,
    eps: f64,
) -> Result<(Array, Array, Array)> {
    super::kernel::missing("layer_norm")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn rms_norm(x: &Array, dims: usize, weight: Option<&Array>, eps: f64) -> Result<(Array, Array)> {
    super::kernel::missing("rms_norm")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn layer_norm_backward(
    dy: &Array,
    x: &Array,
    mean: &Array,
    rstd: &Array,
    weight: Option<&Array>,
    dims: usize,
    need_weight: Option<DType>,
    need_bias: Option<DType>,
) -> Result<(Array, Option<Array>, Option<Array>)> {
    super::kernel::missing("layer_norm_backward")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn rms_norm_backward(
    dy: &Array,
    x: &Array,
    rstd: &Array,
    weight: Option<&Array>,
    dims: usize,
    need_weight: Option<DType>,
) -> Result<(Array, Option<Array>)> {
    super::kernel::missing("rms_norm_backward")
}
