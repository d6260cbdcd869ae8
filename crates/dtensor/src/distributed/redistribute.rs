//! Redistribution: changes the placements of a distributed tensor.

use std::sync::Arc;

use dtensor_array::kernels::cast;
use dtensor_array::memory::Purpose;
use dtensor_layout::{Partial, Placement, Placements, Plan, Replicate};

use super::execute::begin_redistribution;
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

    /// Begins to [`redistribute`](Tensor::redistribute) this tensor, and returns the result without waiting for it. The first use of
    /// its values waits.
    ///
    /// All ranks of the mesh must call this, and all must use the result. Other work can run in between.
    ///
    /// ```
    /// use dtensor::comm::launch;
    /// use dtensor::{DType, DeviceMesh, Replicate, Shard, Tensor, distribute_tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
    ///     let x = distribute_tensor(&Tensor::arange(0, 3, 1, DType::F32)?, &mesh, [Shard(0)])?;
    ///     let full = x.redistribute_async([Replicate])?;
    ///     let squares = x.mul(&x)?; // runs while the shards of `x` are on their way
    ///     assert_eq!(full.to_local()?.to_vec::<f32>()?, [0., 1., 2.]); // waits
    ///     assert_eq!(squares.placements(), [Shard(0)]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn redistribute_async(&self, placements: impl Into<Placements>) -> Result<Tensor> {
        Ok(redistribute_coalesced_async(&[(self, placements.into())])?.remove(0))
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
            LocalTensor::Meta(meta) => LocalTensor::of_meta(meta.shape.clone(), dtype),
            _ => LocalTensor::Array(cast::cast(self.local_array(OP)?, dtype)?),
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

/// Redistributes several tensors, each to its own placements, with few collectives: those of one kind along the same mesh dims and
/// of one dtype are one. Otherwise like [`Tensor::redistribute`]. The tensors may be on different meshes.
///
/// ```
/// use dtensor::comm::{launch, record};
/// use dtensor::{DType, DeviceMesh, Replicate, Shard, redistribute_coalesced, sharded};
/// # fn main() -> dtensor::Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "dp")?;
///     let weight = sharded::ones([4, 3], DType::F32, &mesh, [Shard(0)])?;
///     let bias = sharded::ones([5], DType::F32, &mesh, [Shard(0)])?;
///     let gather = || redistribute_coalesced(&[(&weight, [Replicate].into()), (&bias, [Replicate].into())]);
///     let (gathered, calls) = record(gather);
///     assert_eq!(gathered?[1].to_local()?.to_vec::<f32>()?, [1.; 5]);
///     assert_eq!(calls.len(), 1);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn redistribute_coalesced(tensors: &[(&Tensor, Placements)]) -> Result<Vec<Tensor>> {
    let results = redistribute_coalesced_async(tensors)?;
    for result in &results {
        result.value().part.array()?;
    }
    Ok(results)
}

/// Begins a [`redistribute_coalesced`]. The first use of a result waits, as in [`Tensor::redistribute_async`].
#[track_caller]
pub fn redistribute_coalesced_async(tensors: &[(&Tensor, Placements)]) -> Result<Vec<Tensor>> {
    let layout = |(x, placements): &(&Tensor, Placements)| {
        let from = x.expect_layout(OP)?;
        Layout::checked(OP, from.mesh(), placements.clone(), from.shape().clone())
    };
    let layouts: Vec<Layout> = tensors.iter().map(layout).collect::<Result<_>>()?;
    let tensors: Vec<(&Tensor, &Layout)> = tensors.iter().map(|(x, _)| *x).zip(&layouts).collect();
    begin_redistributions(&tensors, &Site::caller())
}

/// Begins to redistribute tensors, each to a layout on an equal mesh. A tensor that has its layout already is returned as it is.
#[track_caller]
pub(crate) fn begin_redistributions(tensors: &[(&Tensor, &Layout)], at: &Site) -> Result<Vec<Tensor>> {
    let (mut moved, mut shards) = (Vec::new(), Vec::new());
    let mut grad = false;
    for (i, (x, to)) in tensors.iter().enumerate() {
        let from = x.expect_layout(OP)?;
        if from.mesh() != to.mesh() || from.shape() != to.shape() {
            return Err(Layout::mismatch(OP, Some(from), Some(to)));
        }
        let to = to.on(from.mesh());
        if !Arc::ptr_eq(from.spec(), to.spec()) {
            grad |= x.requires_grad() && grad_enabled();
            moved.push(i);
            shards.push((x.value().part.clone(), from.clone(), to));
        }
    }
    let parts = begin_redistribution(&shards, Purpose::Other, grad, at)?;
    let mut results: Vec<Tensor> = tensors.iter().map(|(x, _)| (*x).clone()).collect();
    for ((i, part), (_, _, to)) in moved.into_iter().zip(parts).zip(shards) {
        let x = tensors[i].0;
        let from = x.expect_layout(OP)?.clone();
        let value = Value { part, layout: Some(to) };
        results[i] = record(Redistribute { from, backward_dtype: None, at: at.clone() }, x, value);
    }
    Ok(results)
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
