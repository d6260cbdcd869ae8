//! Gradients that are too large are made smaller.

use std::collections::HashSet;
use std::panic::Location;

use super::expect_whole;
use crate::comm::{ReduceOp, Site};
use crate::mesh::DeviceMesh;
use crate::nn::Parameter;
use crate::{DType, Error, Placement, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::{cast, optim, reduce};
use dtensor_array::origin::{asked_by, on_behalf_of};

/// How [`clip_grad_norm`] measures.
///
/// ```
/// use dtensor::optim::ClipOptions;
/// let largest = ClipOptions { norm_type: f64::INFINITY, ..Default::default() };
/// assert!(ClipOptions::default().norm_type == 2.0 && !largest.error_if_nonfinite);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipOptions {
    /// Which norm: 2 for the Euclidean one, 1 for the sum of magnitudes, ∞ for the largest magnitude, or any other p.
    pub norm_type: f64,
    /// Whether a norm that is infinite or no number is an error; else the gradients become 0 or NaN.
    pub error_if_nonfinite: bool,
}

impl Default for ClipOptions {
    fn default() -> Self {
        ClipOptions { norm_type: 2.0, error_if_nonfinite: false }
    }
}

/// If the norm of all gradients together is larger than `max_norm`, makes them smaller so that it no longer is. Returns the
/// norm that they had: a number that does not lie on a mesh, and the same on all ranks.
///
/// Parameters may lie in any way, on several meshes and on none. What ranks have in common counts once. There is one all-reduce
/// for all parameters of one mesh, and none if none of them is cut. All ranks of the meshes must call this. Parameters without a
/// gradient do not count, and one that comes twice counts once.
///
/// ```
/// use dtensor::nn::Parameter;
/// use dtensor::optim::{ClipOptions, clip_grad_norm};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let weight = Parameter::new(&Tensor::ones([2], DType::F64)?)?;
/// weight.get().mul(&Tensor::from_slice(&[3.0, 4.0], [2])?)?.sum_all()?.backward()?;
/// let norm = clip_grad_norm(&[weight.clone()], 1.0, ClipOptions::default())?;
/// assert_eq!(norm.item::<f64>()?, 5.0);
/// let clipped = weight.grad().unwrap().to_vec::<f64>()?;
/// assert!((clipped[0] - 0.6).abs() < 1e-6 && (clipped[1] - 0.8).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn clip_grad_norm(parameters: &[Parameter], max_norm: f64, options: ClipOptions) -> Result<Tensor> {
    const OP: &str = "clip_grad_norm";
    expect_bound(OP, "max_norm", max_norm)?;
    let parameters = with_grads(OP, parameters)?;
    let (total, dtype) = norm(OP, &parameters, options.norm_type)?;
    if options.error_if_nonfinite && !total.is_finite() {
        let message = format!(
            "the total norm of order {} for gradients is non-finite ({total}), so it cannot be clipped; \
             `error_if_nonfinite: false` scales the gradients by the non-finite norm all the same",
            options.norm_type
        );
        return Err(Error::argument(OP, message));
    }
    // As PyTorch has it, so that a norm of 0 can be divided by.
    let factor = max_norm / (total + 1e-6);
    // What is no number goes on to the gradients.
    if factor < 1.0 || factor.is_nan() {
        change(&parameters, |part| optim::scale(part, factor))?;
    }
    number(total, dtype)
}

/// The norm of all gradients together, as [`clip_grad_norm`] finds it.
///
/// ```
/// use dtensor::nn::Parameter;
/// use dtensor::optim::grad_norm;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let weights = [Parameter::new(&Tensor::ones([2], DType::F32)?)?, Parameter::new(&Tensor::ones([3], DType::F32)?)?];
/// assert_eq!(grad_norm(&weights, 1.0)?.item::<f32>()?, 0.0);
/// for weight in &weights {
///     weight.get().mul(-2.0)?.sum_all()?.backward()?;
/// }
/// assert_eq!(grad_norm(&weights, 1.0)?.item::<f32>()?, 10.0);
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn grad_norm(parameters: &[Parameter], norm_type: f64) -> Result<Tensor> {
    const OP: &str = "grad_norm";
    let (total, dtype) = norm(OP, &with_grads(OP, parameters)?, norm_type)?;
    number(total, dtype)
}

/// Brings every element of the gradients to between −`clip_value` and `clip_value`.
///
/// ```
/// use dtensor::nn::Parameter;
/// use dtensor::optim::clip_grad_value;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let weight = Parameter::new(&Tensor::ones([3], DType::F32)?)?;
/// weight.get().mul(&Tensor::from_slice(&[-3f32, 0.5, 4.0], [3])?)?.sum_all()?.backward()?;
/// clip_grad_value(&[weight.clone()], 1.0)?;
/// assert_eq!(weight.grad().unwrap().to_vec::<f32>()?, [-1., 0.5, 1.]);
/// # Ok(())
/// # }
/// ```
pub fn clip_grad_value(parameters: &[Parameter], clip_value: f64) -> Result<()> {
    const OP: &str = "clip_grad_value";
    expect_bound(OP, "clip_value", clip_value)?;
    change(&with_grads(OP, parameters)?, |part| optim::clamp(part, clip_value))
}

/// An error for what is no bound of magnitudes.
fn expect_bound(op: &'static str, what: &str, bound: f64) -> Result<()> {
    if bound >= 0.0 { Ok(()) } else { Err(Error::argument(op, format!("invalid {what}: {bound}"))) }
}

