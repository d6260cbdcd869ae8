//! [`Tensor::to_local`] and [`Tensor::full_tensor`]: from a distributed tensor to a local one.

use dtensor_array::ReduceOp;
use dtensor_layout::{Partial, Placements, Replicate};

use super::from_local::FromLocalNode;
use crate::autograd::{Backward, Grads, Recorded};
use crate::comm::Site;
use crate::dispatch::record;
use crate::layout::Layout;
use crate::tensor::Value;
use crate::{Result, Tensor};

/// The recorded `to_local`: the layout of the tensor, and that of the gradient if the caller declared it.
#[derive(Debug)]
struct ToLocalNode {
    layout: Layout,
    grad: Option<Layout>,
    at: Site,
}

impl Recorded for ToLocalNode {
    fn name(&self) -> &'static str {
        "to_local"
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let mut dy = cx.dy()?;
        let layout = match &self.grad {
            Some(declared) => declared.clone(),
            None => {
                // This rank's value counts only 1/n in an average over n ranks, so the same change of the full tensor needs an n times
                // larger change of the value.
                let by = ranks_along(&self.layout, ReduceOp::Avg);
                if by > 1 {
                    dy = dy.mul(by as f64)?;
                }
                self.layout.map(|&p| match p {
                    // Only the ranks that hold the extreme contribute, so the gradients of all ranks are summed.
                    Partial(ReduceOp::Max | ReduceOp::Min) => Partial(ReduceOp::Sum),
                    Partial(_) => Replicate,
                    p => p,
                })
            }
        };
        // Recorded as `from_local`, so that the gradient can have a gradient.
        let value = Value { layout: Some(layout.clone()), ..dy.value().clone() };
        let node = FromLocalNode { layout, grad: None, at: self.at.clone() };
        Ok(Grads::from_elem(Some(record(node, &dy, value)), 1))
    }
}

/// Returns the product of the sizes of the mesh dims that are partial with this reduction.
pub(super) fn ranks_along(layout: &Layout, op: ReduceOp) -> usize {
    let sizes = layout.mesh().shape().iter().zip(layout.placements());
    sizes.filter(|(_, p)| **p == Partial(op)).map(|(size, _)| size).product()
}

impl Tensor {
    /// Returns this rank's shard as a local tensor. No data moves.
    ///
    /// Backward takes the gradient of the local tensor as this rank's shard of the full gradient, with the placements of this tensor.
    /// Along mesh dims where this tensor is partial: for a partial sum the gradient is replicated; for a partial average it is
    /// replicated and multiplied by the number of ranks; for a partial maximum or minimum the gradients of all ranks are summed.
    /// [`to_local_with`](Tensor::to_local_with) declares other placements.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
    /// let x = sharded::ones([8, 2], DType::F32, &mesh, [Shard(0)])?;
    /// assert_eq!(x.to_local()?.dims(), [2, 2]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn to_local(&self) -> Result<Tensor> {
        let layout = self.expect_layout("to_local")?.clone();
        Ok(self.record_to_local(layout, None))
    }

    /// Returns this rank's shard like [`to_local`](Tensor::to_local), and declares the placements of its gradient.
    ///
    /// Declare [`Partial`] sums along a mesh dim if this tensor is replicated there and each rank uses it differently. Returns an
    /// error unless each rank holds the same elements of the gradient as of the tensor.
    #[track_caller]
    pub fn to_local_with(&self, grad_placements: impl Into<Placements>) -> Result<Tensor> {
        const OP: &str = "to_local";
        let layout = self.expect_layout(OP)?.clone();
        let grad = layout.for_gradient(OP, grad_placements.into())?;
        Ok(self.record_to_local(layout, Some(grad)))
    }

    /// Returns this rank's shard, recorded.
    #[track_caller]
    fn record_to_local(&self, layout: Layout, grad: Option<Layout>) -> Tensor {
        let node = ToLocalNode { layout, grad, at: Site::caller() };
        record(node, self, Value::plain(self.value().part.clone()))
    }

    /// Gathers and returns the full tensor, on every rank, as a local tensor. All ranks of the mesh must call this.
    ///
    /// ```
    /// use dtensor::comm::launch;
    /// use dtensor::{DType, DeviceMesh, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
    ///     let x = sharded::arange(0, 4, 1, DType::I64, &mesh, [Shard(0)])?;
    ///     assert_eq!(x.full_tensor()?.to_vec::<i64>()?, [0, 1, 2, 3]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        let replicated = self.expect_layout("full_tensor")?.replicated();
        self.redistribute_to(&replicated, &Site::caller())?.to_local()
    }

    /// Returns the full tensor like [`full_tensor`](Tensor::full_tensor), and declares the placements of its gradient: along each
    /// mesh dim [`Replicate`] or [`Partial`].
    #[track_caller]
    pub fn full_tensor_with(&self, grad_placements: impl Into<Placements>) -> Result<Tensor> {
        const OP: &str = "full_tensor";
        let layout = self.expect_layout(OP)?.replicated();
        let grad = layout.for_gradient(OP, grad_placements.into())?;
        Ok(self.redistribute_to(&layout, &Site::caller())?.record_to_local(layout, Some(grad)))
    }
}
