//! Losses over classes that are sharded: everything about [`loss_parallel`] but the losses themselves.

use std::cell::Cell;

use dtensor_array::mode;
use dtensor_array::mode::Scope;

use super::Aside;
use crate::dispatch::allow_merging;
use crate::{Error, Result, Tensor};
use dtensor_layout::{Placement, Replicate, Shard, StridedShard, shown};

mode! {
    static LOSS_PARALLEL: Cell<bool> = false;
}

/// Runs `body`, in which [`cross_entropy`](crate::Tensor::cross_entropy), [`nll_loss`](crate::Tensor::nll_loss),
/// [`log_softmax`](crate::Tensor::log_softmax) and [`softmax`](crate::Tensor::softmax) leave their scores where they are.
///
/// Scores that are cut along their classes, by one mesh dim or several, so that ranks have classes one after
/// the other, are not brought together, inside such a scope or outside: of each position, ranks reduce the
/// largest score, the sum of exponentials and the target's score. The gradient of cross-entropy needs no
/// communication at all, wherever it is computed; that of `softmax` and `log_softmax` by themselves reduces
/// one number per position. What the scope adds:
///
/// - A loss that would have to move scores for another reason is refused. Partial values are such a reason, and classes that do not
///   lie one after the other.
/// - Targets go to where the positions are that they belong to. A target that is not distributed is taken to be the same on all
///   ranks, unless positions are cut as well; so are class weights.
/// - The communication is asked for, in gradients too: [`explicit_communication`](crate::explicit_communication) lets it pass.
///
/// ```
/// use dtensor::parallel::loss_parallel;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(3, |world| {
///     let mesh = DeviceMesh::new(&world, [3], "tp")?;
///     let logits = Tensor::randn([4, 10], DType::F32)?;
///     let target = Tensor::from_slice(&[1i64, 9, -100, 4], [4])?;
///     let whole = logits.cross_entropy(&target, CrossEntropy::default())?;
///
///     let logits = distribute_tensor(&logits, &mesh, [Shard(1)])?.requires_grad_(true)?;
///     let (loss, calls) = dtensor::comm::record(|| {
///         let loss = loss_parallel(|| logits.cross_entropy(&target, CrossEntropy::default()))?;
///         loss.backward()?;
///         Ok::<_, Error>(loss)
///     });
///     let names: Vec<_> = calls.iter().map(|call| call.collective.name()).collect();
///     assert_eq!(names, ["all_reduce"; 3]);
///     assert!((loss?.item::<f32>()? - whole.item::<f32>()?).abs() < 1e-6);
///     assert_eq!(logits.grad().unwrap().placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub fn loss_parallel<R>(body: impl FnOnce() -> R) -> R {
    LOSS_PARALLEL.within(true, body)
}

/// An attribute of an operator: whether it was applied inside [`loss_parallel`]. It makes no difference to how shards are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Asked(Aside<bool>);

impl Asked {
    pub(super) fn now() -> Self {
        Asked(Aside(LOSS_PARALLEL.get()))
    }

    pub(super) fn is_set(self) -> bool {
        self.0.0
    }

    /// Lets what ranks find out together pass as asked for, until the guard is dropped.
    pub(super) fn allow(self) -> Option<Scope<Cell<bool>>> {
        self.is_set().then(allow_merging)
    }
}

/// Returns an error for scores that would have to be redistributed.
pub(super) fn check_scores(op: &'static str, scores: &Tensor) -> Result<()> {
    let Some(layout) = scores.layout() else { return Ok(()) };
    if !layout.placements().iter().any(|p| p.is_partial()) {
        return Ok(());
    }
    let message = format!(
        "loss_parallel: the input's placements must be Shard or Replicate, but are {}: redistribute it first",
        shown(layout.placements())
    );
    Err(Error::argument(op, message))
}

/// Redistributes targets to the ranks that have the positions they belong to.
#[track_caller]
pub(super) fn place_targets(
    op: &'static str,
    scores: &Tensor,
    target: &Tensor,
    class_dim: usize,
) -> Result<Tensor> {
    check_scores(op, scores)?;
    let Some(layout) = scores.layout() else { return Ok(target.clone()) };
    let classes = class_dim as isize;
    let scattered = |p: &&Placement| matches!(p, StridedShard { dim, .. } if *dim == classes);
    if let Some(strided) = layout.placements().iter().find(scattered) {
        let message = format!(
            "loss_parallel: ranks must have classes one after the other, but the input is {strided}: redistribute it first"
        );
        return Err(Error::argument(op, message));
    }
    let before = |dim: isize| if dim > classes { dim - 1 } else { dim };
    let wanted = layout.placements().iter().map(|&p| match p {
        Shard(dim) if dim == classes => Replicate,
        Shard(dim) => Shard(before(dim)),
        StridedShard { dim, split_factor } => StridedShard { dim: before(dim), split_factor },
        other => other,
    });
    let wanted: Vec<Placement> = wanted.collect();
    match target.mesh() {
        Some(mesh) if Some(mesh) == scores.mesh() => return target.redistribute(wanted),
        // It is refused where both meet.
        Some(_) => return Ok(target.clone()),
        None => {}
    }
    if wanted.iter().any(|&p| p != Replicate) {
        let message = format!(
            "loss_parallel: positions are spread over ranks, so that the target requires a distributed tensor with placements \
             {}: say `distribute_tensor` or `Tensor::from_local`",
            shown(&wanted)
        );
        return Err(Error::argument(op, message));
    }
    replicate_beside(scores, target)
}

/// Reduces partial values.
#[track_caller]
pub(super) fn without_partials(x: &Tensor) -> Result<Tensor> {
    let Some(layout) = x.layout() else { return Ok(x.clone()) };
    x.redistribute(layout.without_partials().placements())
}

/// Puts a tensor that is the same on all ranks onto the mesh of the scores.
#[track_caller]
pub(super) fn replicate_beside(scores: &Tensor, x: &Tensor) -> Result<Tensor> {
    match scores.mesh() {
        Some(mesh) if x.mesh().is_none() => Tensor::from_local(x, mesh, ()),
        _ => Ok(x.clone()),
    }
}
