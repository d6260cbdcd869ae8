//! The steps of a plan, done.

use super::plan::{Action, Plan};
use crate::comm::{ReduceOp, Site};
use crate::engine::Local;
use crate::engine::kernels::copy::NOTHING;
use crate::engine::kernels::{cat, copy, scalar};
use crate::mesh::DeviceMesh;
use crate::tensor::Shape;
use crate::{Error, Result};

/// This rank's part after a plan. `grad` says whether a gradient will come back the same way, `at` which line asked.
pub(crate) fn execute(plan: &Plan, mesh: &DeviceMesh, part: &Local, grad: bool, at: &Site) -> Result<Local> {
    let mut part = part.clone();
    for action in plan.steps().iter().flat_map(|step| &step.actions) {
        part = act(action, mesh, part, grad, at)?;
    }
    Ok(part)
}

fn act(action: &Action, mesh: &DeviceMesh, x: Local, grad: bool, at: &Site) -> Result<Local> {
    match action {
        Action::Communicate { over, collective } => {
            mesh.group_over(over, at.clone())?.communicate_local(collective.clone(), x, grad, at.clone())
        }
        Action::Keep { dim, ranges } => keep(&x, *dim, ranges),
        Action::Embed { dim, start, len } => cat::pad_slice(&x, *dim, *start, *len, NOTHING),
        Action::Divide { op, all } => match op {
            ReduceOp::Sum if !all => copy::full(x.dtype(), x.dims(), NOTHING),
            ReduceOp::Product if !all => copy::full(x.dtype(), x.dims(), 1.0),
            _ => Ok(x),
        },
        Action::Scale { by } => scale(&x, *by),
    }
}

/// A copy of some indices of a dim: a view would keep the whole alive.
pub(crate) fn keep(x: &Local, dim: usize, ranges: &[std::ops::Range<usize>]) -> Result<Local> {
    match ranges {
        [all] if all.len() == x.dims()[dim] => Ok(x.clone()),
        [] => copy::full(x.dtype(), &Shape::from(x.dims()).with_dim(dim, 0), 0.0),
        [one] => copy::contiguous(&narrow(x, dim, one)?),
        several => {
            let parts = several.iter().map(|range| narrow(x, dim, range)).collect::<Result<Vec<_>>>()?;
            cat::cat(&parts.iter().collect::<Vec<_>>(), dim)
        }
    }
}

fn narrow(x: &Local, dim: usize, range: &std::ops::Range<usize>) -> Result<Local> {
    x.narrow(dim, range.start, range.len())
}

fn scale(x: &Local, by: usize) -> Result<Local> {
    if x.dtype().is_int() {
        let why = "an average needs a floating-point dtype";
        return Err(Error::DType { op: "redistribute", dtype: x.dtype(), why });
    }
    scalar::affine(x, 1.0 / by as f64, 0.0)
}