/// Those that have a gradient, each once.
fn with_grads<'a>(op: &'static str, parameters: &'a [Parameter]) -> Result<Vec<&'a Parameter>> {
    let mut seen = HashSet::new();
    let mut found = Vec::new();
    for parameter in parameters {
        if let Some(grad) = parameter.grad()
            && seen.insert(parameter.address())
        {
            expect_whole(op, &grad)?;
            found.push(parameter);
        }
    }
    Ok(found)
}

/// Changes this rank's parts of the gradients, where they are if nobody holds them.
fn change(parameters: &[&Parameter], f: impl Fn(&mut Array) -> Result<()>) -> Result<()> {
    for parameter in parameters {
        parameter.change_grad(|grad| grad.part_mut().map_or(Ok(()), &f))?;
    }
    Ok(())
}

/// A number of a dtype that gradients were measured in.
fn number(x: f64, dtype: DType) -> Result<Tensor> {
    Tensor::scalar(x)?.to_dtype(dtype)
}

/// How the norms of parts make up the norm of the whole.
#[derive(Clone, Copy)]
struct Sum {
    p: f64,
    op: ReduceOp,
}

impl Sum {
    fn new(op: &'static str, p: f64) -> Result<Self> {
        let reduce = match p {
            _ if p.is_nan() => return Err(Error::argument(op, "norm_type is not a number")),
            f64::INFINITY => ReduceOp::Max,
            f64::NEG_INFINITY => ReduceOp::Min,
            _ => ReduceOp::Sum,
        };
        Ok(Sum { p, op: reduce })
    }

    /// That of no elements.
    fn nothing(self) -> f64 {
        if self.op == ReduceOp::Min { f64::INFINITY } else { 0.0 }
    }

    fn add(self, a: f64, b: f64) -> f64 {
        match self.op {
            _ if a.is_nan() || b.is_nan() => f64::NAN,
            ReduceOp::Max => a.max(b),
            ReduceOp::Min => a.min(b),
            _ => a + b,
        }
    }

    /// The summand of an array.
    fn of(self, part: &Array) -> Result<f64> {
        // Of half precision, a norm would be rounded to half precision.
        let part = if part.dtype().size() < 4 { &cast::cast(part, DType::F32)? } else { part };
        let dims: Vec<usize> = (0..part.dims().len()).collect();
        let norm =
            cast::cast(&reduce::norm(part, self.p, &dims, false)?, DType::F64)?.copy_to_host::<f64>()?[0];
        Ok(match self.p {
            2.0 => norm * norm,
            _ if self.op != ReduceOp::Sum || self.p == 0.0 => norm,
            p => norm.powf(p),
        })
    }

    fn norm(self, sum: f64) -> f64 {
        match self.p {
            2.0 => sum.sqrt(),
            _ if self.op != ReduceOp::Sum || self.p == 0.0 => sum,
            p => sum.powf(1.0 / p),
        }
    }
}

/// The gradients that lie on one mesh.
struct OnMesh<'a> {
    mesh: &'a DeviceMesh,
    /// This rank's place in it.
    here: &'a [usize],
    grads: Vec<&'a Tensor>,
}

impl OnMesh<'_> {
    /// The mesh dims that some gradient is cut along.
    fn cut(&self) -> Vec<usize> {
        let is_cut = |dim: &usize| {
            self.mesh.shape()[*dim] > 1 && self.grads.iter().any(|grad| cuts(&grad.placements()[*dim]))
        };
        (0..self.mesh.ndim()).filter(is_cut).collect()
    }

    /// What all of them add to the sum: the same on all ranks.
    fn sum(&self, op: &'static str, sum: Sum, at: &'static Location<'static>) -> Result<f64> {
        let cut = self.cut();
        let mut total = sum.nothing();
        for grad in &self.grads {
            // Of several ranks that have the same part, the first one counts.
            let first = |&dim: &usize| cuts(&grad.placements()[dim]) || self.here[dim] == 0;
            if cut.iter().all(first) {
                total = sum.add(total, sum.of(grad.part(op)?)?);
            }
        }
        if cut.is_empty() {
            return Ok(total);
        }
        let group = self.mesh.group_over(&cut, Site::of(at))?;
        on_behalf_of(at, || group.all_reduce(&Tensor::scalar(total)?, sum.op))?.item::<f64>()
    }
}

fn cuts(placement: &Placement) -> bool {
    !placement.is_replicate()
}

/// The norm, and the dtype that it is to have.
#[track_caller]
fn norm(op: &'static str, parameters: &[&Parameter], p: f64) -> Result<(f64, DType)> {
    let at = asked_by(Location::caller());
    let sum = Sum::new(op, p)?;
    let mut dtype = DType::F32;
    let (mut plain, mut meshes): (Vec<&Tensor>, Vec<OnMesh<'_>>) = (Vec::new(), Vec::new());
    let grads: Vec<Tensor> = parameters.iter().filter_map(|parameter| parameter.grad()).collect();
    for grad in &grads {
        // A value that is not there is found before anybody waits for it.
        grad.part(op)?;
        if grad.dtype() == DType::F64 {
            dtype = DType::F64;
        }
        match grad.mesh() {
            None => plain.push(grad),
            Some(mesh) => match meshes.iter_mut().find(|known| known.mesh == mesh) {
                Some(known) => known.grads.push(grad),
                None => {
                    let here = mesh.coordinate().ok_or_else(|| mesh.outside(op))?;
                    meshes.push(OnMesh { mesh, here, grads: vec![grad] });
                }
            },
        }
    }
    if grads.is_empty() {
        return Ok((0.0, dtype));
    }
    let mut total = sum.nothing();
    for grad in plain {
        total = sum.add(total, sum.of(grad.part(op)?)?);
    }
    for on_mesh in &meshes {
        total = sum.add(total, on_mesh.sum(op, sum, at)?);
    }
    Ok((sum.norm(total), dtype))
}
