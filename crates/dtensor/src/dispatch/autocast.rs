//! Mixed precision: a mode of the calling thread, for the length of a scope.
//!
//! What each operator is run in is said by [`Op::precision`]. Inputs are cast by a recorded operator, so that gradients come back
//! in the dtype that a tensor has itself. Casts are made anew for each operator: what the body of a
//! [`checkpoint`](crate::checkpoint) does must not depend on what was cast before it.

use std::panic::Location;

use dtensor_array::mode;
use dtensor_array::origin::{asked_by, on_behalf_of};
use smallvec::SmallVec;

use super::shapes;
use crate::ops::{Op, Precision};
use crate::{Result, Tensor};
use dtensor_array::{DType, Meta};

mode! {
    /// The dtype of the innermost scope.
    static LOW: Cell<Option<DType>> = None;
}

/// Runs `body`, in which operators that gain by it are run in half precision: `dtype` is [`DType::BF16`] or [`DType::F16`].
///
/// - Matrix products and attention cast their inputs to `dtype`, and give results in it.
/// - Losses and [`prod`](Tensor::prod) cast inputs of half precision to single precision.
/// - Everything else is run in the dtype that its inputs have. Where several meet that must be alike, it is
///   the widest of them, so that a result of half precision can be added to one of single precision; but a
///   number without dims takes the dtype of what it meets.
///
/// Tensors of double precision and of integers are not narrowed. These are PyTorch's rules for a processor;
/// with other dtypes than those two, nothing is cast, as there. An operator of one's own is left alone unless
/// it says otherwise ([`Op::precision`](crate::Op::precision)).
///
/// Tensors keep the dtype they have: parameters stay in single precision, and so do their gradients. On a mesh, a cast leaves the
/// layout as it is, but partial sums are reduced before they are narrowed. A backward pass is run without this, also inside
/// `body`: gradients are computed in the dtype of what they are gradients of.
///
/// Scopes nest, the innermost counts, and [`autocast_off`] ends the mode for a part of one.
///
/// ```
/// use dtensor::nn::{Linear, Module};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Linear::new(8, 8, true)?;
/// let (x, target) = (Tensor::ones([4, 8], DType::F32)?, Tensor::zeros([4, 8], DType::F32)?);
/// let loss = autocast(DType::BF16, || {
///     let y = layer.forward(&x)?;
///     assert_eq!(y.dtype(), DType::BF16);
///     assert_eq!(y.add(&x)?.dtype(), DType::F32);
///     y.mse_loss(&target, Reduction::Mean)
/// })?;
/// assert_eq!(loss.dtype(), DType::F32);
/// loss.backward()?;
/// assert_eq!(layer.weight.grad().unwrap().dtype(), DType::F32);
/// # Ok(())
/// # }
/// ```
pub fn autocast<R>(dtype: DType, body: impl FnOnce() -> R) -> R {
    let low = matches!(dtype, DType::BF16 | DType::F16).then_some(dtype);
    LOW.within(low, body)
}

/// Runs `body` without [`autocast`], inside a scope of it too.
///
/// ```
/// use dtensor::prelude::*;
/// use dtensor::{autocast_dtype, autocast_off};
/// # fn main() -> Result<()> {
/// let x = Tensor::ones([2, 2], DType::F32)?;
/// let (low, full) = autocast(DType::F16, || (x.matmul(&x), autocast_off(|| x.matmul(&x))));
/// assert_eq!((low?.dtype(), full?.dtype()), (DType::F16, DType::F32));
/// assert_eq!(autocast_dtype(), None);
/// # Ok(())
/// # }
/// ```
pub fn autocast_off<R>(body: impl FnOnce() -> R) -> R {
    LOW.within(None, body)
}

/// The dtype of the [`autocast`] scope that this thread is in, if it is in one.
pub fn autocast_dtype() -> Option<DType> {
    LOW.get()
}

