//! Gradient clipping.

use std::collections::HashSet;
use std::panic::Location;

use super::expect_not_partial;
use crate::comm::{ReduceOp, Site};
use crate::mesh::DeviceMesh;
use crate::nn::Parameter;
use crate::{DType, Error, Placement, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::Device;
use dtensor_array::kernels::binary::{Binary, binary};
use dtensor_array::kernels::clip::scale_by;
use dtensor_array::kernels::scalar::{affine, clamp, pow_scalar};
use dtensor_array::kernels::unary::{Unary, unary};
use dtensor_array::kernels::{cast, cat, copy, optim, reduce};
use dtensor_array::origin::{caller_line, with_caller_line};

/// Options of [`clip_grad_norm`].
///
/// ```
/// use dtensor::optim::ClipOptions;
/// let largest = ClipOptions { norm_type: f64::INFINITY, ..Default::default() };
/// assert!(ClipOptions::default().norm_type == 2.0 && !largest.error_if_nonfinite);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipOptions {
    /// The order p of the norm: 2 for the Euclidean norm, 1 for the sum of absolute values, ∞ for the largest
    /// absolute value, or any other p.
    pub norm_type: f64,
    /// If true, an infinite or NaN norm is an error; else the gradients are scaled by it and become 0 or NaN.
    pub error_if_nonfinite: bool,
}

impl Default for ClipOptions {
    fn default() -> Self {
        ClipOptions { norm_type: 2.0, error_if_nonfinite: false }
    }
}

/// Scales the gradients so that their total norm is at most `max_norm`, and returns the norm before clipping: a plain
/// scalar that is equal on all ranks. Nothing waits for a GPU, unless `error_if_nonfinite` is set.
///
/// Parameters can have any layout, on several meshes or none. Replicated elements count once. There is one all-reduce
/// per mesh on which some gradient is sharded. This is a collective: all ranks of the meshes must call it. Parameters
/// without a gradient are skipped, and duplicates count once.
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
    if options.error_if_nonfinite {
        let total = total.copy_to_host::<f64>()?[0];
        if !total.is_finite() {
            let message = format!(
                "the total norm of order {} for gradients is non-finite ({total}), so it cannot be clipped; \
                 `error_if_nonfinite: false` scales the gradients by the non-finite norm all the same",
                options.norm_type
            );
            return Err(Error::argument(OP, message));
        }
    }
    // PyTorch adds the same constant. It also avoids dividing by a norm of 0.
    let limit = copy::full(total.device(), DType::F64, &[], max_norm)?;
    let factor = binary(Binary::Div, &limit, &affine(&total, 1.0, 1e-6)?)?;
    // Gradients are never made larger. NaN is passed on to them.
    let factor = clamp(&factor, None, Some(1.0))?;
    change_grads(&parameters, |part| scale_by(part, &factor.to_device(part.device())?))?;
    Tensor::of(total).to_dtype(dtype)
}

/// Returns the total norm of all gradients, computed as [`clip_grad_norm`] does.
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
    Tensor::of(total).to_dtype(dtype)
}

/// Clamps every element of the gradients to between −`clip_value` and `clip_value`.
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
    change_grads(&with_grads(OP, parameters)?, |part| optim::clamp(part, clip_value))
}

/// Returns an error unless a bound is a non-negative number.
fn expect_bound(op: &'static str, what: &str, bound: f64) -> Result<()> {
    if bound >= 0.0 { Ok(()) } else { Err(Error::argument(op, format!("invalid {what}: {bound}"))) }
}

/// Returns the parameters that have a gradient, each once.
fn with_grads<'a>(op: &'static str, parameters: &'a [Parameter]) -> Result<Vec<&'a Parameter>> {
    let mut seen = HashSet::new();
    let mut found = Vec::new();
    for parameter in parameters {
        if let Some(grad) = parameter.grad()
            && seen.insert(parameter.address())
        {
            expect_not_partial(op, &grad)?;
            found.push(parameter);
        }
    }
    Ok(found)
}

/// Changes this rank's shards of the gradients, in place if their memory is not shared.
fn change_grads(parameters: &[&Parameter], f: impl Fn(&mut Array) -> Result<()>) -> Result<()> {
    for parameter in parameters {
        parameter.change_grad(|grad| grad.local_array_mut()?.map_or(Ok(()), &f))?;
    }
    Ok(())
}

/// How the norms of shards combine to the total norm.
#[derive(Clone, Copy)]
struct NormReduction {
    p: f64,
    op: ReduceOp,
}

impl NormReduction {
    fn new(op: &'static str, p: f64) -> Result<Self> {
        let reduce = match p {
            _ if p.is_nan() => return Err(Error::argument(op, "norm_type is not a number")),
            f64::INFINITY => ReduceOp::Max,
            f64::NEG_INFINITY => ReduceOp::Min,
            _ => ReduceOp::Sum,
        };
        Ok(NormReduction { p, op: reduce })
    }

