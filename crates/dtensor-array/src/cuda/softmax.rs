//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn softmax(x: &Array, dim: usize) -> Result<Array> {
    super::kernel::missing("softmax")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn log_softmax(x: &Array, dim: usize) -> Result<Array> {
    super::kernel::missing("log_softmax")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn softmax_backward(y: &Array, dy: &Array, dim: usize) -> Result<Array> {
    super::kernel::missing("softmax_backward")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn log_softmax_backward(y: &Array, dy: &Array, dim: usize) -> Result<Array> {
    super::kernel::missing("log_softmax_backward")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn maxima(x: &Array, dim: usize) -> Result<Array> {
    super::kernel::missing("maxima")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn exp_sums(x: &Array, maxima: &Array, dim: usize) -> Result<Array> {
    super::kernel::missing("exp_sums")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn normalised(x: &Array, maxima: &Array, sums: &Array, dim: usize, log: bool) -> Result<Array> {
    super::kernel::missing("normalised")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn backward_sums(y: &Array, dy: &Array, dim: usize, log: bool) -> Result<Array> {
    super::kernel::missing("backward_sums")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn backward_with(y: &Array, dy: &Array, sums: &Array, dim: usize, log: bool) -> Result<Array> {
    super::kernel::missing("backward_with")
}