/// The inputs of an operator in the dtypes that it is run in, if these are not those they have. A cast may
/// have to communicate: what the operator has to say against the inputs it says before.
pub(super) fn cast(
    op: &dyn Op,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> Result<Option<SmallVec<[Tensor; 4]>>> {
    let Some(low) = autocast_dtype() else { return Ok(None) };
    if op.precision() == Precision::AsGiven {
        return Ok(None);
    }
    let wanted = wanted(op, inputs, low);
    if wanted.iter().zip(inputs).all(|(wanted, x)| *wanted == x.dtype()) {
        return Ok(None);
    }
    shapes(op, &cast_metas(op, inputs))?;
    let cast = || inputs.iter().zip(wanted).map(|(x, dtype)| x.to_dtype(dtype)).collect::<Result<_>>();
    on_behalf_of(asked_by(at), cast).map(Some)
}

/// What an operator is told of its inputs: shapes and dtypes as they are once they have been cast, if they are.
pub(crate) fn cast_metas(op: &dyn Op, inputs: &[&Tensor]) -> SmallVec<[Meta; 4]> {
    match autocast_dtype() {
        Some(low) => {
            let dtypes = wanted(op, inputs, low);
            inputs.iter().zip(dtypes).map(|(x, dtype)| Meta { dtype, ..x.meta() }).collect()
        }
        None => inputs.iter().map(|x| x.meta()).collect(),
    }
}

/// The dtypes that an operator is run in where `low` is the dtype of the scope.
fn wanted(op: &dyn Op, inputs: &[&Tensor], low: DType) -> SmallVec<[DType; 4]> {
    let given: SmallVec<[Given; 4]> = inputs.iter().map(|x| Given::of(x)).collect();
    op.precision().among(&given, low)
}

/// A tensor that something made of several operators is to be run on, cast as if it were one.
#[track_caller]
pub(crate) fn prepared(x: &Tensor, precision: Precision) -> Result<Tensor> {
    match autocast_dtype() {
        Some(low) => x.to_dtype(precision.among(&[Given::of(x)], low)[0]),
        None => Ok(x.clone()),
    }
}

/// What the dtype that an operator is run in depends on, of one input.
#[derive(Clone, Copy, Debug)]
struct Given {
    dtype: DType,
    has_dims: bool,
}

impl Given {
    fn of(x: &Tensor) -> Self {
        Given { dtype: x.dtype(), has_dims: x.rank() > 0 }
    }
}

fn half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// The dtype that holds what both hold. Neither of the two half precisions holds what the other does.
fn wider(a: DType, b: DType) -> DType {
    match (a, b) {
        (a, b) if a == b => a,
        (a, b) if half(a) && half(b) => DType::F32,
        (a, b) if a.size() >= b.size() => a,
        (_, b) => b,
    }
}

impl Precision {
    /// The dtypes that inputs are cast to where `low` is the dtype of the scope.
    fn among(self, given: &[Given], low: DType) -> SmallVec<[DType; 4]> {
        let floats = || given.iter().filter(|x| x.dtype.is_float());
        let to = match self {
            Precision::AsGiven => None,
            Precision::Low => Some(low),
            Precision::Single => floats().any(|x| half(x.dtype)).then_some(DType::F32),
            Precision::Widest => {
                let any = floats().any(|x| x.has_dims);
                floats().filter(|x| x.has_dims || !any).map(|x| x.dtype).reduce(wider)
            }
        };
        let cast = |x: &Given| match to {
            // Doubles follow others only where they are numbers beside a tensor.
            Some(to) if x.dtype.is_float() && (x.dtype != DType::F64 || self == Precision::Widest) => to,
            _ => x.dtype,
        };
        given.iter().map(cast).collect()
    }
}

#[cfg(test)]
mod tests {
    use DType::{BF16, F16, F32, F64, I64, U8};

    use super::*;

    #[test]
    fn dtypes_are_chosen_by_precision() {
        let cases: [(Precision, &[DType], &[DType]); 12] = [
            (Precision::AsGiven, &[F32, BF16, F16], &[F32, BF16, F16]),
            (Precision::AsGiven, &[I64, F64, BF16], &[I64, F64, BF16]),
            (Precision::Low, &[F32, BF16, F16], &[BF16, BF16, BF16]),
            (Precision::Low, &[F32, F64, I64, U8], &[BF16, F64, I64, U8]),
            (Precision::Single, &[F32, BF16, F16], &[F32, F32, F32]),
            (Precision::Single, &[BF16, F64, I64], &[F32, F64, I64]),
            (Precision::Single, &[F64, F32], &[F64, F32]),
            (Precision::Widest, &[BF16, F32], &[F32, F32]),
            (Precision::Widest, &[F16, BF16, F16], &[F32, F32, F32]),
            (Precision::Widest, &[U8, F16, F16], &[U8, F16, F16]),
            (Precision::Widest, &[F32, I64, F64, BF16], &[F64, I64, F64, F64]),
            (Precision::Widest, &[], &[]),
        ];
        for (precision, given, want) in cases {
            for has_dims in [true, false] {
                let given: Vec<_> = given.iter().map(|&dtype| Given { dtype, has_dims }).collect();
                assert_eq!(precision.among(&given, BF16)[..], *want, "{precision:?} {given:?}");
            }
        }
    }

    #[test]
    fn numbers_without_dims_follow_those_that_have_some() {
        /// Ranks and dtypes of the inputs, and the dtypes they are to have.
        type Case<'a> = (Precision, &'a [(usize, DType)], &'a [DType]);
        let cases: [Case<'_>; 9] = [
            (Precision::Widest, &[(0, F32), (1, BF16)], &[BF16, BF16]),
            (Precision::Widest, &[(1, BF16), (0, F64)], &[BF16, BF16]),
            (Precision::Widest, &[(1, BF16), (0, F16)], &[BF16, BF16]),
            (Precision::Widest, &[(0, BF16), (2, F32)], &[F32, F32]),
            (Precision::Widest, &[(0, F64), (1, F32), (1, F16)], &[F32, F32, F32]),
            (Precision::Widest, &[(1, U8), (0, F32), (0, BF16)], &[U8, F32, F32]),
            (Precision::Widest, &[(0, F32), (0, BF16)], &[F32, F32]),
            (Precision::Low, &[(0, F32), (0, F64), (2, F32)], &[BF16, F64, BF16]),
            (Precision::Single, &[(0, BF16), (2, F64)], &[F32, F64]),
        ];
        for (precision, given, want) in cases {
            let given: Vec<_> =
                given.iter().map(|&(rank, dtype)| Given { dtype, has_dims: rank > 0 }).collect();
            assert_eq!(precision.among(&given, BF16)[..], *want, "{precision:?} {given:?}");
        }
    }
}
