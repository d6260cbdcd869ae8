//! A tensor that every rank has, laid on a mesh.

use smallvec::SmallVec;

use super::execute::keep;
use crate::comm::{ReduceOp, Site};
use crate::layout::Layout;
use crate::mesh::{DeviceMesh, chosen};
use crate::{Error, Result, Tensor};
use dtensor_array::kernels::copy::NOTHING;
use dtensor_layout::{Partial, Placements, Ranges, chunk_of_each};

/// Lays a tensor, of which every rank has one of the same shape, on a mesh. The values are those of the rank at the mesh's
/// first coordinate; the others' are not looked at, and stay as they are.
///
/// The result is a leaf, and requires a gradient if the tensor does. A tensor that lies so already is given back.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{DType, DeviceMesh, Shard, Tensor, distribute_tensor};
/// # fn main() -> dtensor::Result<()> {
/// launch(4, |world| {
///     let mesh = DeviceMesh::new(&world, [4], "tp")?;
///     let x = Tensor::arange(0, 10, 1, DType::F32)?;
///     let sharded = distribute_tensor(&x, &mesh, [Shard(0)])?;
///     assert_eq!(sharded.dims(), [10]);
///     assert_eq!(sharded.to_local()?.numel(), [3, 3, 3, 1][world.rank()]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn distribute_tensor<'a>(
    tensor: &Tensor,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
) -> Result<Tensor> {
    distribute_tensor_from(tensor, mesh, placements, Some(0))
}

/// As [`distribute_tensor`], with the values of the rank at position `source` of every mesh dim; or of every
/// rank its own, without communication: then they must be the same.
#[track_caller]
pub fn distribute_tensor_from<'a>(
    tensor: &Tensor,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
    source: Option<usize>,
) -> Result<Tensor> {
    const OP: &str = "distribute_tensor";
    let mesh = chosen(OP, mesh.into())?;
    if !tensor.is_leaf() {
        let message = "distribute_tensor should be used to distribute leaf tensors, but this one is the result of an \
                       operator; `detach` it, or use `Tensor::from_local` and `redistribute`, which pass gradients on";
        return Err(Error::Argument { op: OP, message: message.into() });
    }
    let layout = Layout::checked(OP, &mesh, placements.into(), tensor.shape())?;
    if let Some(lies) = tensor.layout() {
        if *lies.mesh() != mesh {
            let message = format!(
                "cannot distribute a tensor to a different device mesh: found {}",
                lies.mesh().and_other(&mesh)
            );
            return Err(Error::argument(OP, message));
        }
        if lies.placements() != layout.placements() {
            let message = format!("cannot distribute a tensor {lies} to a different placements, {layout}");
            return Err(Error::argument(OP, message));
        }
        return Ok(tensor.clone());
    }
    if let Some(source) = source
        && let Some(size) = mesh.shape().iter().find(|&&size| size <= source)
    {
        let message = format!("source: there is no rank {source} along a mesh dim of size {size}");
        return Err(Error::argument(OP, message));
    }
    let laid = match (mesh.coordinate().filter(|_| !tensor.is_meta()), source) {
        // Without values, or outside the mesh, there is nothing but a shape.
        (None, _) => Tensor::full_laid(&layout, &tensor.meta(), 0)?,
        (Some(at), Some(source)) => {
            let handed = handed_out(&tensor.detach(), &mesh, &layout, at, source)?;
            if handed.dims() != &layout.local_shape()[..] || handed.dtype() != tensor.dtype() {
                let message = format!(
                    "the rank at position {source} of every mesh dim has a tensor of another shape or dtype than this \
                     rank's {} {}: it gives this rank {} {}",
                    tensor.dtype(),
                    tensor.shape(),
                    handed.dtype(),
                    handed.shape()
                );
                return Err(Error::argument(OP, message));
            }
            handed.on_layout(layout)
        }
        (Some(_), None) => {
            let plan = layout.replicated().plan_to(&layout, tensor.dtype())?;
            let part = tensor.value().part.redistribute(&plan, &layout, false, &Site::caller())?;
            Tensor::laid(part, layout)
        }
    };
    laid.requires_grad_(tensor.requires_grad())
}

/// The part of a tensor that rank `i` of `n` along a mesh dim gets.
fn piece(x: &Tensor, dim: usize, split: usize, n: usize, i: usize) -> Result<Tensor> {
    let whole: Ranges = SmallVec::from_elem(0..x.dims()[dim], 1);
    let part = keep(x.local("distribute_tensor")?, dim, &chunk_of_each(&whole, split, n, i))?;
    Ok(Tensor::of(part))
}

/// This rank's part of the source's tensor. Mesh dim by mesh dim, those that have it hand it on.
#[track_caller]
fn handed_out(x: &Tensor, mesh: &DeviceMesh, layout: &Layout, at: &[usize], source: usize) -> Result<Tensor> {
    let (mut x, global) = (x.clone(), x.shape());
    for (dim, &placement) in layout.placements().iter().enumerate() {
        if mesh.shape()[dim] == 1 {
            continue;
        }
        // The others get theirs when a later mesh dim has its turn. Until then they have something of the same shape.
        if at[dim + 1..].iter().any(|&at| at != source) {
            if let Some((tensor_dim, split)) = placement.cut() {
                x = piece(&x, tensor_dim, split, mesh.shape()[dim], at[dim])?;
            }
            continue;
        }
        let group = mesh.group(dim)?;
        x = match placement.cut() {
            None => group.broadcast_shard(&x, source, &global)?,
            Some((tensor_dim, split)) => {
                let n = mesh.shape()[dim];
                let pieces = (at[dim] == source)
                    .then(|| (0..n).map(|i| piece(&x, tensor_dim, split, n, i)).collect::<Result<Vec<_>>>())
                    .transpose()?;
                group.scatter_shards(pieces.as_deref(), source, &global)?
            }
        };
        if let (Partial(op), true) = (placement, at[dim] != 0) {
            x = match op {
                ReduceOp::Sum => x.full_like(NOTHING)?,
                ReduceOp::Product => x.ones_like()?,
                ReduceOp::Avg | ReduceOp::Max | ReduceOp::Min => x,
            };
        }
    }
    Ok(x)
}
