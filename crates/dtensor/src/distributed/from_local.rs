//! Tensors that ranks have each for itself, taken as parts of one.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::to_local::ranks_along;
use crate::autograd::{Backward, Grads, Recorded, Saves};
use crate::comm::{ReduceOp, Site};
use crate::dispatch::record;
use crate::layout::Layout;
use crate::mesh::{DeviceMesh, chosen};
use crate::tensor::Value;
use crate::{Error, Result, Tensor};
use dtensor_array::{Meta, Shape};
use dtensor_layout::{Partial, PlacementList, Placements, Replicate, unravel};

const OP: &str = "from_local";

/// How [`Tensor::from_local_with`] is done.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{DType, DeviceMesh, FromLocal, Shard, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// launch(3, |world| {
///     let mesh = DeviceMesh::new(&world, [3], "tp")?;
///     let part = Tensor::ones([[2, 2, 1][world.rank()]], DType::F32)?;
///     let options = FromLocal { uneven: true, ..Default::default() };
///     let whole = Tensor::from_local_with(&part, &mesh, [Shard(0)], options)?;
///     assert_eq!(whole.dims(), [5]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct FromLocal {
    /// Compare dtype and shape with the other ranks', and take the value of the first rank along mesh dims with
    /// [`Replicate`]. This communicates.
    pub run_check: bool,
    /// The shape of the whole. If it is not given, every rank is taken to have a part of the same shape.
    pub shape: Option<Shape>,
    /// Ask the other ranks for the shapes of their parts, which need not be the same, and put the shape of the whole together
    /// from them. This communicates. The parts must be those that the placements call for. A rank outside the mesh is not told,
    /// and has to give the shape.
    pub uneven: bool,
    /// How the gradient is to lie whose part this rank gets back: ranks must have the same elements of it as
    /// of the tensor. If it is not given: as the tensor, replicated where it is partial.
    pub grad_placements: Option<Placements>,
}

/// What ranks tell each other about their parts.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Told {
    meta: Meta,
    requires_grad: bool,
    /// What was given as the shape of the whole.
    whole: Option<Shape>,
    placements: String,
}

impl Told {
    /// About this rank's part of a tensor that lies so.
    pub(crate) fn of(part: &Tensor, placements: &Placements, whole: Option<&Shape>) -> Self {
        Told {
            meta: part.meta(),
            requires_grad: part.requires_grad(),
            whole: whole.cloned(),
            placements: placements.to_string(),
        }
    }
}

/// How the parts lie, and how their gradients will.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) layout: Layout,
    pub(super) grad: Option<Layout>,
    pub(super) at: Site,
}

impl Joined {
    fn extreme(&self) -> Option<ReduceOp> {
        self.layout.placements().iter().find_map(|p| match p {
            Partial(op) if !op.is_linear() => Some(*op),
            _ => None,
        })
    }
}

impl Recorded for Joined {
    fn name(&self) -> &'static str {
        OP
    }

    fn saves(&self) -> Saves {
        if self.extreme().is_some() && self.grad.is_none() { Saves::INPUTS } else { Saves::NOTHING }
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        if self.layout.mesh().coordinate().is_none() {
            // Nothing was taken of what this rank gave.
            return Ok(Grads::from_elem(Some(cx.zeros(0)?), 1));
        }
        if let Some(grad) = &self.grad {
            return Ok(Grads::from_elem(Some(dy.redistribute_to(grad, &self.at)?.to_local()?), 1));
        }
        let whole = self.layout.without_partials();
        let dy = dy.redistribute_to(&whole, &self.at)?;
        let mut dx = match self.extreme() {
            // Each rank goes on with a share of its own, so gradients of these are partial.
            Some(_) => {
                let shares = self.layout.map(|&p| if p.is_partial() { Partial(ReduceOp::Sum) } else { p });
                dy.to_local_with(shares.placements())?
            }
            None => dy.to_local()?,
        };
        let by = ranks_along(&self.layout, ReduceOp::Avg);
        if by > 1 {
            dx = dx.div(by as f64)?;
        }
        match self.extreme() {
            None => {}
            Some(ReduceOp::Product) => {
                let message = "no gradient passes through a partial product".into();
                return Err(Error::Argument { op: OP, message });
            }
            Some(_) => {
                // The gradient goes to the ranks that hold the extreme, in equal parts.
                let x = cx.input(0)?.detach();
                let reduce = |part: &Tensor, layout: &Layout| -> Result<Tensor> {
                    part.on_layout(layout.clone()).redistribute_to(&whole, &self.at)?.to_local()
                };
                let holds = x.eq(&reduce(&x, &self.layout)?)?.to_dtype(dx.dtype())?;
                let counted = self.layout.map(|&p| if p.is_partial() { Partial(ReduceOp::Sum) } else { p });
                dx = dx.mul(&holds)?.div(&reduce(&holds, &counted)?)?;
            }
        }
        Ok(Grads::from_elem(Some(dx), 1))
    }
}

