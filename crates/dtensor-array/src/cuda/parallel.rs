//! TODO-FAMILY
#![allow(unused)]
use crate::host::parallel::Work;
use crate::{Array, ReduceOp, Result};
pub(crate) fn reduce(
    op: ReduceOp,
    inputs: &[&Array],
    split: Option<(usize, &[usize])>,
) -> Result<Box<dyn Work>> {
    super::kernel::missing("reduce")
}
pub(crate) fn concatenate(outputs: Vec<(usize, Vec<Array>)>) -> Result<Box<dyn Work>> {
    super::kernel::missing("concatenate")
}
