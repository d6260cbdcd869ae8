//! From one layout to another, and back to this rank.

use std::sync::Arc;

use super::from_local::Joined;
use crate::autograd::{Backward, Grads, Recorded, grad_enabled};
use crate::comm::{ReduceOp, Site};
use crate::dispatch::record;
use crate::engine::kernels::cast;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Partial, Placement, Placements, Replicate};
use crate::redistribute::{Plan, execute};
use crate::tensor::{Part, Value};
use crate::{DType, Error, Result, Tensor};

/// How [`Tensor::redistribute_with`] is done.
#[derive(Clone, Debug, Default)]
pub struct RedistributeOptions {
    /// The mesh; if given, it must be the one that the tensor lies on.
    pub mesh: Option<DeviceMesh>,
    /// The dtype of the result, in which the values travel.
    pub forward_dtype: Option<DType>,
    /// The dtype in which the gradient travels back. It arrives in that of the tensor.
    pub backward_dtype: Option<DType>,
}

/// The layout a tensor had before.
#[derive(Debug)]
struct Redistribute {
    from: Layout,
    backward_dtype: Option<DType>,
    at: Site,
}

impl Recorded for Redistribute {
    fn name(&self) -> &'static str {
        "redistribute"
    }

    /// To where the input lay. A gradient is never made partial: where the input was, it stays as it is if it is partial
    /// already, and else is whole on every rank.
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        let given = dy.placements().iter();
        let placements: Vec<Placement> = given
            .zip(self.from.placements())
            .map(|(&dy, &from)| match (from, dy) {
                (Partial(_), Partial(_)) => dy,
                (Partial(_), _) => Replicate,
                (from, _) => from,
            })
            .collect();
        let to =
            Layout::checked("redistribute", self.from.mesh(), placements.into(), self.from.shape().clone())?;
        let dtype = cx.input_meta(0).dtype;
        let dx = dy.redistributed(&to, self.backward_dtype.unwrap_or(dtype), None, &self.at)?;
        Ok(Grads::from_elem(Some(dx.cast_in_place(dtype)?), 1))
    }
}

/// A change of dtype that leaves the layout alone.
#[derive(Debug)]
struct CastInPlace;

impl Recorded for CastInPlace {
    fn name(&self) -> &'static str {
        "to_dtype"
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(Grads::from_elem(Some(cx.dy()?.cast_in_place(cx.input_meta(0).dtype)?), 1))
    }
}

/// How the gradient that comes to a local part lies on the mesh.
#[derive(Debug)]
struct ToLocal {
    layout: Layout,
    grad: Option<Layout>,
    at: Site,
}

impl Recorded for ToLocal {
    fn name(&self) -> &'static str {
        "to_local"
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let mut dy = cx.dy()?;
        let wrapped = match &self.grad {
            Some(declared) => declared.clone(),
            None => {
                // A change of the whole is taken to be one of this rank's value; an average needs one as many times as large.
                let by = ranks_along(&self.layout, ReduceOp::Avg);
                if by > 1 {
                    dy = dy.mul(by as f64)?;
                }
                self.layout.map(|&p| match p {
                    // Only ranks that hold the extreme have a share in it.
                    Partial(ReduceOp::Max | ReduceOp::Min) => Partial(ReduceOp::Sum),
                    Partial(_) => Replicate,
                    p => p,
                })
            }
        };
        // From here on it is a tensor of parts like any other, on its own way back, too.
        let value = Value { layout: Some(wrapped.clone()), ..dy.value().clone() };
        let joined = Joined { layout: wrapped, grad: None, at: self.at.clone() };
        Ok(Grads::from_elem(Some(record(joined, &dy, value)), 1))
    }
}

/// How many ranks lie along the mesh dims with this kind of partial value.
pub(super) fn ranks_along(layout: &Layout, op: ReduceOp) -> usize {
    let sizes = layout.mesh().shape().iter().zip(layout.placements());
    sizes.filter(|(_, p)| **p == Partial(op)).map(|(size, _)| size).product()
}

impl Tensor {
    fn laid_out(&self, op: &'static str) -> Result<&Layout> {
        self.layout().ok_or_else(|| {
            let message =
                "the tensor is not distributed: use `distribute_tensor` or `Tensor::from_local` first";
            Error::argument(op, message)
        })
    }

