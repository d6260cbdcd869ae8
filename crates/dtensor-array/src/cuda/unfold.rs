//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::host::unfold::Windows;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn unfold(x: &Array, windows: [Windows; 2], counts: [usize; 2]) -> Result<Array> {
    super::kernel::missing("unfold")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn fold(
    cols: &Array,
    windows: [Windows; 2],
    counts: [usize; 2],
    sizes: [usize; 2],
) -> Result<Array> {
    super::kernel::missing("fold")
}
