//! Redistribution: changes the placements of a distributed tensor.

use std::sync::Arc;

use dtensor_array::kernels::cast;
use dtensor_layout::{Partial, Placement, Placements, Plan, Replicate};

use crate::autograd::{Backward, Grads, Recorded, grad_enabled};
use crate::comm::Site;
use crate::dispatch::record;
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::tensor::{LocalTensor, Value};
use crate::{DType, Error, Result, Tensor};

const OP: &str = "redistribute";

/// Options of [`Tensor::redistribute_with`].
#[derive(Clone, Debug, Default)]
pub struct RedistributeOptions {
    /// The mesh. If given, it must be that of the tensor.
    pub mesh: Option<DeviceMesh>,
    /// The dtype of the result. Values are cast to it before they are communicated.
    pub forward_dtype: Option<DType>,
    /// The dtype in which the gradient is communicated. It is then cast to the dtype of the tensor.
    pub backward_dtype: Option<DType>,
}

/// The recorded redistribution; `from` is the layout of the input.
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

    /// Redistributes the gradient to the layout of the input. A gradient is never made partial: along a mesh dim where the input was
    /// partial, a partial gradient stays partial, and any other becomes replicated.
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        let placements: Vec<Placement> = dy
            .placements()
            .iter()
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
        let dx = dy.redistribute_as(&to, self.backward_dtype.unwrap_or(dtype), None, &self.at)?;
        Ok(Grads::from_elem(Some(dx.cast_shards(dtype)?), 1))
    }
}

/// A cast that keeps the layout.
#[derive(Debug)]
struct CastShards;

impl Recorded for CastShards {
    fn name(&self) -> &'static str {
        "to_dtype"
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(Grads::from_elem(Some(cx.dy()?.cast_shards(cx.input_meta(0).dtype)?), 1))
    }
}

impl Tensor {
    /// Returns the layout, or an error if the tensor is local.
    pub(super) fn expect_layout(&self, op: &'static str) -> Result<&Layout> {
        self.layout().ok_or_else(|| {
            let message =
                "the tensor is not distributed: use `distribute_tensor` or `Tensor::from_local` first";
            Error::argument(op, message)
        })
    }

    /// Redistributes this tensor to other placements on the same mesh, by the cheapest sequence of collectives.
    ///
    /// All ranks of the mesh must call this. [`explain_redistribute`](Tensor::explain_redistribute) shows the collectives.
    ///
    /// The gradient is redistributed back to the placements of this tensor. Along a mesh dim where this tensor is partial, the
    /// gradient becomes replicated, or stays partial if it is.
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

    /// Redistributes like [`redistribute`](Tensor::redistribute), with the dtypes of [`RedistributeOptions`].
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, RedistributeOptions, Replicate, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], ())?;
    /// let x = sharded::ones([4], DType::F32, &mesh, [Shard(0)])?;
    /// let options = RedistributeOptions { forward_dtype: Some(DType::BF16), ..Default::default() };
    /// assert_eq!(x.redistribute_with([Replicate], options)?.dtype(), DType::BF16);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn redistribute_with(
        &self,
        placements: impl Into<Placements>,
        options: RedistributeOptions,
    ) -> Result<Tensor> {
        let from = self.expect_layout(OP)?;
        if let Some(mesh) = options.mesh.as_ref().filter(|mesh| *mesh != from.mesh()) {
            let message = format!(
                "cross device mesh comm not supported yet: found {}",
                from.mesh().show_difference(mesh)
            );
            return Err(Error::argument(OP, message));
        }
        let to = Layout::checked(OP, from.mesh(), placements.into(), from.shape().clone())?;
        let dtype = options.forward_dtype.unwrap_or(self.dtype());
        self.redistribute_as(&to, dtype, options.backward_dtype, &Site::caller())
    }

    /// Returns the plan that [`redistribute`](Tensor::redistribute) would run, without running it. Its `Display` explains the steps.
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
        let from = self.expect_layout(OP)?;
        let to = Layout::checked(OP, from.mesh(), placements.into(), from.shape().clone())?;
        from.plan_to(&to, self.dtype())
    }

    /// Redistributes to a layout on an equal mesh; `at` is the line that asked.
    #[track_caller]
    pub(crate) fn redistribute_to(&self, to: &Layout, at: &Site) -> Result<Tensor> {
        self.redistribute_as(to, self.dtype(), None, at)
    }

    /// Redistributes like [`redistribute_to`](Tensor::redistribute_to), in other dtypes forward and backward.
    #[track_caller]
    fn redistribute_as(
        &self,
        to: &Layout,
        dtype: DType,
        backward_dtype: Option<DType>,
        at: &Site,
    ) -> Result<Tensor> {
        let from = self.expect_layout(OP)?.clone();
        if from.mesh() != to.mesh() || from.shape() != to.shape() {
            return Err(Layout::mismatch(OP, Some(&from), Some(to)));
        }
        let (cast, to) = (self.cast_value(dtype)?, to.on(from.mesh()));
        let value = if Arc::ptr_eq(from.spec(), to.spec()) {
            cast
        } else {
            let plan = from.mesh().planner().plan(from.spec(), to.spec(), dtype);
            let grad = self.requires_grad() && grad_enabled();
            Value { part: cast.part.redistribute(&plan, &to, grad, at)?, layout: Some(to) }
        };
        Ok(record(Redistribute { from, backward_dtype, at: at.clone() }, self, value))
    }

    /// Casts this rank's shard, without recording.
    fn cast_value(&self, dtype: DType) -> Result<Value> {
        let Value { part, layout } = self.value();
        let part = match part {
            _ if self.dtype() == dtype => part.clone(),
            LocalTensor::Array(local) => LocalTensor::Array(cast::cast(local, dtype)?),
            LocalTensor::Meta(meta) => LocalTensor::of_meta(meta.shape.clone(), dtype),
        };
        Ok(Value { part, layout: layout.clone() })
    }

    /// Casts to another dtype, recorded, in the same layout.
    #[track_caller]
    fn cast_shards(&self, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        Ok(record(CastShards, self, self.cast_value(dtype)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::World;
    use crate::{Shard, sharded};

    #[test]
    fn redistributing_to_the_same_layout_shares_memory() {
        let mesh = DeviceMesh::new(&World::simulated(2, 1).unwrap(), [2], "tp").unwrap();
        let x = sharded::ones([4, 2], DType::F32, &mesh, [Shard(0)]).unwrap();
        let same = x.redistribute([Shard(-2)]).unwrap();
        let address = |x: &Tensor| x.local_array("test").unwrap().copy_to_host_memory().unwrap().as_ptr();
        assert_eq!(address(&x), address(&same));
        let placements = same.placements();
        assert_eq!(placements[..], [Shard(0)]);
    }
}