    /// This tensor in other placements on the same mesh, by the cheapest collectives that bring it there
    /// ([`explain_redistribute`](Tensor::explain_redistribute) shows them). All ranks of the mesh must call this.
    ///
    /// The gradient goes back to the placements the tensor has now; where these are partial, it is replicated, or stays
    /// partial if it is.
    ///
    /// ```
    /// use dtensor::comm::launch;
    /// use dtensor::{DType, DeviceMesh, Replicate, Shard, Tensor, distribute_tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
    ///     let x = Tensor::arange(0, 6, 1, DType::F32)?.view([2, 3])?;
    ///     let rows = distribute_tensor(&x, &mesh, [Shard(0)])?;
    ///     let columns = rows.redistribute([Shard(1)])?;
    ///     assert_eq!(columns.to_local()?.dims(), [2, if world.rank() == 0 { 2 } else { 1 }]);
    ///     assert_eq!(columns.redistribute([Replicate])?.to_local()?.to_vec::<f32>()?, x.to_vec::<f32>()?);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn redistribute(&self, placements: impl Into<Placements>) -> Result<Tensor> {
        self.redistribute_with(placements, RedistributeOptions::default())
    }

    /// As [`redistribute`](Tensor::redistribute), in other dtypes on the way.
    #[track_caller]
    pub fn redistribute_with(
        &self,
        placements: impl Into<Placements>,
        options: RedistributeOptions,
    ) -> Result<Tensor> {
        const OP: &str = "redistribute";
        let from = self.laid_out(OP)?;
        if let Some(mesh) = options.mesh.as_ref().filter(|mesh| *mesh != from.mesh()) {
            let message = format!("cross device mesh comm not supported yet: from {} to {mesh}", from.mesh());
            return Err(Error::argument(OP, message));
        }
        let to = Layout::checked(OP, from.mesh(), placements.into(), from.shape().clone())?;
        let dtype = options.forward_dtype.unwrap_or(self.dtype());
        self.redistributed(&to, dtype, options.backward_dtype, &Site::caller())
    }

    /// The steps that [`redistribute`](Tensor::redistribute) would take, and why.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, Replicate, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [2, 2], ["dp", "tp"])?;
    /// let x = sharded::zeros([8, 8], DType::F32, &mesh, [Shard(0), Shard(1)])?;
    /// let plan = x.explain_redistribute([Replicate, Shard(1)])?;
    /// assert_eq!(plan.trace(), "S(0)S(1) -> RS(1)");
    /// assert_eq!((plan.collectives(), plan.bytes()), (vec!["all_gather"], 64));
    /// println!("{plan}");
    /// # Ok(())
    /// # }
    /// ```
    pub fn explain_redistribute(&self, placements: impl Into<Placements>) -> Result<Arc<Plan>> {
        const OP: &str = "explain_redistribute";
        let from = self.laid_out(OP)?;
        let to = Layout::checked(OP, from.mesh(), placements.into(), from.shape().clone())?;
        Ok(from.mesh().plan(from.spec(), to.spec(), self.dtype().size()))
    }

    /// In the given layout, in the graph.
    #[track_caller]
    fn redistributed(
        &self,
        to: &Layout,
        dtype: DType,
        backward_dtype: Option<DType>,
        at: &Site,
    ) -> Result<Tensor> {
        let from = self.laid_out("redistribute")?.clone();
        let cast = self.cast_value(dtype)?;
        let value =
            self.detach().with_value(cast).value_moved(to, self.requires_grad() && grad_enabled(), at)?;
        Ok(record(Redistribute { from, backward_dtype, at: at.clone() }, self, value))
    }

    /// In the given layout on an equal mesh.
    #[track_caller]
    pub(crate) fn relaid(&self, to: &Layout) -> Result<Tensor> {
        self.relaid_at(to, &Site::caller())
    }

    /// As [`relaid`](Tensor::relaid), for somebody else's line.
    #[track_caller]
    pub(crate) fn relaid_at(&self, to: &Layout, at: &Site) -> Result<Tensor> {
        self.redistributed(to, self.dtype(), None, at)
    }

    /// The value in another layout on the same mesh.
    pub(crate) fn value_in(&self, to: &Layout, at: &Site) -> Result<Value> {
        self.value_moved(to, self.requires_grad() && grad_enabled(), at)
    }

    fn value_moved(&self, to: &Layout, grad: bool, at: &Site) -> Result<Value> {
        let from = self.laid_out("redistribute")?;
        if from.mesh() != to.mesh() || from.shape() != to.shape() {
            return Err(Error::layouts("redistribute", Some(from), Some(to)));
        }
        let to = from.mesh().adopt(to);
        if Arc::ptr_eq(from.spec(), to.spec()) {
            return Ok(self.value().clone());
        }
        let part = match &self.value().part {
            Part::Meta(meta) => Part::of_meta(to.local_shape().clone(), meta.dtype),
            Part::Local(local) => {
                let plan = from.mesh().plan(from.spec(), to.spec(), local.dtype().size());
                Part::Local(execute(&plan, from.mesh(), local, grad, at)?)
            }
        };
        Ok(Value { part, layout: Some(to) })
    }

    /// The value in another dtype, part by part.
    fn cast_value(&self, dtype: DType) -> Result<Value> {
        let Value { part, layout } = self.value();
        let part = match part {
            _ if self.dtype() == dtype => part.clone(),
            Part::Local(local) => Part::Local(cast::cast(local, dtype)?),
            Part::Meta(meta) => Part::of_meta(meta.shape.clone(), dtype),
        };
        Ok(Value { part, layout: layout.clone() })
    }

    /// In another dtype, in the graph, without leaving the layout.
    #[track_caller]
    fn cast_in_place(&self, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        Ok(record(CastInPlace, self, self.cast_value(dtype)?))
    }

    /// This rank's part. No data moves.
    ///
    /// The gradient that comes to the part is taken to be this rank's part of one that lies as this tensor does, replicated
    /// where it is a partial sum. Where it is a partial average, it is multiplied by the number of ranks, since this rank's value
    /// counts so much less; where it is a partial extreme, those of all ranks are summed.
    #[track_caller]
    pub fn to_local(&self) -> Result<Tensor> {
        let layout = self.laid_out("to_local")?.clone();
        Ok(self.taken(layout, None))
    }

    /// As [`to_local`](Tensor::to_local), saying how the gradient that comes back will lie. [`Partial`] sums say that every rank
    /// uses a replicated value in a way of its own. Ranks must have the same elements of it as of the tensor.
    #[track_caller]
    pub fn to_local_with(&self, grad_placements: impl Into<Placements>) -> Result<Tensor> {
        const OP: &str = "to_local";
        let layout = self.laid_out(OP)?.clone();
        let grad = layout.of_gradient(OP, grad_placements.into())?;
        Ok(self.taken(layout, Some(grad)))
    }

    /// This rank's part, in the graph.
    #[track_caller]
    fn taken(&self, layout: Layout, grad: Option<Layout>) -> Tensor {
        let how = ToLocal { layout, grad, at: Site::caller() };
        record(how, self, Value::plain(self.value().part.clone()))
    }

    /// The whole tensor, on every rank. All ranks of the mesh must call this.
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        let whole = self.laid_out("full_tensor")?.replicated();
        self.relaid(&whole)?.to_local()
    }

    /// As [`full_tensor`](Tensor::full_tensor), saying how the gradient that comes back will lie: all of it
    /// on every rank, or partial.
    #[track_caller]
    pub fn full_tensor_with(&self, grad_placements: impl Into<Placements>) -> Result<Tensor> {
        const OP: &str = "full_tensor";
        let layout = self.laid_out(OP)?.replicated();
        let grad = layout.of_gradient(OP, grad_placements.into())?;
        Ok(self.relaid(&layout)?.taken(layout, Some(grad)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::World;
    use crate::{Shard, sharded};

    #[test]
    fn moving_nowhere_shares_the_value() {
        let mesh = DeviceMesh::new(&World::simulated(2, 1).unwrap(), [2], "tp").unwrap();
        let x = sharded::ones([4, 2], DType::F32, &mesh, [Shard(0)]).unwrap();
        let same = x.redistribute([Shard(-2)]).unwrap();
        let address = |x: &Tensor| x.part("test").unwrap().read::<f32>().unwrap().data().as_ptr();
        assert_eq!(address(&x), address(&same));
        let placements = same.placements();
        assert_eq!(placements[..], [Shard(0)]);
    }
}
