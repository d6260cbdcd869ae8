//! [`loss_parallel`]: losses over logits that are sharded along their classes.

use std::cell::Cell;

use dtensor_array::mode;
use dtensor_array::mode::Scope;

use super::Aside;
use crate::dispatch::allow_merging;
use crate::distributed::Taker;
use crate::{Error, FromLocalOptions, Result, Tensor};
use dtensor_layout::{Placement, Replicate, Shard, StridedShard, format_list};

mode! {
    static LOSS_PARALLEL: Cell<bool> = false;
}

/// Runs `body` with loss parallelism: inside, [`cross_entropy`](crate::Tensor::cross_entropy),
/// [`nll_loss`](crate::Tensor::nll_loss), [`log_softmax`](crate::Tensor::log_softmax) and
/// [`softmax`](crate::Tensor::softmax) never redistribute their logits.
///
/// Inside or outside such a scope, logits that are sharded along their classes with [`Shard`] are not gathered.
/// Instead, the ranks reduce three numbers per position: the largest logit, the sum of exponentials, and the
/// target's logit. The backward pass of `cross_entropy` needs no communication, that of `softmax` and `log_softmax`
/// reduces one number per position. The scope adds:
///
/// - Operators return an error instead of redistributing the logits: for partial logits and, in losses, for classes
///   with a strided shard.
/// - Targets are redistributed to match the logits. A target that is not distributed counts as replicated, which is
///   an error if positions are sharded, too. Class weights that are not distributed count as replicated.
/// - The communication counts as explicit, in backward too:
///   [`explicit_communication`](crate::explicit_communication) allows it.
///
/// ```
/// use dtensor::parallel::loss_parallel;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(3, |world| {
///     let mesh = DeviceMesh::new(&world, [3], "tp")?;
///     let logits = Tensor::randn([4, 10], DType::F32)?;
///     let target = Tensor::from_slice(&[1i64, 9, -100, 4], [4])?;
///     let single = logits.cross_entropy(&target, CrossEntropyOptions::default())?;
///
///     let logits = distribute_tensor(&logits, &mesh, [Shard(1)])?.requires_grad_(true)?;
///     let (loss, calls) = dtensor::comm::record(|| {
///         let loss = loss_parallel(|| logits.cross_entropy(&target, CrossEntropyOptions::default()))?;
///         loss.backward()?;
///         Ok::<_, Error>(loss)
///     });
///     let names: Vec<_> = calls.iter().map(|call| call.collective.name()).collect();
///     assert_eq!(names, ["all_reduce"; 3]);
///     assert!((loss?.item::<f32>()? - single.item::<f32>()?).abs() < 1e-6);
///     assert_eq!(logits.grad().unwrap().placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub fn loss_parallel<R>(body: impl FnOnce() -> R) -> R {
    LOSS_PARALLEL.within(true, body)
}

/// Operator attribute: true if the operator was applied inside [`loss_parallel`]. It does not affect sharding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LossScope(Aside<bool>);

impl LossScope {
    /// Records whether this thread is inside [`loss_parallel`].
    pub(super) fn current() -> Self {
        LossScope(Aside(LOSS_PARALLEL.get()))
    }

    pub(super) fn is_set(self) -> bool {
        self.0.0
    }

    /// Until the guard is dropped, collectives of merging operators count as explicit if the operator was applied
    /// inside [`loss_parallel`].
    pub(super) fn allow_merging(self) -> Option<Scope<Cell<bool>>> {
        self.is_set().then(allow_merging)
    }
}

/// Returns an error for logits that would have to be redistributed.
pub(super) fn check_logits(op: &'static str, logits: &Tensor) -> Result<()> {
    let Some(layout) = logits.layout() else { return Ok(()) };
    if !layout.placements().iter().any(|p| p.is_partial()) {
        return Ok(());
    }
    let message = format!(
        "loss_parallel: the input's placements must be Shard or Replicate, but are {}: redistribute it first",
        format_list(layout.placements())
    );
    Err(Error::argument(op, message))
}

/// Redistributes targets so that each rank has those of its logits.
#[track_caller]
pub(super) fn place_targets(
    op: &'static str,
    logits: &Tensor,
    target: &Tensor,
    class_dim: usize,
) -> Result<Tensor> {
    check_logits(op, logits)?;
    let Some(layout) = logits.layout() else { return Ok(target.clone()) };
    let classes = class_dim as isize;
    let is_strided = |p: &&Placement| matches!(p, StridedShard { dim, .. } if *dim == classes);
    if let Some(strided) = layout.placements().iter().find(is_strided) {
        let message = format!(
            "loss_parallel: each rank must have a contiguous range of classes, but the input is {strided}: redistribute it first"
        );
        return Err(Error::argument(op, message));
    }
    let without_class_dim = |dim: isize| if dim > classes { dim - 1 } else { dim };
    let target_placements = layout.placements().iter().map(|&p| match p {
        Shard(dim) if dim == classes => Replicate,
        Shard(dim) => Shard(without_class_dim(dim)),
        StridedShard { dim, split_factor } => StridedShard { dim: without_class_dim(dim), split_factor },
        other => other,
    });
    let target_placements: Vec<Placement> = target_placements.collect();
    match target.mesh() {
        Some(mesh) if Some(mesh) == logits.mesh() => return target.redistribute(target_placements),
        // The operator itself returns the error for two meshes.
        Some(_) => return Ok(target.clone()),
        None => {}
    }
    if target_placements.iter().any(|&p| p != Replicate) {
        let message = format!(
            "loss_parallel: the positions of the input are sharded, so the target requires a distributed tensor with placements \
             {}: use `distribute_tensor` or `Tensor::from_local`",
            format_list(&target_placements)
        );
        return Err(Error::argument(op, message));
    }
    replicate_like(op, logits, "target", target)
}

/// Reduces partial placements.
#[track_caller]
pub(super) fn reduce_partials(x: &Tensor) -> Result<Tensor> {
    let Some(layout) = x.layout() else { return Ok(x.clone()) };
    x.redistribute(layout.without_partials().placements())
}

/// Puts an argument of a loss that is equal on all ranks onto the mesh of the logits, replicated.
#[track_caller]
pub(super) fn replicate_like(
    op: &'static str,
    logits: &Tensor,
    argument: &str,
    x: &Tensor,
) -> Result<Tensor> {
    match logits.mesh() {
        Some(mesh) if x.mesh().is_none() => {
            let taker = Taker { by: op, argument: &argument };
            Tensor::from_local_as(x, mesh.clone(), ().into(), FromLocalOptions::default(), taker)
        }
        _ => Ok(x.clone()),
    }
}
