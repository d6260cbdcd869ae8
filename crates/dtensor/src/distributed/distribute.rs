//! [`distribute_tensor`]: makes a distributed tensor of one that every rank has.

use smallvec::SmallVec;

use super::execute::copy_ranges;
use super::replicated::Taker;
use crate::comm::{ReduceOp, Site};
use crate::layout::Layout;
use crate::mesh::{DeviceMesh, mesh_or_active};
use crate::{Error, Result, Tensor};
use dtensor_array::kernels::copy::NOTHING;
use dtensor_layout::{Partial, Placements, Ranges, chunk_of_each};

const OP: &str = "distribute_tensor";

/// Distributes a tensor over a mesh: each rank gets its shard of the tensor of the first rank.
///
/// Every rank passes a tensor of the same shape and dtype. The values come from the rank at the first coordinate of the mesh; those
/// of other ranks are ignored. All ranks of the mesh must call this. `mesh` may be `None` inside [`use_mesh`](crate::use_mesh).
///
/// The result is a leaf, and requires a gradient if the tensor does. A tensor that already has this layout is returned as it is.
/// Returns an error for the result of an operator: use [`Tensor::from_local`] and [`Tensor::redistribute`] there, which pass
/// gradients on.
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

/// Distributes a tensor like [`distribute_tensor`], with the values of the rank at index `source` along every mesh dim.
///
/// With `None`, each rank takes its shard from its own tensor, without communication. The tensors must then be equal on all ranks.
/// Along mesh dims with [`Replicate`](crate::Replicate), [`check_replicated`](crate::check_replicated) finds a difference.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{DType, DeviceMesh, Shard, Tensor, distribute_tensor_from};
/// # fn main() -> dtensor::Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], ())?;
///     let x = Tensor::full([2], world.rank() as f64, DType::F32)?;
///     let last = distribute_tensor_from(&x, &mesh, [Shard(0)], Some(1))?;
///     assert_eq!(last.to_local()?.to_vec::<f32>()?, [1.]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn distribute_tensor_from<'a>(
    tensor: &Tensor,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
    source: Option<usize>,
) -> Result<Tensor> {
    let mesh = mesh_or_active(OP, mesh.into())?;
    distribute_as(tensor, mesh, placements.into(), source, Taker { by: OP, argument: &"tensor" })
}

/// Same as [`distribute_tensor_from`], for a caller whose name errors about replicated tensors show.
#[track_caller]
pub(crate) fn distribute_as(
    tensor: &Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    source: Option<usize>,
    taker: Taker<'_>,
) -> Result<Tensor> {
    if !tensor.is_leaf() {
        let message = "distribute_tensor should be used to distribute leaf tensors, but this one is the result of an \
                       operator; `detach` it, or use `Tensor::from_local` and `redistribute`, which pass gradients on";
        return Err(Error::Argument { op: OP, message: message.into() });
    }
    let layout = Layout::checked(OP, &mesh, placements, tensor.shape())?;
    if let Some(current) = tensor.layout() {
        if *current.mesh() != mesh {
            let message = format!(
                "cannot distribute a tensor to a different device mesh: found {}",
                current.mesh().show_difference(&mesh)
            );
            return Err(Error::argument(OP, message));
        }
        if current.placements() != layout.placements() {
            let message = format!(
                "cannot distribute a tensor {current} to a different placements, {layout}: use `redistribute`"
            );
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
    let distributed = match (mesh.coordinate().filter(|_| !tensor.is_meta()), source) {
        // A meta tensor and a rank outside the mesh have no values to send.
        (None, _) => Tensor::full_on(&layout, &tensor.meta(), 0)?,
        (Some(at), Some(source)) => {
            // The source may have sent it from another GPU.
            let shard =
                scatter_from(&tensor.detach(), &mesh, &layout, at, source)?.to_device(tensor.device())?;
            if shard.dims() != &layout.local_shape()[..] || shard.dtype() != tensor.dtype() {
                let message = format!(
                    "all ranks must pass a tensor of the same shape and dtype: this rank passed {} {}, and got a shard {} {} \
                     from the source, the rank at index {source} along every mesh dim",
                    tensor.dtype(),
                    tensor.shape(),
                    shard.dtype(),
                    shard.shape()
                );
                return Err(Error::argument(OP, message));
            }
            shard.on_layout(layout)
        }
        (Some(_), None) => {
            taker.note(tensor, &mesh, layout.placements())?;
            let plan = layout.replicated().plan_to(&layout, tensor.dtype())?;
            let part = tensor.value().part.redistribute(&plan, &layout, false, &Site::caller())?;
            Tensor::from_shard(part, layout)
        }
    };
    distributed.requires_grad_(tensor.requires_grad())
}

/// Copies the chunk of a tensor that rank `i` of `n` along a mesh dim gets.
fn copy_chunk(x: &Tensor, dim: usize, split: usize, n: usize, i: usize) -> Result<Tensor> {
    let all: Ranges = SmallVec::from_elem(0..x.dims()[dim], 1);
    let chunk = copy_ranges(x.local("distribute_tensor")?, dim, &chunk_of_each(&all, split, n, i))?;
    Ok(Tensor::of(chunk))
}

/// Returns this rank's shard of the source's tensor. Works mesh dim by mesh dim: the ranks that have the values scatter or broadcast
/// them along the next dim.
#[track_caller]
fn scatter_from(
    x: &Tensor,
    mesh: &DeviceMesh,
    layout: &Layout,
    at: &[usize],
    source: usize,
) -> Result<Tensor> {
    let (mut x, global) = (x.clone(), x.shape());
    for (dim, &placement) in layout.placements().iter().enumerate() {
        if mesh.shape()[dim] == 1 {
            continue;
        }
        // These ranks get the values along a later mesh dim. Until then they only follow the shape.
        if at[dim + 1..].iter().any(|&at| at != source) {
            if let Some((tensor_dim, split)) = placement.sharded_dim() {
                x = copy_chunk(&x, tensor_dim, split, mesh.shape()[dim], at[dim])?;
            }
            continue;
        }
        let group = mesh.group(dim)?;
        x = match placement.sharded_dim() {
            None => group.broadcast_shard(&x, source, &global)?,
            Some((tensor_dim, split)) => {
                let n = mesh.shape()[dim];
                let chunks = (at[dim] == source)
                    .then(|| {
                        (0..n).map(|i| copy_chunk(&x, tensor_dim, split, n, i)).collect::<Result<Vec<_>>>()
                    })
                    .transpose()?;
                group.scatter_shards(chunks.as_deref(), source, &global)?
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
