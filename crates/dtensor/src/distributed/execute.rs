//! Executes redistribution plans.

use dtensor_array::kernels::copy::NOTHING;
use dtensor_array::kernels::{cat, copy, scalar};
use dtensor_array::{Array, ReduceOp};
use dtensor_layout::{Action, Plan, Transfer};

use crate::comm::{Collective, Site};
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::tensor::LocalTensor;
use crate::{Error, Result};

impl LocalTensor {
    /// Redistributes this rank's shard by a plan that ends in the layout `to`. `grad` is true if a gradient will be redistributed
    /// back; `at` is the line that asked.
    pub(crate) fn redistribute(
        &self,
        plan: &Plan,
        to: &Layout,
        grad: bool,
        at: &Site,
    ) -> Result<LocalTensor> {
        let LocalTensor::Array(array) = self else {
            return Ok(LocalTensor::of_meta(to.local_shape().clone(), self.meta().dtype));
        };
        let mut array = array.clone();
        for action in plan.steps().iter().flat_map(|step| step.actions()) {
            array = run_action(action, to.mesh(), array, grad, at)?;
        }
        Ok(LocalTensor::Array(array))
    }
}

fn run_action(action: &Action, mesh: &DeviceMesh, x: Array, grad: bool, at: &Site) -> Result<Array> {
    match action {
        Action::Communicate { over, transfer } => {
            mesh.group_over(over, at.clone())?.communicate(collective(transfer), x, grad, at.clone())
        }
        Action::Keep { dim, ranges } => copy_ranges(&x, *dim, ranges),
        Action::Embed { dim, start, len } => Ok(cat::pad_slice(&x, *dim, *start, *len, NOTHING)?),
        Action::Divide { op, all } => match op {
            ReduceOp::Sum if !all => Ok(copy::full(x.dtype(), x.dims(), NOTHING)?),
            ReduceOp::Product if !all => Ok(copy::full(x.dtype(), x.dims(), 1.0)?),
            _ => Ok(x),
        },
        Action::Scale { by } => scale(&x, *by),
    }
}

/// Copies ranges of indices along a dim. Not a view, because a view would keep the memory of the full array.
pub(super) fn copy_ranges(x: &Array, dim: usize, ranges: &[std::ops::Range<usize>]) -> Result<Array> {
    let narrow = |range: &std::ops::Range<usize>| x.narrow(dim, range.start, range.len());
    Ok(match ranges {
        [all] if all.len() == x.dims()[dim] => x.clone(),
        [] => copy::full(x.dtype(), &x.shape().with_dim(dim, 0), 0.0)?,
        [one] => copy::contiguous(&narrow(one)?)?,
        several => {
            let parts = several.iter().map(narrow).collect::<Result<Vec<_>>>()?;
            cat::cat(&parts.iter().collect::<Vec<_>>(), dim)?
        }
    })
}

fn scale(x: &Array, by: usize) -> Result<Array> {
    if x.dtype().is_int() {
        let why = "an average needs a floating-point dtype";
        return Err(Error::DType { op: "redistribute", dtype: x.dtype(), why });
    }
    scalar::affine(x, 1.0 / by as f64, 0.0)
}

/// Converts a transfer of a plan to the collective that does it.
fn collective(transfer: &Transfer) -> Collective {
    match transfer.clone() {
        Transfer::AllReduce { op } => Collective::AllReduce { op },
        Transfer::AllGather { dim, sizes } => Collective::AllGather { dim, sizes },
        Transfer::ReduceScatter { op, dim, sizes } => Collective::ReduceScatter { op, dim, sizes },
        Transfer::AllToAll { split_dim, send, cat_dim, receive } => {
            Collective::AllToAll { split_dim, send, cat_dim, receive }
        }
    }
}
