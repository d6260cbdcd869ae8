//! [`Together`]: collectives inside an operator whose result depends on the shards of several ranks.

use super::Arrays;
use dtensor_array::Array;
use dtensor_array::ReduceOp;

/// The most rounds of collectives in one operator.
pub(crate) const ROUNDS: usize = 32;

/// The next step of an operator that is sharded along a [merging](crate::op::Rule::merging) factor: a collective, or
/// the result. [`Op::together`](crate::op::Op::together) returns it. All ranks must return the same variant, with
/// arrays of the same shapes.
///
/// This example reduces a sum over the ranks, then divides each shard by it:
///
/// ```
/// use dtensor::comm::{ReduceOp, launch};
/// use dtensor::{DeviceMesh, Array, Result, Shard, Tensor};
/// use dtensor::op::{Here, Arrays, Meta, Metas, Op, Rule, Together, apply};
/// use dtensor::distribute_tensor;
///
/// /// Divides each element of a vector by the sum of all elements.
/// #[derive(Clone, Debug, PartialEq, Eq, Hash)]
/// struct Share;
///
/// fn shares(x: &Array, total: f32) -> Result<Arrays> {
///     let shares = x.with_host_slice(|x: &[f32]| x.iter().map(|x| x / total).collect())?;
///     Ok([Array::from_vec(shares, x.dims())?].into())
/// }
///
/// impl Op for Share {
///     fn name(&self) -> &'static str {
///         "share"
///     }
///     fn shape(&self, x: &[Meta]) -> Result<Metas> {
///         Ok([x[0].clone()].into())
///     }
///     fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
///         Rule::of("n -> n", x, out)?.merging_along("n")
///     }
///     fn kernel(&self, x: &[&Array], _: &Here) -> Result<Arrays> {
///         shares(x[0], x[0].copy_to_host::<f32>()?.iter().sum())
///     }
///     fn together(&self, x: &[&Array], known: &[Array], _: &Here) -> Result<Together> {
///         Ok(match known {
///             [] => {
///                 let sum: f32 = x[0].copy_to_host::<f32>()?.iter().sum();
///                 Together::Reduce(Array::from_vec(vec![sum], &[])?, ReduceOp::Sum)
///             }
///             [total, ..] => Together::Done(shares(x[0], total.copy_to_host()?[0])?),
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
///
/// If the merging factor is not a dim of the output, ranks usually stack what each of them found:
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{DeviceMesh, Array, Result, Shard, Shape, Tensor};
/// use dtensor::op::{Here, Arrays, Meta, Metas, Op, Rule, apply};
/// use dtensor::{Replicate, distribute_tensor};
/// use dtensor::op::Together;
///
/// /// Computes the largest minus the smallest element of a vector.
/// #[derive(Clone, Debug, PartialEq, Eq, Hash)]
/// struct Spread;
///
/// /// Returns the smallest and the largest value.
/// fn ends(values: &[f32]) -> [f32; 2] {
///     let fold = |f: fn(f32, f32) -> f32, from| values.iter().copied().fold(from, f);
///     [fold(f32::min, f32::INFINITY), fold(f32::max, f32::NEG_INFINITY)]
/// }
///
/// impl Op for Spread {
///     fn name(&self) -> &'static str {
///         "spread"
///     }
///     fn shape(&self, x: &[Meta]) -> Result<Metas> {
///         Ok([Meta { shape: Shape::scalar(), ..x[0].clone() }].into())
///     }
///     fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
///         Ok(Rule::of("n -> ", x, out)?.merging(2 * 4))
///     }
///     fn kernel(&self, x: &[&Array], _: &Here) -> Result<Arrays> {
///         let [low, high] = ends(&x[0].copy_to_host()?);
///         Ok([Array::from_vec(vec![high - low], &[])?].into())
///     }
///     fn together(&self, x: &[&Array], known: &[Array], here: &Here) -> Result<Together> {
///         if let [all_ends] = known {
///             return Ok(Together::Done(self.kernel(&[all_ends], here)?));
///         }
///         let ends = Array::from_vec(ends(&x[0].copy_to_host()?).into(), &[2])?;
///         Ok(Together::Stack([ends].into()))
///     }
/// }
///
/// # fn main() -> Result<()> {
/// launch(3, |world| {
///     let mesh = DeviceMesh::new(&world, [3], ())?;
///     let x = Tensor::from_slice(&[3f32, -1., 4., 1., 5., -9., 2.], [7])?;
///     let spread = apply(Spread, &[&distribute_tensor(&x, &mesh, [Shard(0)])?])?;
///     assert_eq!((spread.placements(), spread.item::<f32>()?), (&[Replicate][..], 14.0));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub enum Together {
    /// Stacks each of these arrays over all ranks along a new first dim. The results are appended to `known`.
    Stack(Arrays),
    /// Reduces this array over all ranks. The result is appended to `known`.
    Reduce(Array, ReduceOp),
    /// Ends with this rank's shards of the outputs.
    Done(Arrays),
}
