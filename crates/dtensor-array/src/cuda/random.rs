//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::host::random::{Distribution, Draw};
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn dropout(x: &Array, window: &Window, p: f64, draw: Draw) -> Result<Array> {
    super::kernel::missing("dropout")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn bernoulli_each(p: &Array, window: &Window, draw: Draw) -> Result<Array> {
    super::kernel::missing("bernoulli_each")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn draw(
    device: Device,
    distribution: Distribution,
    dtype: DType,
    window: &Window,
    draw: Draw,
) -> Result<Array> {
    super::kernel::missing("draw")
}
