//! TODO-FAMILY
#![allow(unused)]
use crate::host;
use crate::host::attention::AttentionOptions;
use crate::{Array, DType, Device, Result, Window};
#[allow(clippy::too_many_arguments)]
pub(crate) fn attention_forward(
    q: &Array,
    k: &Array,
    v: &Array,
    mask: Option<&Array>,
    options: &AttentionOptions<'_>,
) -> Result<(Array, Array)> {
    super::kernel::missing("attention_forward")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn attention_backward(
    grad: &Array,
    q: &Array,
    k: &Array,
    v: &Array,
    mask: Option<&Array>,
    out: &Array,
    lse: &Array,
    options: &AttentionOptions<'_>,
) -> Result<(Array, Array, Array)> {
    super::kernel::missing("attention_backward")
}
