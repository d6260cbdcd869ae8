//! [`Tensor::from_local`]: makes a distributed tensor of the local tensors of the ranks.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::replicated::Taker;
use super::to_local::ranks_along;
use crate::autograd::{Backward, Grads, Recorded, Saves};
use crate::comm::{ReduceOp, Site};
use crate::dispatch::record;
use crate::layout::Layout;
use crate::mesh::{DeviceMesh, mesh_or_active};
use crate::tensor::Value;
use crate::{Error, Result, Tensor};
use dtensor_array::{Meta, Shape};
use dtensor_layout::{Partial, PlacementList, Placements, Replicate, unravel};

const OP: &str = "from_local";

/// Options of [`Tensor::from_local_with`].
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{DType, DeviceMesh, FromLocalOptions, Shard, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// launch(3, |world| {
///     let mesh = DeviceMesh::new(&world, [3], "tp")?;
///     let local = Tensor::ones([[2, 2, 1][world.rank()]], DType::F32)?;
///     let options = FromLocalOptions { uneven: true, ..Default::default() };
///     let x = Tensor::from_local_with(&local, &mesh, [Shard(0)], options)?;
///     assert_eq!(x.dims(), [5]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct FromLocalOptions {
    /// Compares dtype and shape over ranks, and along mesh dims with [`Replicate`] broadcasts the value of the first rank. This
    /// communicates. Without it, [`check_replicated`](crate::check_replicated) finds different values, and does not communicate.
    pub run_check: bool,
    /// The global shape. Default: every rank is assumed to have a shard of the same shape.
    pub shape: Option<Shape>,
    /// Computes the global shape from the shard shapes of all ranks, which may differ. This communicates. The shapes must be those
    /// that the placements give for the global shape. A rank outside the mesh does not take part, and must set `shape`.
    pub uneven: bool,
    /// The placements of the gradient. Each rank must hold the same elements of it as of the tensor. Default: those of the tensor,
    /// with [`Replicate`] instead of [`Partial`].
    pub grad_placements: Option<Placements>,
}

/// The description of a local tensor that ranks exchange and compare.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ShardInfo {
    meta: Meta,
    requires_grad: bool,
    /// The global shape passed by the caller.
    global: Option<Shape>,
    placements: String,
}

impl ShardInfo {
    /// Describes this rank's local tensor.
    pub(crate) fn of(local: &Tensor, placements: &Placements, global: Option<&Shape>) -> Self {
        ShardInfo {
            meta: local.meta(),
            requires_grad: local.requires_grad(),
            global: global.cloned(),
            placements: placements.to_string(),
        }
    }
}

/// The recorded `from_local`: the layout of the tensor, and that of the gradient if the caller declared it.
#[derive(Debug)]
pub(super) struct FromLocalNode {
    pub(super) layout: Layout,
    pub(super) grad: Option<Layout>,
    pub(super) at: Site,
}

impl FromLocalNode {
    /// The reduction of the first placement that is a partial maximum, minimum or product.
    fn nonlinear_partial(&self) -> Option<ReduceOp> {
        self.layout.placements().iter().find_map(|p| match p {
            Partial(op) if !op.is_linear() => Some(*op),
            _ => None,
        })
    }
}

impl Recorded for FromLocalNode {
    fn name(&self) -> &'static str {
        OP
    }

    fn saves(&self) -> Saves {
        if self.nonlinear_partial().is_some() && self.grad.is_none() { Saves::INPUTS } else { Saves::NOTHING }
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        if self.layout.mesh().coordinate().is_none() {
            // A rank outside the mesh contributed nothing.
            return Ok(Grads::from_elem(Some(cx.zeros(0)?), 1));
        }
        if let Some(grad) = &self.grad {
            return Ok(Grads::from_elem(Some(dy.redistribute_to(grad, &self.at)?.to_local()?), 1));
        }
        let reduced = self.layout.without_partials();
        let dy = dy.redistribute_to(&reduced, &self.at)?;
        let mut dx = match self.nonlinear_partial() {
            // Each rank uses `dy` differently below, so the gradient of `dy` is a partial sum.
            Some(_) => {
                let summed = self.layout.map(|&p| if p.is_partial() { Partial(ReduceOp::Sum) } else { p });
                dy.to_local_with(summed.placements())?
            }
            None => dy.to_local()?,
        };
        let by = ranks_along(&self.layout, ReduceOp::Avg);
        if by > 1 {
            dx = dx.div(by as f64)?;
        }
        match self.nonlinear_partial() {
            None => {}
            Some(ReduceOp::Product) => {
                let message = "no gradient passes through a partial product".into();
                return Err(Error::Argument { op: OP, message });
            }
            Some(_) => {
                // The ranks that hold the extreme get the gradient in equal shares.
                let x = cx.input(0)?.detach();
                let reduce = |local: &Tensor, layout: &Layout| -> Result<Tensor> {
                    local.on_layout(layout.clone()).redistribute_to(&reduced, &self.at)?.to_local()
                };
                let holds = x.eq(&reduce(&x, &self.layout)?)?.to_dtype(dx.dtype())?;
                let summed = self.layout.map(|&p| if p.is_partial() { Partial(ReduceOp::Sum) } else { p });
                dx = dx.mul(&holds)?.div(&reduce(&holds, &summed)?)?;
            }
        }
        Ok(Grads::from_elem(Some(dx), 1))
    }
}

