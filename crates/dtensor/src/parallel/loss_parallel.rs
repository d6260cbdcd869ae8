//! Losses over classes that are spread over ranks.

use crate::dispatch::within_loss_parallel;

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
    within_loss_parallel(body)
}
