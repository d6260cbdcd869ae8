//! Back to this rank: its shard, or the full tensor.

use dtensor_array::ReduceOp;
use dtensor_layout::{Partial, Placements, Replicate};

use super::from_local::Joined;
use crate::autograd::{Backward, Grads, Recorded};
use crate::comm::Site;
use crate::dispatch::record;
use crate::layout::Layout;
use crate::tensor::Value;
use crate::{Result, Tensor};

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
        self.redistribute_to(&whole, &Site::caller())?.to_local()
    }

    /// As [`full_tensor`](Tensor::full_tensor), saying how the gradient that comes back will lie: all of it
    /// on every rank, or partial.
    #[track_caller]
    pub fn full_tensor_with(&self, grad_placements: impl Into<Placements>) -> Result<Tensor> {
        const OP: &str = "full_tensor";
        let layout = self.laid_out(OP)?.replicated();
        let grad = layout.of_gradient(OP, grad_placements.into())?;
        Ok(self.redistribute_to(&layout, &Site::caller())?.taken(layout, Some(grad)))
    }
}