impl Tensor {
    /// What this rank has of this tensor, as its part of one that lies so.
    pub(crate) fn on_layout(&self, layout: Layout) -> Tensor {
        Tensor::laid(self.value().part.clone(), layout)
    }

    /// A tensor on a mesh of which every rank has a part already. No data moves.
    ///
    /// Every rank is taken to have a part of the same shape. If that is not so, ranks have different ideas of the whole, and the
    /// next collective on it fails; [`from_local_with`](Tensor::from_local_with) takes uneven parts.
    ///
    /// The gradient that comes back is brought to these placements, replicated where they are partial, and its part is this
    /// rank's. Of a partial average, a rank's value gets its share of the gradient; of a partial maximum or minimum, the ranks
    /// that hold it get it in equal parts; through a partial product none passes.
    ///
    /// ```
    /// use dtensor::comm::{ReduceOp, launch};
    /// use dtensor::{DType, DeviceMesh, Partial, Shard, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
    ///     let part = Tensor::full([1, 3], world.rank() as f64, DType::F32)?;
    ///     let rows = Tensor::from_local(&part, &mesh, [Shard(0)])?;
    ///     assert_eq!(rows.full_tensor()?.to_vec::<f32>()?, [0., 0., 0., 1., 1., 1.]);
    ///     let sum = Tensor::from_local(&part, &mesh, [Partial(ReduceOp::Sum)])?;
    ///     assert_eq!(sum.full_tensor()?.to_vec::<f32>()?, [1., 1., 1.]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn from_local<'a>(
        part: &Tensor,
        mesh: impl Into<Option<&'a DeviceMesh>>,
        placements: impl Into<Placements>,
    ) -> Result<Tensor> {
        Tensor::from_local_with(part, mesh, placements, FromLocal::default())
    }

    /// As [`from_local`](Tensor::from_local), checked against the other ranks, of a given shape, or of uneven parts.
    #[track_caller]
    pub fn from_local_with<'a>(
        part: &Tensor,
        mesh: impl Into<Option<&'a DeviceMesh>>,
        placements: impl Into<Placements>,
        options: FromLocal,
    ) -> Result<Tensor> {
        let mesh = chosen(OP, mesh.into())?;
        if part.is_distributed() {
            let message = "local_tensor argument only accepts local tensors, but this one is distributed";
            return Err(Error::argument(OP, message));
        }
        let placements = placements.into();
        // The others are told first: what only this rank finds wrong with its part, they then find too.
        let told = if options.run_check || options.uneven {
            tell(&mesh, &Told::of(part, &placements, options.shape.as_ref()))?
        } else {
            Vec::new()
        };
        Tensor::joined(part, mesh, placements, options, &told)
    }

    /// [`from_local_with`](Tensor::from_local_with), after the ranks have told each other about their parts.
    #[track_caller]
    pub(crate) fn joined(
        part: &Tensor,
        mesh: DeviceMesh,
        placements: Placements,
        options: FromLocal,
        told: &[Told],
    ) -> Result<Tensor> {
        let at = Site::caller();
        let ndim = options.shape.as_ref().map_or(part.rank(), |shape| shape.rank());
        let placements = placements.checked(OP, mesh.ndim(), ndim)?;
        // Parts that nothing cuts are all the same.
        let uneven = options.uneven && placements.iter().any(|p| p.cut().is_some());
        let shape = match options.shape {
            Some(shape) => shape,
            None if !uneven => scaled(part, &mesh, &placements),
            None if mesh.coordinate().is_none() => {
                let message = format!(
                    "rank {} is not in {mesh} and is not told of the parts: give it the shape of the whole",
                    mesh.rank()
                );
                return Err(Error::argument(OP, message));
            }
            None => put_together(told, &mesh, &placements),
        };
        let layout = Layout::checked(OP, &mesh, placements[..].into(), shape)?;
        if options.run_check || options.uneven {
            compare(told, &layout)?;
        }
        let grad = match options.grad_placements {
            Some(placements) => Some(layout.of_gradient(OP, placements)?),
            None => None,
        };
        let mut own = part.detach();
        if mesh.coordinate().is_none() {
            own = Tensor::full_laid(&layout, &part.meta(), 0)?;
        } else if part.dims() != &layout.local_shape()[..] {
            let message = format!(
                "a tensor {layout} has a part of shape {} on this rank, but the one given has shape {}",
                layout.local_shape(),
                part.shape()
            );
            return Err(Error::argument(OP, message));
        } else if options.run_check && !part.is_meta() {
            for (dim, _) in placements.iter().enumerate().filter(|(_, p)| **p == Replicate) {
                own = mesh.group(dim)?.broadcast(&own, 0)?;
            }
        }
        let value = Value { part: own.value().part.clone(), layout: Some(layout.clone()) };
        Ok(record(Joined { layout, grad, at }, part, value))
    }
}