impl Tensor {
    /// Reinterprets this rank's local value as its shard of a tensor in `layout`, without recording.
    pub(crate) fn on_layout(&self, layout: Layout) -> Tensor {
        Tensor::from_shard(self.value().part.clone(), layout)
    }

    /// Makes a distributed tensor from the local tensor of each rank, which becomes its shard. No data moves.
    ///
    /// Every rank is assumed to have a shard of the same shape. If the shapes differ, the next collective on the tensor returns an
    /// error; [`from_local_with`](Tensor::from_local_with) takes uneven shards. `mesh` may be `None` inside
    /// [`use_mesh`](crate::use_mesh).
    ///
    /// Backward redistributes the gradient to these placements, replicated where they are partial, and this rank gets its shard of
    /// it. For a partial average, each rank gets its share of the gradient. For a partial maximum or minimum, the ranks that hold it
    /// get equal shares. A partial product has no gradient.
    ///
    /// ```
    /// use dtensor::comm::{ReduceOp, launch};
    /// use dtensor::{DType, DeviceMesh, Partial, Shard, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
    ///     let local = Tensor::full([1, 3], world.rank() as f64, DType::F32)?;
    ///     let rows = Tensor::from_local(&local, &mesh, [Shard(0)])?;
    ///     assert_eq!(rows.full_tensor()?.to_vec::<f32>()?, [0., 0., 0., 1., 1., 1.]);
    ///     let sum = Tensor::from_local(&local, &mesh, [Partial(ReduceOp::Sum)])?;
    ///     assert_eq!(sum.full_tensor()?.to_vec::<f32>()?, [1., 1., 1.]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn from_local<'a>(
        local: &Tensor,
        mesh: impl Into<Option<&'a DeviceMesh>>,
        placements: impl Into<Placements>,
    ) -> Result<Tensor> {
        Tensor::from_local_with(local, mesh, placements, FromLocalOptions::default())
    }

    /// Makes a distributed tensor like [`from_local`](Tensor::from_local), with the checks, shape or uneven shards of [`FromLocalOptions`].
    #[track_caller]
    pub fn from_local_with<'a>(
        local: &Tensor,
        mesh: impl Into<Option<&'a DeviceMesh>>,
        placements: impl Into<Placements>,
        options: FromLocalOptions,
    ) -> Result<Tensor> {
        let taker = Taker { by: OP, argument: &"local" };
        Tensor::from_local_as(local, mesh_or_active(OP, mesh.into())?, placements.into(), options, taker)
    }

    /// Same as [`from_local_with`](Tensor::from_local_with), for a caller whose name errors about replicated tensors show.
    #[track_caller]
    pub(crate) fn from_local_as(
        local: &Tensor,
        mesh: DeviceMesh,
        placements: Placements,
        options: FromLocalOptions,
        taker: Taker<'_>,
    ) -> Result<Tensor> {
        if local.is_distributed() {
            let message = "local_tensor argument only accepts local tensors, but this one is distributed";
            return Err(Error::argument(OP, message));
        }
        // Exchange before any check, so that an error on one rank is an error on all.
        let shards = if options.run_check || options.uneven {
            exchange(&mesh, &ShardInfo::of(local, &placements, options.shape.as_ref()))?
        } else {
            Vec::new()
        };
        Tensor::from_shards(local, mesh, placements, options, &shards, taker)
    }

    /// The rest of [`from_local_with`](Tensor::from_local_with), after ranks have exchanged descriptions of their local tensors.
    #[track_caller]
    pub(crate) fn from_shards(
        local: &Tensor,
        mesh: DeviceMesh,
        placements: Placements,
        options: FromLocalOptions,
        shards: &[ShardInfo],
        taker: Taker<'_>,
    ) -> Result<Tensor> {
        let at = Site::caller();
        let ndim = options.shape.as_ref().map_or(local.ndim(), |shape| shape.ndim());
        let placements = placements.checked(OP, mesh.ndim(), ndim)?;
        // If no mesh dim shards the tensor, all local tensors have the same shape.
        let uneven = options.uneven && placements.iter().any(|p| p.sharded_dim().is_some());
        let shape = match options.shape {
            Some(shape) => shape,
            None if !uneven => global_shape_of_even(local, &mesh, &placements),
            None if mesh.coordinate().is_none() => {
                let message = format!(
                    "rank {} is not in {mesh} and does not see the shapes of the shards: pass `shape`, the global shape",
                    mesh.rank()
                );
                return Err(Error::argument(OP, message));
            }
            None => global_shape_of_uneven(shards, &mesh, &placements),
        };
        let layout = Layout::checked(OP, &mesh, placements[..].into(), shape)?;
        if options.run_check || options.uneven {
            check_consistent(shards, &layout)?;
        }
        let grad = match options.grad_placements {
            Some(placements) => Some(layout.for_gradient(OP, placements)?),
            None => None,
        };
        let mut shard = local.detach();
        if mesh.coordinate().is_none() {
            shard = Tensor::full_on(&layout, &local.meta(), 0)?;
        } else if local.dims() != &layout.local_shape()[..] {
            let message = format!(
                "a tensor {layout} has a shard of shape {} on this rank, but the one given has shape {}",
                layout.local_shape(),
                local.shape()
            );
            return Err(Error::argument(OP, message));
        } else if !options.run_check {
            taker.note(local, &mesh, &placements)?;
        } else if !local.is_meta() {
            for (dim, _) in placements.iter().enumerate().filter(|(_, p)| **p == Replicate) {
                shard = mesh.group(dim)?.broadcast(&shard, 0)?;
            }
        }
        let value = Value { part: shard.value().part.clone(), layout: Some(layout.clone()) };
        Ok(record(FromLocalNode { layout, grad, at }, local, value))
    }
}