    /// Returns the contribution of an array: one number.
    fn contribution(self, part: &Array) -> Result<Array> {
        // The norm of a half-precision array would be rounded to half precision, so compute it in `f32`.
        let part = if part.dtype().size() < 4 { &cast::cast(part, DType::F32)? } else { part };
        let dims: Vec<usize> = (0..part.dims().len()).collect();
        let norm = cast::cast(&reduce::norm(part, self.p, &dims, false)?, DType::F64)?;
        match self.p {
            2.0 => binary(Binary::Mul, &norm, &norm),
            _ if self.op != ReduceOp::Sum || self.p == 0.0 => Ok(norm),
            p => pow_scalar(&norm, p),
        }
    }

    /// Combines contributions, in order, on a device.
    fn combine(self, parts: &[Array], device: Device) -> Result<Array> {
        if parts.is_empty() {
            let none = if self.op == ReduceOp::Min { f64::INFINITY } else { 0.0 };
            return copy::full(device, DType::F64, &[], none);
        }
        let row = |part: &Array| part.to_device(device)?.reshape(&[1]);
        let rows: Vec<Array> = parts.iter().map(row).collect::<Result<_>>()?;
        reduce::reduce(self.op.into(), &cat::cat(&rows.iter().collect::<Vec<_>>(), 0)?, &[0], false)
    }

    /// Returns the norm of all contributions together.
    fn norm(self, total: &Array) -> Result<Array> {
        match self.p {
            2.0 => unary(Unary::Sqrt, total),
            _ if self.op != ReduceOp::Sum || self.p == 0.0 => Ok(total.clone()),
            p => pow_scalar(total, 1.0 / p),
        }
    }
}

/// The gradients on one mesh.
struct MeshGrads<'a> {
    mesh: &'a DeviceMesh,
    /// This rank's coordinate in the mesh.
    coordinate: &'a [usize],
    grads: Vec<&'a Tensor>,
}

impl MeshGrads<'_> {
    /// Returns the mesh dims along which some gradient is sharded.
    fn sharded_dims(&self) -> Vec<usize> {
        let has_shards = |dim: &usize| {
            self.mesh.shape()[*dim] > 1 && self.grads.iter().any(|grad| is_sharded(&grad.placements()[*dim]))
        };
        (0..self.mesh.ndim()).filter(has_shards).collect()
    }

    /// Returns the contribution of all gradients on the mesh. It is equal on all ranks.
    fn total(
        &self,
        op: &'static str,
        reduction: NormReduction,
        at: &'static Location<'static>,
    ) -> Result<Array> {
        let sharded = self.sharded_dims();
        let mut parts = Vec::new();
        for grad in &self.grads {
            // Of several ranks with the same shard, only the first one counts.
            let first = |&dim: &usize| is_sharded(&grad.placements()[dim]) || self.coordinate[dim] == 0;
            if sharded.iter().all(first) {
                parts.push(reduction.contribution(grad.local_array(op)?)?);
            }
        }
        let total = reduction.combine(&parts, self.grads[0].device())?;
        if sharded.is_empty() {
            return Ok(total);
        }
        let group = self.mesh.group_over(&sharded, Site::of(at))?;
        let total = with_caller_line(at, || group.all_reduce(&Tensor::of(total), reduction.op))?;
        Ok(total.local_array(op)?.clone())
    }
}

fn is_sharded(placement: &Placement) -> bool {
    !placement.is_replicate()
}

/// Returns the total norm, and the dtype that the result has.
#[track_caller]
fn norm(op: &'static str, parameters: &[&Parameter], p: f64) -> Result<(Array, DType)> {
    let at = caller_line(Location::caller());
    let reduction = NormReduction::new(op, p)?;
    let mut dtype = DType::F32;
    let (mut plain, mut meshes): (Vec<&Tensor>, Vec<MeshGrads<'_>>) = (Vec::new(), Vec::new());
    let grads: Vec<Tensor> = parameters.iter().filter_map(|parameter| parameter.grad()).collect();
    for grad in &grads {
        // A gradient without a value is an error, found before any rank starts to communicate.
        grad.local_array(op)?;
        if grad.dtype() == DType::F64 {
            dtype = DType::F64;
        }
        match grad.mesh() {
            None => plain.push(grad),
            Some(mesh) => match meshes.iter_mut().find(|known| known.mesh == mesh) {
                Some(known) => known.grads.push(grad),
                None => {
                    let coordinate = mesh.coordinate().ok_or_else(|| mesh.not_in_mesh_error(op))?;
                    meshes.push(MeshGrads { mesh, coordinate, grads: vec![grad] });
                }
            },
        }
    }
    let Some(first) = grads.first() else {
        return Ok((copy::full(Device::Cpu, DType::F64, &[], 0.0)?, dtype));
    };
    let mut parts = Vec::new();
    for grad in plain {
        parts.push(reduction.contribution(grad.local_array(op)?)?);
    }
    for on_mesh in &meshes {
        parts.push(on_mesh.total(op, reduction, at)?);
    }
    Ok((reduction.norm(&reduction.combine(&parts, first.device())?)?, dtype))
}
