//! [`Together`]: what ranks do to find out what none of them knows alone.

use super::Locals;
use crate::comm::ReduceOp;
use crate::engine::Local;

/// How often ranks may ask each other for one operator.
pub(crate) const ROUNDS: usize = 32;

/// The next thing that ranks do together where a [merging](crate::Rule::merging) factor is cut: an answer of
/// [`Op::together`](crate::Op::together). All ranks must give the same kind of answer, with values of the same shapes.
///
/// ```
/// use dtensor::comm::{ReduceOp, launch};
/// use dtensor::{DeviceMesh, Here, Local, Locals, Meta, Metas, Op, Result, Rule, Shard, Tensor, Together, apply};
/// use dtensor::distribute_tensor;
///
/// /// Each element of a vector as a share of the sum of all.
/// #[derive(Clone, Debug, PartialEq, Eq, Hash)]
/// struct Share;
///
/// fn shares(x: &Local, total: f32) -> Result<Locals> {
///     let shares = x.to_vec::<f32>()?.into_iter().map(|x| x / total).collect();
///     Ok([Local::from_vec(shares, x.dims())?].into_iter().collect())
/// }
///
/// impl Op for Share {
///     fn name(&self) -> &'static str {
///         "share"
///     }
///     fn shape(&self, x: &[Meta]) -> Result<Metas> {
///         Ok([x[0].clone()].into_iter().collect())
///     }
///     fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
///         Rule::of("n -> n", x, out)?.merging_along("n")
///     }
///     fn kernel(&self, x: &[&Local], _: &Here) -> Result<Locals> {
///         shares(x[0], x[0].to_vec::<f32>()?.iter().sum())
///     }
///     fn together(&self, x: &[&Local], known: &[Local], _: &Here) -> Result<Together> {
///         Ok(match known {
///             [] => {
///                 let sum: f32 = x[0].to_vec::<f32>()?.iter().sum();
///                 Together::Reduce(Local::from_vec(vec![sum], &[])?, ReduceOp::Sum)
///             }
///             [total, ..] => Together::Done(shares(x[0], total.to_vec()?[0])?),
///         })
///     }
/// }
///
/// # fn main() -> Result<()> {
/// launch(3, |world| {
///     let mesh = DeviceMesh::new(&world, [3], ())?;
///     let x = Tensor::from_slice(&[1f32, 2., 3., 2.], [4])?;
///     let shares = apply(Share, &[&distribute_tensor(&x, &mesh, [Shard(0)])?])?;
///     assert_eq!(shares.placements(), [Shard(0)]);
///     assert_eq!(shares.full_tensor()?.to_vec::<f32>()?, [0.125, 0.25, 0.375, 0.25]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub enum Together {
    /// Each of these values of all ranks, stacked along a new first dim, is known next.
    Stack(Locals),
    /// The reduction of this value of all ranks is known next.
    Reduce(Local, ReduceOp),
    /// This rank's parts of the outputs.
    Done(Locals),
}
