//! Mixed precision: a scoped mode of the calling thread that casts the inputs of operators.
//!
//! [`Op::precision`] chooses the dtype that an operator runs in. A recorded operator casts the inputs, so that a gradient has the
//! dtype of its tensor. Casts are not cached: the body of a [`checkpoint`](crate::checkpoint()) would otherwise depend on the casts
//! made before it.

use std::panic::Location;

use dtensor_array::mode;
use dtensor_array::origin::{caller_line, with_caller_line};
use smallvec::SmallVec;

use super::shapes;
use crate::ops::{Op, Precision};
use crate::{Result, Tensor};
use dtensor_array::{DType, Meta};

mode! {
    /// The dtype of the innermost scope.
    static LOW: Cell<Option<DType>> = None;
}

/// Runs `body` with automatic mixed precision in `dtype`, which is [`DType::BF16`] or [`DType::F16`].
///
/// - Matrix products and attention cast their inputs to `dtype` and return results in it.
/// - Losses and [`prod`](Tensor::prod) cast half-precision inputs to single precision.
/// - Other operators run in the dtype of their inputs. If several inputs must have one dtype, it is the widest of them, so that
///   a half-precision result can be added to a single-precision one. A scalar (0-d) tensor takes the dtype of the others.
///
/// Double-precision and integer tensors are not narrowed. These are PyTorch's rules for CPUs; as there, any other `dtype` casts
/// nothing. An operator that you write is not cast unless it implements [`Op::precision`](crate::op::Op::precision).
///
/// Parameters and their gradients stay in single precision. On a mesh, a cast keeps the layout, except that partial sums are
/// reduced before they are narrowed. A backward pass runs without autocast, also inside `body`: a gradient is computed in the
/// dtype of its tensor.
///
/// Scopes nest, and the innermost one counts. [`autocast_off`] turns autocast off inside a scope.
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

/// Runs `body` without [`autocast`], even inside a scope of it.
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

/// Returns the dtype of the innermost [`autocast`] scope of this thread, if there is one.
pub fn autocast_dtype() -> Option<DType> {
    LOW.get()
}

/// Casts the inputs of an operator; `None` if they already have the right dtypes. A cast may communicate, so the shape rule is
/// checked first.
pub(super) fn cast(
    op: &dyn Op,
    inputs: &[&Tensor],
    at: &'static Location<'static>,
) -> Result<Option<SmallVec<[Tensor; 4]>>> {
    let Some(low) = autocast_dtype() else { return Ok(None) };
    if op.precision() == Precision::AsGiven {
        return Ok(None);
    }
    let dtypes = target_dtypes(op, inputs, low);
    if dtypes.iter().zip(inputs).all(|(dtype, x)| *dtype == x.dtype()) {
        return Ok(None);
    }
    shapes(op, &cast_metas(op, inputs))?;
    let cast = || inputs.iter().zip(dtypes).map(|(x, dtype)| x.to_dtype(dtype)).collect::<Result<_>>();
    with_caller_line(caller_line(at), cast).map(Some)
}

/// Returns the shapes and dtypes of the inputs as the operator will see them, after autocast.
pub(crate) fn cast_metas(op: &dyn Op, inputs: &[&Tensor]) -> SmallVec<[Meta; 4]> {
    match autocast_dtype() {
        Some(low) => {
            let dtypes = target_dtypes(op, inputs, low);
            inputs.iter().zip(dtypes).map(|(x, dtype)| Meta { dtype, ..x.meta() }).collect()
        }
        None => inputs.iter().map(|x| x.meta()).collect(),
    }
}

/// Returns the dtypes that the inputs of an operator are cast to; `low` is the dtype of the scope.
fn target_dtypes(op: &dyn Op, inputs: &[&Tensor], low: DType) -> SmallVec<[DType; 4]> {
    let inputs: SmallVec<[InputType; 4]> = inputs.iter().map(|x| InputType::of(x)).collect();
    op.precision().target_dtypes(&inputs, low)
}

/// Casts the input of a function that is made of several operators, as if the function were one operator.
#[track_caller]
pub(crate) fn cast_input(x: &Tensor, precision: Precision) -> Result<Tensor> {
    match autocast_dtype() {
        Some(low) => x.to_dtype(precision.target_dtypes(&[InputType::of(x)], low)[0]),
        None => Ok(x.clone()),
    }
}

/// The dtype of an input, and whether it is a scalar (0-d): all that the choice of a dtype depends on.
#[derive(Clone, Copy, Debug)]
struct InputType {
    dtype: DType,
    has_dims: bool,
}

impl InputType {
    fn of(x: &Tensor) -> Self {
        InputType { dtype: x.dtype(), has_dims: x.ndim() > 0 }
    }
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Returns the narrowest dtype that represents the values of both. That of the two half precisions is `F32`.
fn wider(a: DType, b: DType) -> DType {
    match (a, b) {
        (a, b) if a == b => a,
        (a, b) if is_half(a) && is_half(b) => DType::F32,
        (a, b) if a.size() >= b.size() => a,
        (_, b) => b,
    }
}

impl Precision {
    /// Returns the dtypes that inputs are cast to; `low` is the dtype of the scope.
    fn target_dtypes(self, inputs: &[InputType], low: DType) -> SmallVec<[DType; 4]> {
        let floats = || inputs.iter().filter(|x| x.dtype.is_float());
        let to = match self {
            Precision::AsGiven => None,
            Precision::Low => Some(low),
            Precision::Single => floats().any(|x| is_half(x.dtype)).then_some(DType::F32),
            Precision::Widest => {
                let any = floats().any(|x| x.has_dims);
                floats().filter(|x| x.has_dims || !any).map(|x| x.dtype).reduce(wider)
            }
        };
        let cast = |x: &InputType| match to {
            // `Widest` narrows an `F64` input only if it is a scalar beside a tensor; the other precisions leave it alone.
            Some(to) if x.dtype.is_float() && (x.dtype != DType::F64 || self == Precision::Widest) => to,
            _ => x.dtype,
        };
        inputs.iter().map(cast).collect()
    }
}

#[cfg(test)]
mod tests {
    use DType::{BF16, F16, F32, F64, I64, U8};

    use super::*;

    #[test]
    fn precision_chooses_the_dtypes() {
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
                let inputs: Vec<_> = given.iter().map(|&dtype| InputType { dtype, has_dims }).collect();
                assert_eq!(precision.target_dtypes(&inputs, BF16)[..], *want, "{precision:?} {inputs:?}");
            }
        }
    }

    #[test]
    fn scalars_take_the_dtype_of_tensors_with_dims() {
        /// Number of dims and dtype of each input, and the expected dtypes.
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
            let inputs: Vec<_> =
                given.iter().map(|&(ndim, dtype)| InputType { dtype, has_dims: ndim > 0 }).collect();
            assert_eq!(precision.target_dtypes(&inputs, BF16)[..], *want, "{precision:?} {inputs:?}");
        }
    }
}