/// Gathers a value from all ranks of the mesh, in its order. Returns an empty list on a rank outside the mesh.
#[track_caller]
pub(crate) fn exchange<T: Serialize + DeserializeOwned>(mesh: &DeviceMesh, mine: &T) -> Result<Vec<T>> {
    if mesh.coordinate().is_none() {
        return Ok(Vec::new());
    }
    let all: SmallVec<[usize; 4]> = (0..mesh.ndim()).collect();
    mesh.group_over(&all, Site::caller())?.all_gather_object(mine)
}

/// Returns the global shape, given that all ranks have a shard of this shape.
fn global_shape_of_even(local: &Tensor, mesh: &DeviceMesh, placements: &PlacementList) -> Shape {
    let mut shape = local.shape();
    for (placement, size) in placements.iter().zip(mesh.shape()) {
        if let Some((dim, _)) = placement.sharded_dim() {
            shape = shape.with_dim(dim, shape[dim].saturating_mul(*size));
        }
    }
    shape
}

/// Returns the global shape, given the shards of all ranks.
fn global_shape_of_uneven(shards: &[ShardInfo], mesh: &DeviceMesh, placements: &PlacementList) -> Shape {
    let ndim = shards.first().map_or(0, |shard| shard.meta.shape.ndim());
    (0..ndim)
        .map(|dim| {
            // Sums the sizes along the mesh dims that shard this dim, at coordinate 0 of all other mesh dims.
            let is_sharded_along =
                |mesh_dim: usize| placements[mesh_dim].sharded_dim().is_some_and(|(cut, _)| cut == dim);
            let mut sum = 0usize;
            for (i, shard) in shards.iter().enumerate() {
                let at = unravel(i, mesh.shape());
                if (0..mesh.ndim()).all(|mesh_dim| is_sharded_along(mesh_dim) || at[mesh_dim] == 0) {
                    sum = sum.saturating_add(shard.meta.shape.get(dim).copied().unwrap_or(0));
                }
            }
            sum
        })
        .collect()
}

/// Returns an error if the local tensors of the ranks disagree with each other or with the layout.
fn check_consistent(shards: &[ShardInfo], layout: &Layout) -> Result<()> {
    let Some(first) = shards.first() else { return Ok(()) };
    for (i, other) in shards.iter().enumerate() {
        let rank = layout.mesh().ranks()[i];
        let (expected, _) = layout.shard_at(&unravel(i, layout.mesh().shape()));
        let shape = first.meta.shape.clone();
        let same_shape = ShardInfo { meta: Meta { shape, ..other.meta.clone() }, ..other.clone() };
        if same_shape != *first {
            let describe = |shard: &ShardInfo| {
                let grad = if shard.requires_grad { ", requires grad" } else { "" };
                let global =
                    shard.global.as_ref().map_or_else(String::new, |shape| format!(", global shape {shape}"));
                format!("{} on {}{grad}{global}, {}", shard.meta.dtype, shard.meta.device, shard.placements)
            };
            let message = format!(
                "inconsistent tensor metadata: rank {} has {}, rank {rank} has {}",
                layout.mesh().ranks()[0],
                describe(first),
                describe(other)
            );
            return Err(Error::argument(OP, message));
        }
        if expected != other.meta.shape {
            let shapes: Vec<String> = shards.iter().map(|shard| shard.meta.shape.to_string()).collect();
            let message = format!(
                "inconsistent tensor metadata: a tensor {layout} has a shard of shape {expected} on rank {rank}, but the one \
                 given there has shape {}; the shapes on ranks {:?} are {}",
                other.meta.shape,
                layout.mesh().ranks(),
                shapes.join(", ")
            );
            return Err(Error::argument(OP, message));
        }
    }
    Ok(())
}
