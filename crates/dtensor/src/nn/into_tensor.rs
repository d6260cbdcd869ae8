//! [`IntoTensor`]: the tensors that `forward` accepts.

use std::borrow::Borrow;

use crate::{Result, Tensor};

/// A tensor argument of `forward`: a `&Tensor`, a `Tensor`, or the `Result<Tensor>` of another call, whose error is returned.
///
/// If a module's `forward` is written with a `&Tensor`, [`#[forward]`](super::forward) lets callers pass any of these.
///
/// ```
/// use dtensor::nn::{Linear, Relu};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let (net1, relu, net2) = (Linear::new(2, 4, true)?, Relu::new(), Linear::new(4, 2, true)?);
/// let x = Tensor::ones([3, 2], DType::F32)?;
/// let y = net2.forward(relu.forward(net1.forward(&x)))?;
/// assert_eq!(y.dims(), [3, 2]);
/// assert!(net2.forward(net1.forward(&y.flatten_all()?)).is_err());
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a tensor",
    note = "`forward` takes a `&Tensor`, a `Tensor` or a `Result<Tensor>`"
)]
pub trait IntoTensor {
    /// The tensor, owned or borrowed.
    type Held: Borrow<Tensor>;

    /// Returns the tensor, or the error in the `Result`.
    fn into_tensor(self) -> Result<Self::Held>;
}

impl<'a> IntoTensor for &'a Tensor {
    type Held = &'a Tensor;

    #[inline]
    fn into_tensor(self) -> Result<&'a Tensor> {
        Ok(self)
    }
}

impl IntoTensor for Tensor {
    type Held = Tensor;

    #[inline]
    fn into_tensor(self) -> Result<Tensor> {
        Ok(self)
    }
}

impl IntoTensor for Result<Tensor> {
    type Held = Tensor;

    #[inline]
    fn into_tensor(self) -> Result<Tensor> {
        self
    }
}