/// What all ranks of the mesh, in its order, have to say; nothing on one that is not in it.
#[track_caller]
pub(crate) fn tell<T: Serialize + DeserializeOwned>(mesh: &DeviceMesh, mine: &T) -> Result<Vec<T>> {
    if mesh.coordinate().is_none() {
        return Ok(Vec::new());
    }
    let all: SmallVec<[usize; 4]> = (0..mesh.ndim()).collect();
    mesh.group_over(&all, Site::caller())?.all_gather_object(mine)
}

/// The shape of a whole of which all ranks have parts like this one.
fn scaled(part: &Tensor, mesh: &DeviceMesh, placements: &PlacementList) -> Shape {
    let mut shape = part.shape();
    for (placement, size) in placements.iter().zip(mesh.shape()) {
        if let Some((dim, _)) = placement.cut() {
            shape = shape.with_dim(dim, shape[dim].saturating_mul(*size));
        }
    }
    shape
}

/// The shape of a whole of which the ranks have these parts.
fn put_together(told: &[Told], mesh: &DeviceMesh, placements: &PlacementList) -> Shape {
    let rank = told.first().map_or(0, |told| told.meta.shape.rank());
    (0..rank)
        .map(|dim| {
            // The ranks along the mesh dims that cut this one, from the first coordinate on.
            let cuts = |mesh_dim: usize| placements[mesh_dim].cut().is_some_and(|(cut, _)| cut == dim);
            let mut sum = 0usize;
            for (i, told) in told.iter().enumerate() {
                let at = unravel(i, mesh.shape());
                if (0..mesh.ndim()).all(|mesh_dim| cuts(mesh_dim) || at[mesh_dim] == 0) {
                    sum = sum.saturating_add(told.meta.shape.get(dim).copied().unwrap_or(0));
                }
            }
            sum
        })
        .collect()
}

/// That the parts are those of this layout.
fn compare(told: &[Told], layout: &Layout) -> Result<()> {
    let Some(first) = told.first() else { return Ok(()) };
    for (i, other) in told.iter().enumerate() {
        let rank = layout.mesh().ranks()[i];
        let (due, _) = layout.shard_at(&unravel(i, layout.mesh().shape()));
        let shape = first.meta.shape.clone();
        let alike = Told { meta: Meta { shape, ..other.meta.clone() }, ..other.clone() };
        if alike != *first {
            let shown = |told: &Told| {
                let grad = if told.requires_grad { ", requires grad" } else { "" };
                let whole =
                    told.whole.as_ref().map_or_else(String::new, |shape| format!(", of a whole {shape}"));
                format!("{} on {}{grad}{whole}, {}", told.meta.dtype, told.meta.device, told.placements)
            };
            let message = format!(
                "inconsistent tensor metadata: rank {} has {}, rank {rank} has {}",
                layout.mesh().ranks()[0],
                shown(first),
                shown(other)
            );
            return Err(Error::argument(OP, message));
        }
        if due != other.meta.shape {
            let shapes: Vec<String> = told.iter().map(|told| told.meta.shape.to_string()).collect();
            let message = format!(
                "inconsistent tensor metadata: a tensor {layout} has a part of shape {due} on rank {rank}, but the one \
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
